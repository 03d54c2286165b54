"""What a draft takes: memory of a rank, bytes that a step reads, and the accept length that pays for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.own_modules import TABLES

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2}
_FLOATS = ("F64", "F32", "F16", "BF16")
_SPLIT = (  # over the ranks
    *(".q_proj.", ".k_proj.", ".v_proj.", ".qkv_proj.", ".o_proj.", ".g_proj.", ".attention_sink_bias"),
    *(".gate_proj.", ".up_proj.", ".gate_up_proj.", ".down_proj."),
    *("lm_head.", "embed_tokens."),
)
_WHOLE_BIASES = (".o_proj.bias", ".down_proj.bias")
ASSUMES = "a step takes as long as reading its weights; experts are read by the tokens that choose them"
_NOT_OF_THE_SERVER = ("verifier_", "t2d", "d2t")


@dataclass(frozen=True)
class Experts:
    """Of a layer of a target's mixture."""

    of_a_token: int  # that are read for a token
    all: int

    def share_read(self, tokens: int) -> float:
        """Of the experts' bytes, by this many tokens that choose independently."""
        return 1 - (1 - self.of_a_token / self.all) ** tokens


@dataclass(frozen=True)
class BreakEven:
    """Bytes that a step of one request reads, and the least ``accept_length`` that makes up for them."""

    accept_length: float
    plain_bytes: int
    verify_bytes: int
    draft_bytes: int
    head_bytes: int


def nbytes(facts: TensorFacts, served: int | None = None) -> int:
    """Bytes of a tensor; floats in `served` bytes each, None: as they are stored."""
    element = served if served is not None and facts.dtype in _FLOATS else BYTES.get(facts.dtype, 1)
    return math.prod(facts.shape) * element


def draft_weights(
    spec: DraftSpec, tensors: Mapping[str, TensorFacts], ranks: int, served: int, in_fp8: bool
) -> int:
    """Bytes of a rank. served: of a float; in_fp8: whether the matrices of the layers and `fc` are."""
    total = 0.0
    for name, facts in tensors.items():
        own = name.removeprefix("model.")
        if own.startswith(_NOT_OF_THE_SERVER) or "rotary_emb." in own:
            continue
        table, _, part = own.rpartition(".")
        if table in TABLES and part.startswith("weight_scale"):
            continue
        if table in TABLES and facts.dtype == "U8":  # two weights in a byte, dense once they are loaded
            facts = TensorFacts("F32", (facts.shape[0], 2 * facts.shape[1]))
        if own == "markov_head.markov_w2.weight":  # a row for each token of the target, once it is loaded
            facts = TensorFacts(facts.dtype, (spec.vocab_size, *facts.shape[1:]))
        matrix = in_fp8 and len(facts.shape) == 2 and (own.startswith("fc.") or "_proj.weight" in own)
        small = "kernel_projection" in own or ".g_proj." in own
        size: float = nbytes(facts, 1 if matrix and not small else served)
        if any(part in own for part in _SPLIT) and not own.endswith(_WHOLE_BIASES):
            of_keys = any(part in own for part in (".k_proj.", ".v_proj."))
            size = size / (min(ranks, spec.num_kv_heads) if of_keys else ranks)
        total += size
    return int(total)


def rope_table_bytes(spec: DraftSpec, positions: int) -> int:
    """Of every rank: cosines and sines in float32, one table for all layers. positions: the target's context."""
    return positions * spec.rope.rotary_dim * 4


def kv_bytes_per_token(spec: DraftSpec, ranks: int, element: int) -> int:
    """Of a rank: keys and values of every draft layer."""
    heads = max(1, spec.num_kv_heads // ranks)
    return 2 * spec.num_layers * heads * spec.head_dim * element


def head_bytes(target: Mapping[str, TensorFacts]) -> int | None:
    """Of the target's head, which is its embedding where it has none. None where neither is found."""
    for part in ("lm_head.", "embed_tokens."):
        found = [nbytes(facts) for name, facts in target.items() if part in name]
        if found:
            return sum(found)
    return None


def break_even(
    target: Mapping[str, TensorFacts], experts: Experts | None, draft: int, head: int, block: int
) -> BreakEven | None:
    """Bytes over all ranks. head: what the draft reads of a head again. None where the target's tensors, or the
    experts of its mixture, are unknown."""
    mixture = sum(nbytes(facts) for name, facts in target.items() if ".experts." in name)
    if not target or (mixture and experts is None):
        return None
    has_head = any("lm_head." in name for name in target)
    table = sum(nbytes(f) for name, f in target.items() if "embed_tokens." in name) if has_head else 0
    dense = sum(map(nbytes, target.values())) - mixture - table
    plain = verify = float(dense)
    if experts is not None:
        plain += mixture * experts.share_read(1)
        verify += mixture * experts.share_read(block)
    return BreakEven((verify + draft + head) / plain, int(plain), int(verify), draft, head)
