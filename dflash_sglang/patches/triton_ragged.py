"""SGLang's Triton attention over ragged steps: its kernel takes rows by request, its plans only equally many."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from dflash_sglang.patches.apply import replace

BACKENDS = "sglang.srt.layers.attention.triton_backend"


def takes_ragged_rows(backend: Any) -> bool:
    """Whether a backend verifies with the one Triton kernel that finds a request's rows by where they begin."""
    module: Any = sys.modules.get(BACKENDS)
    if module is None or not isinstance(backend, module.TritonAttnBackend):
        return False
    others = backend.enable_deterministic, backend.use_verify_splitkv, backend.use_verify_shared_kv
    return not any(others) and backend.dcp_size == 1


def serve_ragged(backend: Any) -> None:
    """Plan verify forwards by their `spec_info.ragged_verify_layout`, if they have one.

    Call it before the graphs are captured. A layout has as many requests as its graph, padding included.

    backend: one that `takes_ragged_rows`."""
    fill, prepare = backend._update_target_verify_buffers, backend.init_forward_metadata

    def fill_ragged(
        plan: Any, bs: int, seq_lens: Tensor, spec_info: Any, req_pool_indices: Tensor
    ) -> tuple[Any, ...]:
        filled = fill(plan, bs, seq_lens, spec_info, req_pool_indices)
        if spec_info.ragged_verify_layout is not None:
            backend.qo_indptr[: bs + 1].copy_(spec_info.ragged_verify_layout.qo_indptr_device)
        return filled

    def prepare_ragged(forward_batch: Any) -> None:
        prepare(forward_batch)
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        if layout is not None:
            backend.forward_metadata.qo_indptr = layout.qo_indptr_device

    replace("triton-ragged", backend, True)
    replace("triton-rows", backend, fill_ragged)
    replace("triton-eager-rows", backend, prepare_ragged)
