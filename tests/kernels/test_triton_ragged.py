"""SGLang's own Triton attention over ragged steps, in graphs and without, against dense attention."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.attention.verifying import serve_ragged, verifies_parts
from dflash_sglang.patches import triton_ragged
from tests.support import sglang_layers
from tests.support.attention_target import (
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    TOLERANCE,
    Target,
    dense,
    verify_batch,
)

WIDTH, REQUESTS, TOKENS = 8, 5, 20
WINDOW = 16

# The prefixes of the requests, and how many rows each has. The last of five is padding, with what rows are left.
STEPS = (
    ([1, 37, 300, 8], [8, 1, 6, 3, 2]),
    ([16, 40, 15, 160], [1, 1, 1, 1, 16]),
    ([299, 1, 31], [8, 3, 8, 1]),
)


class Step:
    """The inputs of a ragged verify forward of `TOKENS` rows, which keep their place."""

    def __init__(self, target: Target, requests: int) -> None:
        from dflash_sglang.sglang_names.scheduler import RaggedVerifyLayout

        self.target = target
        self.starts = torch.arange(requests + 1, dtype=torch.int32) * (TOKENS // requests)
        self.projected = torch.zeros(LAYERS, TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=DTYPE)
        layout = RaggedVerifyLayout(
            verify_lens=self.starts.diff(),
            graph_num_tokens=TOKENS,
            extend_start_loc=self.starts[:-1],
            qo_indptr_device=self.starts,
        )
        self.batch = verify_batch(
            requests,
            TOKENS,
            draft_token_num=WIDTH,
            num_tokens_per_req=WIDTH,
            custom_mask=None,
            ragged_verify_layout=layout,
        )

    def fill(self, prefixes: list[int], lens: list[int]) -> None:
        batch, table = self.batch, self.target.table
        batch.req_pool_indices.zero_()
        batch.seq_lens.fill_(1)
        batch.out_cache_loc.zero_()
        self.starts[1:] = torch.tensor(lens).cumsum(0)
        for i, (prefix, rows) in enumerate(zip(prefixes, lens, strict=False)):
            start = int(self.starts[i])
            batch.req_pool_indices[i], batch.seq_lens[i] = i + 1, prefix
            batch.out_cache_loc[start : start + rows] = table[i + 1, prefix : prefix + rows]
        self.projected.copy_(torch.randn(self.projected.shape))

    def forward(self, backend: Any) -> list[Tensor]:
        outputs = []
        for rows, layer in zip(self.projected, self.target.layers, strict=True):
            q, k, v = rows.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            k, v = (part.reshape(-1, KV_HEADS, DIM) for part in (k, v))
            outputs.append(backend.forward_extend(q.contiguous(), k, v, layer, self.batch))
        return outputs

    def check(self, outputs: list[Tensor], prefixes: list[int], lens: list[int]) -> None:
        for i, output in enumerate(outputs):
            window = self.target.layers[i].sliding_window_size
            for request, (prefix, rows) in enumerate(zip(prefixes, lens, strict=False)):
                own = slice(int(self.starts[request]), int(self.starts[request]) + rows)
                slots = self.target.table[request + 1, : prefix + rows].long()
                keys, values = (buffer[slots] for buffer in self.target.pool.get_kv_buffer(i))
                row, key = prefix + torch.arange(rows)[:, None], torch.arange(prefix + rows)
                seen = (key <= row) & ((window < 0) | (key >= row - window))
                q = self.projected[i, own, : HEADS * DIM].view(rows, HEADS, DIM)
                right = dense(q, keys, values, seen, SCALE)
                got = output[own].view(rows, HEADS, DIM).float()
                torch.testing.assert_close(got, right, rtol=TOLERANCE, atol=TOLERANCE)


def backend_of(target: Target) -> Any:
    """As a runtime state of ragged steps gets one."""
    from dflash_sglang.sglang_names.scheduler import get_spec

    module: Any = importlib.import_module(triton_ragged.BACKENDS)
    with get_spec().override(speculative_num_draft_tokens=WIDTH):
        backend = module.TritonAttnBackend(target.runner)
    assert not backend.supports_ragged_verify_graph and verifies_parts(backend)
    serve_ragged(backend)
    return backend


@pytest.fixture(params=[None, WINDOW], ids=["full", "sliding"])
def target(request: pytest.FixtureRequest, triton_runs: None) -> Any:
    """With a window, the second layer slides."""
    sglang_layers.start_rank()
    with torch.device(sglang_layers.DEVICE):
        made = Target(1, REQUESTS)
    made.runner.req_to_token_pool.size = REQUESTS
    vars(made.runner).update(
        decode_num_tokens_per_req=lambda: WIDTH, spec_algorithm=None, token_to_kv_pool_allocator=None
    )
    if request.param is not None:
        made.runner.sliding_window_size = made.layers[1].sliding_window_size = request.param
    return made


@torch.inference_mode()
def test_a_graph_follows_the_layout(target: Target) -> None:
    """What a graph reads keeps its place: the metadata is made once, as in a capture, and filled for each step."""
    with torch.device(sglang_layers.DEVICE):
        backend, step = backend_of(target), Step(target, REQUESTS)
        assert backend.supports_ragged_verify_graph
        backend.init_cuda_graph_state(REQUESTS, TOKENS)
        backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
        captured = backend.forward_metadata
        for prefixes, lens in STEPS:
            lens = lens + [0] * (REQUESTS - len(lens))
            step.fill(prefixes, lens)
            backend.init_forward_metadata_out_graph(step.batch)
            backend.forward_metadata = captured
            step.check(step.forward(backend), prefixes, lens)


@torch.inference_mode()
def test_a_forward_without_a_graph_follows_the_layout(target: Target) -> None:
    with torch.device(sglang_layers.DEVICE):
        backend = backend_of(target)
        for prefixes, lens in STEPS:
            step = Step(target, len(lens))
            step.fill(prefixes, lens)
            backend.init_forward_metadata(step.batch)
            step.check(step.forward(backend), prefixes, lens)


@pytest.mark.parametrize("what", ["enable_deterministic", "use_verify_splitkv", "use_verify_shared_kv"])
def test_backends_with_other_verify_kernels_verify_chains(target: Target, what: str) -> None:
    with torch.device(sglang_layers.DEVICE):
        backend = backend_of(target)
    del backend.supports_ragged_verify_graph
    assert verifies_parts(backend)
    setattr(backend, what, True)
    assert not verifies_parts(backend)
