"""Times of CUDA graphs that take turns, so that all of them meet the same clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `run` launches, replayed once, and what it gives."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def replayed_in_turn(graphs: Mapping[str, torch.cuda.CUDAGraph], times: int) -> dict[str, list[float]]:
    """Milliseconds of so many replays of each."""
    found: dict[str, list[float]] = {kind: [] for kind in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(times):
        for kind, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[kind].append(start.elapsed_time(end))
    return found
