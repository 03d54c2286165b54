"""Parts of a DraftSpec: what the config.json of each family adds to a plain draft's, and what it says of the
vocabulary. Readers raise DraftConfigError for a field that is missing, malformed or not servable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool, as_float, as_int, both_sizes

MAX_TAPS = 16
"""Taps that the kernel of the convolution unrolls."""
MAX_CANDIDATES = 32
"""Candidates per position that the kernel of the selector's walk holds in registers."""
DRAWN_FROM = 16
"""The likeliest tokens of a draft that a drawn proposal comes from."""
VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)
"""Of Markov heads."""
# Values of Laguna's `gating`: one gate for each head, one for each channel, none.
_PER_HEAD, _PER_ELEMENT, _DISABLED = (True, "per-head"), ("per-element",), (False, None, "disabled")


@dataclass(frozen=True)
class ConvolutionSpec:
    """A grouped dynamic convolution over the rows of a block: ``taps`` rows, its own and the ones before;
    ``group_size`` neighbouring channels share the dynamic part of their coefficients."""

    taps: int
    group_size: int


@dataclass(frozen=True)
class DFlash2Spec:
    """``selector_rank``: width of the selector's codebooks. ``selector_top_k``: candidates per position. What
    shapes embeddings and logits is in the draft's VocabularySpec."""

    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DSparkSpec:
    """``rank``: width of the Markov head's matrices, 0 without a head. ``kind``: one of KINDS."""

    rank: int
    kind: str


@dataclass(frozen=True)
class DominoSpec:
    """``state_size``: of the GRU. ``rank``: width of the vectors that tokens are scored with. ``shifted``: whether
    each row proposes the token after its own, the last committed token's the first one; the last row of a block
    then has no proposal."""

    state_size: int
    rank: int
    shifted: bool


@dataclass(frozen=True)
class LagunaSpec:
    """A draft that norms each captured feature, and the context rows once more in each layer. ``gates``: numbers
    that scale what a head attended to, 1 or head_dim; 0 without them."""

    gates: int


def convolution(fields: Fields, hidden_size: int) -> ConvolutionSpec | None:
    """Around attention and MLP of every layer of a DFlash2 draft, or None."""
    kernel_size, group_size = fields.draft("conv_kernel_size"), fields.draft("conv_group_size")
    if not kernel_size[1] and not group_size[1]:
        return None
    spec = ConvolutionSpec(*both_sizes(fields, "conv_kernel_size", "conv_group_size", "a convolution"))
    if spec.taps > MAX_TAPS:
        raise DraftConfigError(kernel_size[0], spec.taps, f"at most {MAX_TAPS} taps")
    if hidden_size % spec.group_size:
        fix = f"Correct {group_size[0]} or hidden_size in the draft's config.json."
        raise DraftConfigError(group_size[0], spec.group_size, f"a divisor of hidden_size={hidden_size}", fix)
    return spec


def dflash2(fields: Fields, vocab_size: int) -> DFlash2Spec:
    """DFlash2Spec of a draft's fields."""
    rank, top_k = both_sizes(fields, "selector_rank", "selector_top_k", "the candidate selector")
    most = min(MAX_CANDIDATES, vocab_size)
    if top_k > most:
        fix = "Correct selector_top_k in the draft's config.json, or serve a checkpoint trained with fewer."
        field = fields.draft("selector_top_k")[0]
        raise DraftConfigError(field, top_k, f"at most {most} candidates per position", fix)
    fields.check_whole_vocabulary(vocab_size, "the selector's codebooks hold every token", "DFlash2")
    return DFlash2Spec(rank, top_k)


def dspark(fields: Fields) -> DSparkSpec:
    """DSparkSpec of a draft's fields; `families` lets only KINDS pass."""
    return DSparkSpec(as_int(fields.draft("markov_rank"), 0), fields.draft("markov_head_type", VANILLA)[1])


def domino(fields: Fields, vocab_size: int) -> DominoSpec:
    """DominoSpec of a draft's fields."""
    prefix = fields.draft("pure_draft_prefix_len")
    if prefix[1] != 1 or isinstance(prefix[1], bool):
        raise DraftConfigError(*prefix, "1: the first proposal is the row's own, the GRU corrects the others")
    fields.check_whole_vocabulary(vocab_size, "Domino's projector has a row for every token", "Domino")
    state_size, rank = (as_int(fields.draft(name), 1) for name in ("gru_hidden_dim", "emb_dim"))
    return DominoSpec(state_size, rank, shifted=as_bool(fields.draft("shift_label")))


def laguna(fields: Fields, head_dim: int) -> LagunaSpec:
    """LagunaSpec of a draft's fields."""
    gating = fields.text.get("gating", True)  # as transformers' Laguna has it
    for values, gates in ((_PER_HEAD, 1), (_PER_ELEMENT, head_dim), (_DISABLED, 0)):
        if (gating is None or isinstance(gating, bool | str)) and gating in values:
            return LagunaSpec(gates)
    raise DraftConfigError("gating", gating, "per-head, per-element, disabled, true or false")


@dataclass(frozen=True)
class VocabularySpec:
    """Embedding, head and logits of a draft; None: the config does not say."""

    draft_vocab_size: int | None  # rows of a head of the draft's own
    has_head: bool | None  # whether the checkpoint is to hold one
    has_embedding: bool | None  # the same
    embedding_scale: float  # factor on the block's embeddings
    logit_multiplier: float  # a logit x of the head becomes multiplier * x,
    logit_softcap: float | None  # and then, with a softcap c, c * tanh(x / c)


def vocabulary(fields: Fields) -> VocabularySpec:
    """VocabularySpec of a draft. Scales and caps count in `dflash_config` alone: the top level holds those
    that were copied from the target. Raises DraftConfigError for a malformed field."""
    cap = _nested(fields, "final_logit_softcapping", 0)
    return VocabularySpec(
        draft_vocab_size=fields.optional("draft_vocab_size", as_int, 1),
        has_head=fields.optional("has_lm_head", as_bool),
        has_embedding=fields.optional("has_embed_tokens", as_bool),
        embedding_scale=as_float(_nested(fields, "input_embedding_scale", 1.0)),
        logit_multiplier=as_float(_nested(fields, "output_multiplier", 1.0)),
        logit_softcap=None if cap[1] == 0 else as_float(cap),
    )


def _nested(fields: Fields, name: str, default: float) -> tuple[str, Any]:
    value = fields.nested.get(name)
    return f"dflash_config.{name}", default if value is None else value
