"""Where the nodes of trees stand: their positions and their KV slots, and the tokens in these, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Places(NamedTuple):
    """Of each node: its position, as the rotary embedding counts it, and its slot. [bs, N] int64, contiguous."""

    positions: Tensor
    slots: Tensor
    ids: Tensor | None = None  # read: the nodes' tokens, which are written to the next
    history: Tensor | None = None  # [slots] int32, see `Copies.history`


def place_nodes(depths: Tensor, prefix_lens: Tensor, requests: Tensor, req_to_token: Tensor, out: Places) -> None:
    """Fill `out` for trees of nodes at these depths [bs, N] int32, contiguous, that stand after prefix_lens [bs]
    tokens of requests [bs], rows of req_to_token [rows, row_width] int32.

    A node has the position of its depth after the prefix, and the slot of its number after the prefix: siblings
    share a position and no slot.
    """
    launch = place_nodes_triton if depths.is_cuda else place_nodes_torch
    launch(depths, prefix_lens, requests, req_to_token, out)


def place_nodes_torch(
    depths: Tensor, prefix_lens: Tensor, requests: Tensor, req_to_token: Tensor, out: Places
) -> None:
    """The definition of `place_nodes` in torch operations."""
    columns = prefix_lens[:, None].long() + torch.arange(depths.shape[1], device=depths.device)
    out.positions[:] = prefix_lens[:, None] + depths
    out.slots[:] = req_to_token[requests[:, None].long(), columns]
    if out.history is not None and out.ids is not None:
        out.history[out.slots] = out.ids.int()


def place_nodes_triton(
    depths: Tensor, prefix_lens: Tensor, requests: Tensor, req_to_token: Tensor, out: Places
) -> None:
    """`place_nodes` as one Triton launch, one program per request."""
    bs, nodes = depths.shape
    _place_nodes_kernel[(bs,)](
        depths, prefix_lens, requests, req_to_token, *out, req_to_token.stride(0),
        NODES=nodes, LANES=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip


@triton.jit
def _place_nodes_kernel(
    depths_ptr, prefix_ptr, requests_ptr, table_ptr, positions_ptr, slots_ptr, ids_ptr, history_ptr, table_stride,
    NODES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, LANES)
    there = node < NODES
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    row = table_ptr + tl.load(requests_ptr + request).to(tl.int64) * table_stride
    depths = tl.load(depths_ptr + request * NODES + node, mask=there, other=0)
    tl.store(positions_ptr + request * NODES + node, prefix + depths, mask=there)
    slots = tl.load(row + prefix + node, mask=there, other=0).to(tl.int64)
    tl.store(slots_ptr + request * NODES + node, slots, mask=there)
    if history_ptr is not None:
        ids = tl.load(ids_ptr + request * NODES + node, mask=there, other=0)
        tl.store(history_ptr + slots, ids.to(tl.int32), mask=there)
