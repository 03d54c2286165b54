"""The config.json of a draft that is to be trained for a target, and the mask token of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.modeling import DraftShape


def default_config(target: Any, mask_token: int, layers: int = 5, block: int = 16) -> dict[str, Any]:
    """A draft's config.json for a target's config: its heads and width, features after five layers, spread evenly.

    A target of few layers gives fewer features.
    """
    last, heads = target.num_hidden_layers, target.num_attention_heads
    first = min(1, last - 1)
    span = max(0, last - 3 - first)
    rope = {**(getattr(target, "rope_parameters", None) or {})}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "num_hidden_layers": layers,
        "num_target_layers": last,
        "block_size": block,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta") or getattr(target, "rope_theta", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": sorted({round(first + i * span / 4) for i in range(5)}),
        },
    }


def named_tokens(target: Any, tokenizer: Any) -> dict[int, str]:
    """The tokens that begin, pad or end text, and what calls them so. target: the model, with both its configs."""
    named: dict[int, str] = {}
    for kind in ("bos_token_id", "pad_token_id", "eos_token_id"):
        for of in (target.config.get_text_config(), target.generation_config, tokenizer):
            ids = getattr(of, kind, None)
            for token in ids if isinstance(ids, list) else [ids]:
                if token is not None:
                    named[token] = kind
    return named


def free_token(target: Any, tokenizer: Any) -> int:
    """A token that text never has: the tokenizer's mask token, else the last special one of no other use.

    Raises SystemExit where there is none.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    used, template = named_tokens(target, tokenizer), str(tokenizer.chat_template or "")
    vocabulary = target.config.get_text_config().vocab_size
    free = [
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and token not in used and token < vocabulary and added.content not in template
    ]
    if not free:
        raise SystemExit(
            "--mask-token is absent: expected a special token of the tokenizer that is neither bos, eos nor pad "
            "nor in the chat template, and there is none; name a token that text never has"
        )
    return max(free)


def check_mask_token(token: Any, option: str, target: Any, tokenizer: Any, text: Mapping[str, Any]) -> None:
    """Raises SystemExit for a mask token that is no token, that ends or pads text, or that some text has.

    text: the ids of each file, by its name.
    """
    vocabulary = target.config.get_text_config().vocab_size
    change = "name a token that text never has, or leave --mask-token and --config out"
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        raise SystemExit(f"{option} {token}: expected 0 to {vocabulary - 1}, the target's vocabulary; {change}")
    kind = named_tokens(target, tokenizer).get(token)
    if kind in ("eos_token_id", "pad_token_id"):
        raise SystemExit(f"{option} {token}: it is the target's {kind}, expected another token; {change}")
    for name, ids in text.items():
        if count := int((ids == token).sum()):
            raise SystemExit(f"{option} {token}: {name} has it {count} times, expected never; {change}")


def check_config(config: Mapping[str, Any], path: Any, target: Any) -> None:
    """Raises SystemExit for what is no draft's config, or does not fit the target's width and layers."""
    try:
        DraftShape.from_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(
            f"--config {path}: expected a DFlash draft's fields ({type(error).__name__}: {error}); edit the file"
        ) from error
    of = target.config.get_text_config()
    taps = (config.get("dflash_config") or {}).get("target_layer_ids") or []
    for field, value, expected, fits in (
        ("hidden_size", config.get("hidden_size"), of.hidden_size, config.get("hidden_size") == of.hidden_size),
        (
            "dflash_config.target_layer_ids",
            taps,
            f"some of the layers 0 to {of.num_hidden_layers - 1}",
            taps and all(0 <= tap < of.num_hidden_layers for tap in taps),
        ),
    ):
        if not fits:
            raise SystemExit(
                f"--config {path}: {field} {value}: expected {expected}, of the target; edit the file"
            )
