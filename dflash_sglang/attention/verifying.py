"""What verify and drafting ask of an attention backend of SGLang: the contract, and who meets it.

A block of new rows for each request, after its prefix, is a forward in SGLang's mode TARGET_VERIFY. The batch has
`seq_lens` [bs], the prefixes without the block, and the block's width in `spec_info.draft_token_num`. A ragged
step has its own number of rows for each request: `spec_info.ragged_verify_layout.verify_lens` [bs] int32.

A target's row sees its request's prefix and the block up to itself. A draft's row sees what its layer's config
names: all rows of the block, in most drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.sglang_names.scheduler import (
    CaptureHiddenMode,
    DFlashVerifyInput,
    ForwardBatch,
    ForwardMode,
    KVLocPlan,
    ModelRunner,
    SpeculativeAlgorithm,
)
from dflash_sglang.startup.facts import Problem


def verifying(backend: Any) -> Any:
    """The backend that verifies: one of a pair of SGLang's, for prefill and for decode, or the backend itself."""
    select = getattr(backend, "_select_backend", None)
    return backend if select is None else select(ForwardMode.TARGET_VERIFY)


def prepares_in_graph(backend: Any) -> bool:
    """Whether a captured forward of blocks finds all that attention needs in its graph's inputs."""
    return bool(getattr(backend, "prepares_in_graph", False))


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


def draft_input(rows: int, device: Any) -> DFlashVerifyInput:
    """What tells a backend that a draft's forward has so many rows of each request."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return DFlashVerifyInput(nothing, nothing, rows, capture_hidden_mode=CaptureHiddenMode.NULL)


def slot_plan(
    runner: ModelRunner, requests: Tensor, prefix_lens: Tensor, prefix_bounds: Tensor, slots: Tensor, rows: int
) -> KVLocPlan:
    """Plan a forward of `rows` rows of each request, written to these slots. prefix_bounds [bs]: on the host."""
    return runner.kv_index_translator.plan(
        req_pool_indices=requests,
        seq_lens=prefix_lens,
        seq_lens_cpu=prefix_bounds,
        write_virtual=slots,
        read_extent=rows,
    )


def draft_forward(
    runner: ModelRunner,
    rows: Rows,
    requests: Tensor,
    prefix_lens: Tensor,
    kv_len_bounds: Tensor,
    prefix_bounds_sum: int,
    spec_info: DFlashVerifyInput,
    plan: KVLocPlan,
    **more: Any,
) -> ForwardBatch:
    """A forward of the draft over `rows`, whose slots `plan` names, as SGLang's runner takes it.

    requests, prefix_lens [bs] int64; kv_len_bounds [bs] on the host: no request's prefix with its rows is longer;
    prefix_bounds_sum: of these, without the rows. more: other fields of the batch.
    """
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(requests),
        input_ids=rows.ids,
        req_pool_indices=requests,
        seq_lens=prefix_lens,
        out_cache_loc=rows.slots,
        seq_lens_sum=prefix_bounds_sum,
        seq_lens_cpu=kv_len_bounds,
        positions=rows.positions,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        global_num_token_non_padded_cpu=rows.ids.numel(),
        **more,
    )
    plan.bind(forward_batch, runner.kv_index_translator)
    return forward_batch


def verifies_parts(backend: Any) -> bool:
    """Whether requests of a step may have different numbers of verified rows, in graphs."""
    backend = verifying(backend)
    # TensorRT-LLM's kernels of some GPUs (XQA) do not, whatever their class says. KDA's do, but no test commits
    # recurrent states after such a step.
    other = getattr(backend, "is_xqa_impl", False) or hasattr(backend, "linear_attn_backend")
    return bool(backend.supports_ragged_verify_graph) and not other
