"""Inputs of captured graphs: what a step finds in them is not copied into them again."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import DecodeCudaGraphRunner, ModelRunner


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
