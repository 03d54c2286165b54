"""The attention backend that verifies a target's blocks, and what it cannot do there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_sglang.attention.base import VerifyingBackend
from dflash_sglang.sglang_names.scheduler import ForwardMode
from dflash_sglang.startup.facts import Problem


def verifying(backend: Any) -> VerifyingBackend:
    """The backend that verifies: one of a pair of SGLang's, for prefill and for decode, or the backend itself."""
    select = getattr(backend, "_select_backend", None)
    return backend if select is None else select(ForwardMode.TARGET_VERIFY)


def verify_problems(backend: Any) -> Iterator[Problem]:
    """What is wrong with the backend that a target's verify runs with, once it exists."""
    reason = getattr(verifying(backend), "dispatch_reason", None)
    if reason is not None and reason.name == "SLIDING_WINDOW":
        yield Problem(
            "--attention-backend",
            "flashinfer",
            "triton or fa3 for a target with sliding layers: FlashInfer cuts a block's context by the window of "
            "its first row, and later rows would see more than in plain decoding",
            "Set --attention-backend triton.",
        )


def verifies_parts(backend: Any) -> bool:
    """Whether requests of a step may have different numbers of verified rows, in graphs."""
    backend = verifying(backend)
    # TensorRT-LLM's kernels of some GPUs (XQA) do not, whatever their class says.
    return backend.supports_ragged_verify_graph and not getattr(backend, "is_xqa_impl", False)
