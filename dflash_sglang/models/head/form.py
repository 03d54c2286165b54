"""Whether the draft reads a head's rows as they are, or an fp8 copy of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.settings.plugin_config import DraftHeadForm
from dflash_sglang.sglang_names.scheduler import cutlass_fp8_supported
from dflash_sglang.startup.facts import LoadError

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
