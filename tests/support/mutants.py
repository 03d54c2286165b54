"""Checkpoints with one thing wrong or merely different: the packaged pair with one field or tensor changed.

Weights of mutated tensors are a header and no data: whoever reads them only asks for names, dtypes and shapes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash_sglang.checkpoint.files import tensor_facts
from dflash_sglang.pair import pair_directories

WEIGHTS = "model.safetensors"
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
MORE_TENSORS = {"lm_head.weight": (320, 256), "layers.3.mlp.up_proj.weight": (1024, 256), "odd": (2,)}
INDICES = {
    "an index of a file that is not there": '{"weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}',
    "an index of nothing": "[1]",
}
# fmt: on


@dataclass(frozen=True)
class Mutant:
    """``write``: puts the checkpoint into a directory. ``of``: "draft" or "target". ``field``: of the config, the
    last part of its path; empty where files or tensors are changed."""

    name: str
    of: str
    write: Callable[[Path], None]
    field: str = ""


def mutants() -> Iterator[Mutant]:
    """All of them, in the same order each time; their names differ."""
    pair = {role: Path(directory) for role, directory in pair_directories().items()}
    config = json.loads((pair["draft"] / "config.json").read_text())
    fields = {**config, **{f"dflash_config.{key}": value for key, value in config["dflash_config"].items()}}
    for field, value in fields.items():
        for other in (GONE, *OTHERS[type(value)], *PLAUSIBLE.get(field, ())):
            yield _changed("draft", pair["draft"], field, other)
    for role, added in (("draft", ADDED), ("target", TARGET)):
        for field, values in added.items():
            for value in values:
                yield _changed(role, pair[role], field, value)
    for role in pair:
        for name, text in CONFIGS.items():
            yield Mutant(f"{name} {role} config", role, partial(_write_text, pair[role], text))
    yield from _tensor_mutants(pair["draft"])


def _tensor_mutants(draft: Path) -> Iterator[Mutant]:
    whole = {name: (facts.dtype, facts.shape) for name, facts in tensor_facts(draft).items()}
    for name, (dtype, shape) in whole.items():
        if not name.startswith(("layers.1.", "layers.2.")):  # a layer stands for all
            without = {other: facts for other, facts in whole.items() if other != name}
            yield Mutant(f"without {name}", "draft", partial(_write_header, draft, without))
            shorter = {**whole, name: (dtype, (shape[0] - 1, *shape[1:]))}
            yield Mutant(f"short {name}", "draft", partial(_write_header, draft, shorter))
    for name, shape in MORE_TENSORS.items():
        yield Mutant(f"with {name}", "draft", partial(_write_header, draft, {**whole, name: ("BF16", shape)}))
    for size in (0, 7, 100, 4000, 6_299_935):
        yield Mutant(f"weights cut after {size} bytes", "draft", partial(_write_cut, draft, size))
    for name, text in INDICES.items():
        yield Mutant(name, "draft", partial(_write_beside, draft, text))


def _changed(role: str, source: Path, field: str, value: Any) -> Mutant:
    shown = "gone" if value is GONE else json.dumps(value)
    change = partial(_write_field, source, field, value)
    return Mutant(f"{role} {field} {shown}", role, change, field.rpartition(".")[2])


def _write_field(source: Path, field: str, value: Any, directory: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    outer = config
    if "." in field:
        outer, field = config["dflash_config"], field.partition(".")[2]
    if value is GONE:
        del outer[field]
    else:
        outer[field] = value
    _write_text(source, json.dumps(config), directory)


def _write_text(source: Path, text: str, directory: Path) -> None:
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "config.json").unlink()
    if text:
        (directory / "config.json").write_text(text)


def _write_header(source: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], directory: Path) -> None:
    from tests.unit.startup.test_published import write_header

    shutil.copy(source / "config.json", directory)
    write_header(directory / WEIGHTS, dict(tensors))


def _write_cut(source: Path, size: int, directory: Path) -> None:
    shutil.copy(source / "config.json", directory)
    (directory / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes()[:size])


def _write_beside(source: Path, text: str, directory: Path) -> None:
    _write_text(source, (source / "config.json").read_text(), directory)
    (directory / "model.safetensors.index.json").write_text(text)
