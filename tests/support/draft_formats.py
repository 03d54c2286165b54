"""Draft checkpoints in the formats of the field, made from z-lab ones: random drafts and the trained pair's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny import draft_config, draft_tensors, write_checkpoint

DFLASH_FIELDS = ("architectures", "block_size", "dflash_config", "num_target_layers", "sliding_window_non_causal")

DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def speculators_config(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A z-lab config.json as speculators writes it: the decoder nested, layer ids + 1, no model type."""
    nested = config["dflash_config"]
    decoder = {key: value for key, value in config.items() if key not in (*DFLASH_FIELDS, "dtype", "torch_dtype")}
    exported = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "core.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "block_size": config["block_size"],
        "draft_vocab_size": config["vocab_size"],
        "dtype": config.get("dtype", "float32"),
        "mask_token_id": nested["mask_token_id"],
        "projector_type": "dflash",
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.get("sliding_window_non_causal", False),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}],
            "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "speculators_model_type": "dflash",
        "target_hidden_size": None,
        "transformer_layer_config": decoder,
        **overrides,
    }
    return {key: value for key, value in exported.items() if key != "dflash_config"}


def speculators_dflash2(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A z-lab DFlash2 config.json in the speculators format, sliding layers as they are there by default."""
    sizes = {key: config["dflash_config"].get(key) for key in DFLASH2_FIELDS}
    block = config["dflash_config"].get("block_size")
    fields = dict(
        sizes,
        speculators_model_type="dflash2",
        architectures=["DFlash2DraftModel"],
        sliding_window_non_causal=None,
    )
    written = speculators_config({**config, "block_size": block}, **{**fields, **overrides})
    return {key: value for key, value in written.items() if value is not None}


def vocabulary_tensors(kept: list[int], vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of a head that knows the target's ids `kept`, in this order."""
    ids = torch.tensor(kept)
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5


def sinks(config: dict[str, Any], seed: int = 5) -> dict[str, Tensor]:
    """A sink per head and layer, of the size of a likely key's score."""
    values = 2 * matrix(config["num_hidden_layers"], config["num_attention_heads"], seed)
    return {f"layers.{i}.self_attn.attention_sink_bias": row.contiguous() for i, row in enumerate(values)}


KEPT = list(range(0, 320, 7))  # the target's ids that a reduced vocabulary knows, the mask not among them


def speculators(directory: Path, own: tuple[str, ...], kept: list[int] | None = None, **zlab: Any) -> Path:
    """A tiny draft in the speculators format with the modules `own` ("head", "embedding") of its own."""
    config = draft_config(**zlab)
    tensors = draft_tensors(config)
    if "embedding" in own:
        tensors["embed_tokens.weight"] = matrix(config["vocab_size"], config["hidden_size"], 11)
    rows = config["vocab_size"] if kept is None else len(kept)
    if "head" in own:
        tensors["lm_head.weight"] = matrix(rows, config["hidden_size"], 12)
    if kept is not None:
        tensors |= vocabulary_tensors(kept, config["vocab_size"])
    return write_checkpoint(directory, speculators_config(config, draft_vocab_size=rows), tensors)


def zlab(directory: Path, tensors: dict[str, Tensor] | None = None, **overrides: Any) -> Path:
    """A tiny z-lab draft with `tensors` beside its own."""
    config = draft_config(**overrides)
    return write_checkpoint(directory, config, draft_tensors(config) | (tensors or {}))


def with_mask_file(directory: Path, saved: Any = None) -> Path:
    zlab(directory)
    row = 3 * matrix(1, 64, 13)[0]
    torch.save({"embedding": row, "mask_token_id": 3} if saved is None else saved, directory / "mask_embedding.pt")
    return directory


FORMATS: dict[str, Any] = {
    "speculators with its own head and embedding": lambda d: speculators(d, ("head", "embedding")),
    "speculators with a reduced vocabulary": lambda d: speculators(d, ("head", "embedding"), KEPT),
    "speculators with a reduced head and the target's embedding": lambda d: speculators(d, ("head",), KEPT),
    "speculators with nothing of its own": lambda d: speculators(d, ()),
    "speculators, sliding layers non-causal": lambda d: speculators(d, (), sliding_window_non_causal=True),
    "z-lab with its own embedding, the mask beyond the target's vocabulary": lambda d: zlab(
        d,
        {"embed_tokens.weight": matrix(384, 64, 11)},
        has_embed_tokens=True,
        vocab_size=384,
        dflash_config={"mask_token_id": 383},
    ),
    "z-lab with its own head": lambda d: zlab(d, {"lm_head.weight": matrix(320, 64, 12)}, has_lm_head=True),
    "z-lab with padding behind its own head": lambda d: zlab(
        d, {"lm_head.weight": torch.cat((matrix(320, 64, 12), 100 * matrix(64, 64, 14)))}, draft_vocab_size=384
    ),
    "z-lab with a head that its config does not tell of": lambda d: zlab(
        d, {"model.lm_head.weight": matrix(320, 64, 12)}
    ),
    "z-lab with mask_embedding.pt": with_mask_file,
    "z-lab with mask_embedding.pt of a tensor": lambda d: with_mask_file(d, 3 * matrix(1, 64, 13)),
    "z-lab with a mask_embedding tensor": lambda d: zlab(d, {"mask_embedding": 3 * matrix(1, 64, 13)}),
    "z-lab with attention sinks and a value scale": lambda d: zlab(
        d,
        sinks(draft_config()),
        dflash_config={"attention_sink_bias": True, "attention_value_scale": 0.612},
    ),
    "z-lab with scaled embeddings and scaled, capped logits": lambda d: zlab(
        d,
        dflash_config={
            "input_embedding_scale": 2.5,
            "output_multiplier": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
}
