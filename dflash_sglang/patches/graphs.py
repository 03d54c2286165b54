"""SGLang's graphs: captured at which sizes, by requests or by tokens, what a step finds in their inputs, and which
of them a runner runs next, with which attention backend and recurrent states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace as with_fields
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner

from dflash_sglang.patches.apply import replace, replaced
from dflash_sglang.sglang_names.scheduler import (
    DecodeCudaGraphRunner,
    ModelRunner,
    get_cuda_graph_batch_size_alignment,
    get_exec,
)


def captured_at(sizes: Sequence[int]) -> AbstractContextManager[None]:
    """SGLang's graphs that are made meanwhile are for these batch sizes, if it makes any."""
    graph = get_exec().graph
    if not sizes:
        return nullcontext()
    decode = with_fields(graph.cuda_graph_config.decode, bs=list(sizes))
    return graph.override(cuda_graph_config=with_fields(graph.cuda_graph_config, decode=decode))


def shared_evenly(sizes: Sequence[int], runner: ModelRunner, width: int) -> list[int]:
    """Raise each batch size to the next one whose rows the ranks can share evenly: SGLang captures no others."""
    if not sizes:
        return []
    gathers = any(runner.decode_graph_gather_requirements())
    ranks = get_cuda_graph_batch_size_alignment(gathered_buffer_required=gathers)
    multiple = ranks // math.gcd(ranks, width)
    return sorted({-(-size // multiple) * multiple for size in sizes})


def by_tokens() -> AbstractContextManager[None]:
    """SGLang's graphs that are made meanwhile are of a ragged verify: one for each number of tokens.

    SGLang makes them for algorithms that ask for them by the environment.
    """
    return replaced("ragged-graphs", decode_cuda_graph_runner, lambda spec_algorithm: True)


class GraphInputs(NamedTuple):
    """Static inputs of a runner's graphs, by SGLang's names. Target and draft share them where their sizes are
    alike."""

    input_ids: torch.Tensor  # [rows], as the next two
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor  # [requests], as the next
    req_pool_indices: torch.Tensor

    @classmethod
    def of(cls, runner: ModelRunner, requests: int, rows: int) -> GraphInputs | None:
        """Those of the graphs in use; None without, or where none is large enough. rows: of all requests."""
        graphs = runner.decode_cuda_graph_runner
        if not isinstance(graphs, DecodeCudaGraphRunner) or requests > graphs.max_bs:
            return None
        inputs = cls(*(getattr(graphs.buffers, name) for name in cls._fields))
        return inputs if rows <= len(inputs.input_ids) else None


def leave_in_place(graphs: Any) -> None:
    """Spares the copies of inputs that lie where they would be copied to.

    graphs: what runs decode steps, graphs or not.
    """
    if isinstance(graphs, DecodeCudaGraphRunner):
        for name in GraphInputs._fields:
            slot = graphs.buffer_registry.get_slot(name)
            replace("graph-inputs", slot, partial(_unless_in_place, slot))


def _unless_in_place(slot: Any, forward_batch: Any, context: Any) -> torch.Tensor | None:
    """SGLang's hook on what is copied into a graph's input."""
    del context
    source = getattr(forward_batch, slot.name)
    return None if source.data_ptr() == slot.buffer.data_ptr() else source


def run_on(runner: ModelRunner, attention: Any, graphs: Any, recurrent: Any = None) -> None:
    """From the next forward on.

    graphs: SGLang's decode graph runner, its eager runner, or None. recurrent: a form of the target's
    `MambaPool.SpeculativeState`, or None for a runner without recurrent layers."""
    replace("runtime-attention", runner, attention)
    replace("runtime-graphs", runner, graphs)
    if recurrent is not None:
        replace("runtime-recurrent", runner.req_to_token_pool.mamba_pool, recurrent)


def keeping(runner: ModelRunner, recurrent: Any) -> AbstractContextManager[None]:
    """Graphs that are captured meanwhile keep the states of verified rows in `recurrent`, if it is not None."""
    if recurrent is None:
        return nullcontext()
    return replaced("runtime-recurrent", runner.req_to_token_pool.mamba_pool, recurrent)
