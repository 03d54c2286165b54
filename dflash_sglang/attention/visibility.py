"""Which keys the rows of a draft block see, asked of the attention backend that exists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.attention.verifying import draft_forward, draft_input, slot_plan
from dflash_sglang.checkpoint.layers import LayerAttention
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.sglang_names.scheduler import (
    ForwardBatch,
    ForwardContext,
    KVWriteLoc,
    ModelRunner,
    forward_context,
)
from dflash_sglang.startup.facts import GPU_DRAFT_BACKENDS, Problem, StartupError

logger = logging.getLogger(__name__)

_ROW = 1  # of req_to_token
_BEYOND = 3  # tokens of context to the left of the first row's window

Attend = Callable[[Any, ForwardBatch, Callable[[], Tensor]], Tensor]


def eagerly(backend: Any, forward_batch: ForwardBatch, layer: Callable[[], Tensor]) -> Tensor:
    """Run one attention layer on a batch as a forward without a graph does."""
    backend.init_forward_metadata(forward_batch)
    return layer()


@torch.no_grad()
def check_visibility(runner: ModelRunner, model: DFlashDraftModel, block_size: int, name: str) -> None:
    """End start-up unless each kind of draft layer sees the keys that its config names.

    Run it once pools and backends exist and before any request: it writes keys and values of the draft's pool, and
    the first requests write over them. It takes milliseconds, and no other rank.

    runner: the draft's. name: what SGLang calls the backend.
    Raises StartupError with one problem, which names the backend, the layers, and a row and key that differ.
    """
    if runner.token_to_kv_pool.post_capture_active:
        logger.warning(
            "dflash_sglang did not check which keys the draft's attention backend %s sees: slots have no memory "
            "at this point of start-up (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING).",
            name,
        )
        return
    room = min(runner.model_config.context_len, runner.max_total_num_tokens) - block_size
    for kind, layer in dict(zip(model.spec.layers, model.layers, strict=True)).items():
        context, keys = edges(kind, block_size, room)
        attention = layer.self_attn
        sinks = {} if attention.attention_sink_bias is None else {"sinks": attention.attention_sink_bias}
        seen = seen_keys(runner, runner.attn_backend, attention.attn, block_size, context, keys, **sinks)
        expected = visible(kind, block_size, context, keys)
        wrong = (seen != expected[:, None]).nonzero()
        if len(wrong):
            row, _, i = wrong[0].tolist()
            key, should = keys[i] - context, bool(expected[row, i])
            raise StartupError([_problem(name, runner.attn_backend, kind, row, key, should)])


def edges(kind: LayerAttention, block_size: int, room: int) -> tuple[int, list[int]]:
    """Tokens of context, at most `room`, and the keys whose visibility decides: the block's, and those at both
    sides of the left edge of each row's window."""
    if kind.window is None:
        context = min(_BEYOND, room)
        return context, list(range(context + block_size))
    context = min(kind.window + _BEYOND, room)
    first = context - kind.window  # the last key to the left of the first row's window
    left = range(max(first - 1, 0), max(min(first + block_size + 1, context), 0))
    return context, [*left, *range(context, context + block_size)]


def visible(kind: LayerAttention, block_size: int, context: int, keys: list[int]) -> Tensor:
    """[block, keys] bool on the CPU: what a layer of a kind sees, by definition (`LayerAttention`)."""
    distance = torch.arange(context, context + block_size)[:, None] - torch.tensor(keys)
    seen = distance >= 0 if kind.causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if kind.window is None else seen & (distance.abs() < kind.window)


def seen_keys(
    runner: ModelRunner,
    backend: Any,
    layer: Any,
    block_size: int,
    context: int,
    keys: list[int],
    attend: Attend = eagerly,
    **kwargs: Any,
) -> Tensor:
    """[block, heads, keys] bool on the CPU: whether a row of one request's block sees a key.

    All scores are equal. The values of different keys lie in different dimensions and all others are zero, so
    that an output is zero in a key's dimension unless the row sees the key.

    runner: the draft's. layer: a RadixAttention of it. context: tokens before the block. keys: positions.
    attend: how a batch is attended. kwargs: of the layer's forward.
    """
    heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
    tokens, table = context + block_size, runner.req_to_token_pool.req_to_token
    slots = runner.page_size + torch.arange(tokens, device=table.device)
    table[_ROW, :tokens] = slots
    nothing = torch.zeros((tokens, kv_heads, dim), dtype=runner.dtype, device=table.device)
    query = torch.zeros((block_size, heads * dim), dtype=runner.dtype, device=table.device)
    scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
    seen = []
    try:
        for first in range(0, len(keys), dim):
            marked = keys[first : first + dim]
            values = nothing.clone()
            values[marked, :, range(len(marked))] = 1
            own = nothing[context:], values[context:].clone()  # a pool with scales divides in place
            runner.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots), nothing, values, *scales)
            forward_batch = _block(runner, slots, block_size)

            def attended(own: tuple[Tensor, Tensor] = own, batch: ForwardBatch = forward_batch) -> Tensor:
                with forward_context(ForwardContext(attn_backend=backend)):
                    return layer(query, *own, batch, **kwargs)

            output = attend(backend, forward_batch, attended).view(block_size, heads, dim)
            seen.append((output != 0)[..., : len(marked)].cpu())
    finally:
        table[_ROW, :tokens] = 0
    return torch.cat(seen, dim=-1)


def _block(runner: ModelRunner, slots: Tensor, block_size: int) -> ForwardBatch:
    """A draft forward of one request whose last `block_size` of these slots are the block's."""
    device, context = slots.device, len(slots) - block_size
    request = torch.full((1,), _ROW, dtype=torch.int64, device=device)
    lens, own = torch.full_like(request, context), slots[context:]
    plan = slot_plan(runner, request, lens, torch.tensor([context]), own, block_size)
    rows = Rows(torch.zeros_like(own), torch.arange(context, len(slots), device=device), own)
    bounds, info = torch.tensor([len(slots)]), draft_input(block_size, device)
    return draft_forward(runner, rows, request, lens, bounds, context, info, plan)


def _problem(name: str, backend: Any, kind: LayerAttention, row: int, key: int, visible: bool) -> Problem:
    """key: position counted from the block's first row. visible: what it should be to the row."""
    window = "" if kind.window is None else f"window {kind.window}, "
    which = f"row {key}'s key" if key >= 0 else f"the key {-key} tokens before the block"
    return Problem(
        "--speculative-draft-attention-backend",
        name,
        f"a backend for the draft's {kind.kind} layers ({window}{'' if kind.causal else 'not '}causal): with "
        f"{type(backend).__name__} row {row} of a block {'does not see' if visible else 'sees'} {which}",
        "Set --speculative-draft-attention-backend to another of " + ", ".join(GPU_DRAFT_BACKENDS) + ".",
    )
