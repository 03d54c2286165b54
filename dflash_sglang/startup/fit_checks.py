"""What must fit between a draft, its target and its server: facts in, problems out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.own_modules import OwnModules
from dflash_sglang.startup.facts import Problem, ServingFacts, TargetFacts
from dflash_sglang.startup.serving_checks import backend_problems, block_problems, window_problems
from dflash_sglang.startup.tensor_checks import shape_problems
from dflash_sglang.startup.vocabulary_checks import own_problems, unread_problems

_OTHER = "Serve the target that the draft was trained for."
_RANKS = "Change --tp-size or --attn-dp-size."


def draft_problems(
    spec: DraftSpec,
    target: TargetFacts,
    serving: ServingFacts,
    tensors: Mapping[str, TensorFacts],
    own: OwnModules,
) -> list[Problem]:
    """What does not fit between a draft and the target and server it is to run with.

    ``tensors``: the checkpoint's, empty where they cannot be read; the loader checks the shapes once more.
    ``own``: what the draft has in place of the target's.
    """
    return [
        *block_problems(spec, serving),
        *_mask_problems(spec, target, own),
        *_shape_problems(spec, target, serving.draft_ranks, own),
        *backend_problems(spec, serving),
        *window_problems(spec, serving),
        *shape_problems(spec, tensors),
        *(own_problems(spec, target, own) if tensors else unread_problems(spec, target)),
        *_layer_id_problems(spec, target),
    ]


def pool_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A raw config.json of a draft that would make SGLang give its sliding layers a pool of their own."""
    text_config = config.get("text_config")
    of_text = isinstance(text_config, Mapping) and text_config.get("is_hybrid_swa")
    if config.get("is_hybrid_swa") or of_text:
        expected = "false: context KV is written into one pool for all layers of the draft, at the target's slots"
        fix = "Remove it from the draft's config.json; layer_types and sliding_window say which layers slide."
        yield Problem("draft config is_hybrid_swa", True, expected, fix)


def _mask_problems(spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    """The mask token's row of the embedding that the block is embedded with."""
    whose, rows = ("target's", target.vocab_size) if own.embedding is None else ("draft's own", spec.vocab_size)
    field = "mask_token_id" if spec.speculators else "dflash_config.mask_token_id"
    if spec.mask_token_id >= rows:
        expected = f"an id below the {whose} vocab_size of {rows}"
        fix = f"Correct {field}, or serve the target that the draft was trained for."
        yield Problem("draft config mask_token_id", spec.mask_token_id, expected, fix)


def _shape_problems(spec: DraftSpec, target: TargetFacts, ranks: int, own: OwnModules) -> Iterator[Problem]:
    """ranks: over which the draft is split."""
    needs_all_tokens = (
        (own.embedding, "any of its tokens is embedded"),
        (spec.dflash2, "the selector has a row for each candidate"),
        (spec.dspark and spec.dspark.rank, "the Markov head has a row for each token"),
        (spec.domino, "Domino's projector has a row for each token"),
    )
    why = next((why for part, why in needs_all_tokens if part), None)
    width = f"the target's hidden_size of {target.hidden_size} (embedding and head are the target's)"
    tokens = f"at least the target's vocab_size of {target.vocab_size} ({why})"
    layers, all_layers = f"the target's {target.num_layers} layers", (None, target.num_layers)
    divisible = f"divisible by the draft's tensor parallel size of {ranks}"
    heads, kv_heads, columns = spec.num_heads, spec.num_kv_heads, spec.intermediate_size
    of_heads = kv_heads % ranks == 0 or ranks % kv_heads == 0
    for field, value, fits, expected, fix in (
        ("hidden_size", spec.hidden_size, spec.hidden_size == target.hidden_size, width, _OTHER),
        ("vocab_size", spec.vocab_size, why is None or spec.vocab_size >= target.vocab_size, tokens, _OTHER),
        ("num_target_layers", spec.num_target_layers, spec.num_target_layers in all_layers, layers, _OTHER),
        ("num_attention_heads", heads, heads % ranks == 0, divisible, _RANKS),
        ("intermediate_size", columns, columns % ranks == 0, divisible, _RANKS),
        ("num_key_value_heads", kv_heads, of_heads, f"{divisible}, or a divisor of it", _RANKS),
    ):
        if not fits:
            yield Problem(f"draft config {field}", value, expected, fix)


def _layer_id_problems(spec: DraftSpec, target: TargetFacts) -> Iterator[Problem]:
    ids = spec.target_layer_ids
    name, value = spec.named_layer_ids(ids)
    first = value[0] - ids[0]  # the format's number of the target's first layer
    field = f"draft config {name}"
    fix = f"Correct {name if first else 'dflash_config.' + name}, or serve its target."
    if any(i < 0 or i >= target.num_layers for i in ids):
        last = target.num_layers - 1 + first
        yield Problem(field, value, f"layers of the target, {first} to {last} (its last layer)", fix)
    if len(set(ids)) != len(ids):
        yield Problem(field, value, "each layer once", fix)
