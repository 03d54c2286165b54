"""The head that a draft proposes with: its form, and the factory that builds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.kernels.head.pack_shard import Scaling
from dflash_sglang.models.head.copies import Fp8Head, HotRows
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.settings.plugin_config import DraftHeadForm
from dflash_sglang.sglang_names.scheduler import cutlass_fp8_supported
from dflash_sglang.startup.facts import LoadError

HeadCopy = HotRows | Fp8Head
"""A copy of a head's weights: `tensors` are what it takes memory for, `refresh` takes the present weights over."""
MIB = 1 << 20
WORTH_A_COPY = 64 * MIB  # of a rank's rows; fewer bytes are read in no time


@dataclass(frozen=True)
class HeadFacts:
    """What decides on an fp8 copy, the same on every rank."""

    device: str  # its type
    fp8_gemm: bool  # whether the device multiplies fp8 matrices
    method: str | None  # what serves a quantised head
    dtype: torch.dtype
    nbytes: int  # of the rows that a rank reads

    @classmethod
    def from_head(cls, lm_head: nn.Module, token_map: Tensor | None) -> HeadFacts:
        head, weight = TargetHead(lm_head), getattr(lm_head, "weight", None)
        assert isinstance(weight, Tensor)  # SGLang applies a quantisation method to nothing else
        ranks = 1 if head.group is None else head.group.world_size
        share = 1.0 if token_map is None else len(token_map) / ranks / len(weight)
        return cls(
            device=weight.device.type,
            fp8_gemm=cutlass_fp8_supported(),
            method=type(getattr(lm_head, "quant_method", None)).__name__ if head.quantised else None,
            dtype=weight.dtype,
            nbytes=int(share * weight.nbytes),
        )


def choose_form(asked: DraftHeadForm, facts: HeadFacts) -> tuple[bool, str]:
    """Whether the draft reads an fp8 copy, and why. Raises ValueError for "fp8" where there cannot be one."""
    if asked == "as_is":
        return False, "draft_head asks for it"
    obstacle = _obstacle(facts)
    if asked == "fp8":
        if obstacle is not None:
            raise LoadError(
                "draft_head='fp8': expected an LM head in float16 or bfloat16 on a GPU of compute capability 8.9 "
                f"or more, or a dense one on a CPU, but {obstacle}. Set draft_head to 'auto' or 'as_is'."
            )
        return True, "draft_head asks for it"
    if obstacle is not None:
        return False, obstacle
    if facts.device == "cpu":
        return False, "a CPU has no fp8 GEMM"
    size = f"{facts.nbytes / MIB:.1f} MiB on a rank"
    if facts.nbytes < WORTH_A_COPY:
        return False, f"{size}, less than {WORTH_A_COPY // MIB}"
    return True, f"instead of {size}"


def _obstacle(facts: HeadFacts) -> str | None:
    """Why there can be no fp8 copy, or None."""
    if facts.method is not None:
        return f"it is quantised already and served by {facts.method}"
    if facts.device == "cpu":
        return None
    if not facts.fp8_gemm:
        return "this GPU has no fp8 GEMM"
    if facts.dtype not in (torch.float16, torch.bfloat16):
        return f"it is in {facts.dtype}"
    return None


class DraftHead(TargetHead):
    """The head of every draft. Its rows may be other ids than the target's, and its logits may be scaled.

    lm_head: as for `TargetHead`; the target's, the draft's own, or a copy of some rows of either. target_ids: the
    target's id of each row of the whole head [draft vocabulary] int64, None where rows are ids. tokens: how many
    rows, the first ones of the whole head, are tokens; those after them are padding. `logits` are those of the
    rows, not scaled.
    """

    def __init__(
        self,
        lm_head: nn.Module,
        spec: VocabularySpec,
        target_ids: Tensor | None,
        same_batch: int | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(lm_head, same_batch)
        if tokens is not None:
            self.rows = max(0, min(self.rows, tokens - self.first_id))
        self.scaling = Scaling(spec.logit_multiplier, spec.logit_softcap)
        self.target_ids = target_ids


def build_draft_head(
    lm_head: nn.Module,
    spec: VocabularySpec,
    target_ids: Tensor | None = None,
    token_map: Tensor | None = None,
    asked: DraftHeadForm = "as_is",
    same_batch: int | None = None,
    tokens: int | None = None,
) -> tuple[DraftHead, HeadCopy | None, str]:
    """Build the head to draft with: over `lm_head` itself, or over a copy of its rows.

    Returns the head; the copy, to be refreshed after an update of what was copied; and the form of the weights
    and why, for the start-up line.

    lm_head, same_batch: as for `TargetHead`. target_ids, tokens: as for `DraftHead`. token_map [n] int64,
    ascending: the only tokens that are proposed, None for all; its rows are copied. asked: the operator's wish for
    the form.
    Raises ValueError for a quantised head with a token map, and for "fp8" where there can be no such copy.
    """
    wants_fp8, why = choose_form(asked, HeadFacts.from_head(lm_head, token_map))
    if wants_fp8:
        fp8 = Fp8Head(lm_head, token_map)
        form = f"fp8 ({why}, {sum(tensor.nbytes for tensor in fp8.tensors) / MIB:.1f} MiB)"
        return DraftHead(fp8, spec, target_ids, same_batch, tokens), fp8, form
    hot = None if token_map is None else HotRows(lm_head, token_map)
    return DraftHead(hot or lm_head, spec, target_ids, same_batch, tokens), hot, f"as_is ({why})"
