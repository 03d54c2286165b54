"""Checkpoints with one thing wrong or merely different: the packaged pair with one field of a config changed.

What is wrong with tensors and files is shown by `startup/test_presence` and `startup/test_refusals`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from training.pair import pair_directories

Facts = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""
GONE = object()
FULL = ["full_attention"]
# By the type of a field's value, values of another type and values that are out of range or merely odd.
OTHERS: dict[type, tuple[Any, ...]] = {
    int: ("8", [1], 2.5, True, 0, -1, 2**31),
    float: ("x", [], 0.0, -1.0),
    bool: (1, "false"),
    str: (7, [], "", "unknown"),
    list: (3, "abc", [], {}),
    type(None): (5, "x"),
    dict: ("x", [], 4),
}
# fmt: off
# Values that may well be served.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "block_size": (2, 7, 32),
    "dflash_config.mask_token_id": (319, 320),
    "dflash_config.target_layer_ids": ([4, 2, 0], [0, 2], [1, 2, 3], [0, 2, 5], [0, 0, 4]),
    "layer_types": (FULL * 3, FULL * 2, ["sliding_attention"] * 3, ["linear_attention"] * 3),
    "sliding_window": (1, 4096), "max_position_embeddings": (16, 1 << 20), "rope_theta": (1.0, 1e6),
    "rope_scaling": ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2}, {"factor": 2}),
    "rms_norm_eps": (1.0,), "vocab_size": (100, 4096), "num_target_layers": (4, 6), "num_attention_heads": (2, 8),
    "num_key_value_heads": (1, 4), "head_dim": (32, 63, 128), "intermediate_size": (512, 2048),
    "num_hidden_layers": (1, 2, 4), "hidden_act": ("gelu", "swigluoai"), "model_type": ("llama",),
    "architectures": (["Qwen3ForCausalLM"], ["Lfm2DSparkDraftModel"]), "dtype": ("float32", "float16"),
}
# Fields that the packaged draft does not have.
ADDED: dict[str, tuple[Any, ...]] = {
    "is_causal": (True, False, "x"), "dflash_config.causal": (True, 3), "sliding_window_non_causal": (True, 0),
    "dflash_config.use_aux_hidden_state": (False,), "dflash_config.attention_mode": ("mla",),
    "dflash_config.projector_type": ("eagle",), "attention_value_scale": (2.0, "x"), "has_lm_head": (True, False),
    "attention_sink_bias": (True,), "draft_vocab_size": (100, "x"), "dflash_config.output_multiplier": (2.0, -1),
    "dflash_config.final_logit_softcapping": (30.0, "x"), "dflash_config.input_embedding_scale": (16.0, []),
    "partial_rotary_factor": (0.5, 2.0), "quantization_config": ({"quant_method": "awq"}, "fp8"),
    "is_hybrid_swa": (True,), "text_config": ({"hidden_size": 128}, 5),
}
TARGET: dict[str, tuple[Any, ...]] = {
    "architectures": (GONE, ["NoSuchModel"], 5, []), "model_type": (GONE, "nothing", 3),
    "hidden_size": (128, "256", 0, GONE), "num_hidden_layers": (3, "5", GONE), "vocab_size": (200, "320"),
    "num_attention_heads": (0, "4"), "rope_parameters": ("x",), "layer_types": (7,), "dtype": ("float99",),
}
CONFIGS = {"no": "", "a list for a": "[]", "half a": '{"architectures": ["DFl', "an empty": "{}"}
# fmt: on


@dataclass(frozen=True)
class Mutant:
    """``of``: "draft" or "target". ``config``: the text of its config.json, which is missing where that is empty.
    ``field``: that differs, the last part of its path; empty where the whole file does."""

    name: str
    of: str
    config: str
    field: str = ""

    def write(self, directory: Path) -> None:
        for file in Path(pair_directories()[self.of]).iterdir():
            (directory / file.name).symlink_to(file)
        (directory / "config.json").unlink()
        if self.config:
            (directory / "config.json").write_text(self.config)


def mutants() -> Iterator[Mutant]:
    """All of them, in the same order each time; their names differ."""
    configs = {role: Path(path, "config.json").read_text() for role, path in pair_directories().items()}
    config = json.loads(configs["draft"])
    fields = {**config, **{f"dflash_config.{key}": value for key, value in config["dflash_config"].items()}}
    others = {field: (GONE, *OTHERS[type(value)], *PLAUSIBLE.get(field, ())) for field, value in fields.items()}
    for role, changes in (("draft", others), ("draft", ADDED), ("target", TARGET)):
        for field, values in changes.items():
            for value in values:
                yield _changed(role, configs[role], field, value)
    for role in configs:
        for name, text in CONFIGS.items():
            yield Mutant(f"{name} {role} config", role, text)


def _changed(role: str, text: str, field: str, value: Any) -> Mutant:
    config = json.loads(text)
    *outer, key = field.split(".")
    inner = config[outer[0]] if outer else config
    if value is GONE:
        del inner[key]
    else:
        inner[key] = value
    shown = "gone" if value is GONE else json.dumps(value)
    return Mutant(f"{role} {field} {shown}", role, json.dumps(config), key)


def write_header(path: Path, tensors: Mapping[str, Facts]) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * {"BF16": 2, "I64": 8}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        os.truncate(file.fileno(), 8 + len(encoded) + end)
