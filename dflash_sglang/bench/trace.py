"""A decode step taken apart: a torch profiler's trace, as verify graph, draft graph, other kernels and gaps.

Kernels belong together when one launch started them: they carry its correlation id, and a graph's launch is the
only one that starts more than one. A graph replays the same number of kernels each time (at one batch size, which
a profile's load keeps), so that number tells graphs apart; those that take the most time verify, the next ones
draft. A step lasts from one launch of verify to the next one. A graph that was running when the profile began has
fewer kernels than it should, and is none of them.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
VERIFY, DRAFT, OTHER_GRAPHS, OUTSIDE = "verify", "draft", "other_graphs", "outside"
GRAPHS = (VERIFY, DRAFT, OTHER_GRAPHS)
PARTS = (*GRAPHS, OUTSIDE)
LONGEST = 30  # kernels of a graph that are told by name


class TraceError(ValueError):
    """The trace does not show what a decode step is made of; says what it lacks."""


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # microseconds
    end: float
    launch: int  # correlation id


@dataclass(frozen=True)
class Step:
    """Averages over ``steps`` steps, in milliseconds. Each instant belongs to the first part that runs a kernel in
    it: verify, draft, other graphs, outside; else to the gaps, ``gaps_in_graphs`` of them between the first and
    the last kernel of a graph. So the parts sum to ``step_ms``.

    ``verify_span_ms``: of the verify graph, from its first kernel to its last, with the gaps between them.
    ``kernels``: how many a step has of each part. ``outside_kernels``: (name, launches a step, microseconds a
    step), the longest first; ``graph_kernels``: the same of the LONGEST ones of each part that is graphs.
    """

    steps: int
    step_ms: float
    verify_ms: float
    draft_ms: float
    other_graphs_ms: float
    outside_ms: float
    gaps_ms: float
    gaps_in_graphs_ms: float
    verify_span_ms: float
    kernels: Mapping[str, float]
    outside_kernels: Sequence[tuple[str, float, float]]
    graph_kernels: Mapping[str, Sequence[tuple[str, float, float]]]

    @property
    def idle(self) -> float:
        """Share of the step in which the GPU runs nothing."""
        return self.gaps_ms / self.step_ms


def read(path: Path) -> Step:
    """The average step of a trace file, .json or .json.gz. Raises TraceError."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return step_of(json.load(file)["traceEvents"])


def step_of(events: Iterable[Mapping[str, Any]]) -> Step:
    """`events`: of the trace, in Chrome's format."""
    kernels, graph_launches = _kernels(events)
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    graphs = {launch: run for launch, run in launches.items() if len(run) > 1 or launch in graph_launches}
    verify = next(iter(_kinds(graphs)), [])
    starts = sorted(_start(graphs[launch]) for launch in verify)
    if len(starts) < 2:
        raise TraceError(f"the trace has {len(starts)} launches of a verify graph: expected at least 2")
    begin, end, steps = starts[0], starts[-1], len(starts) - 1
    part_of = _parts({launch: run for launch, run in graphs.items() if begin <= _start(run) < end})
    inside = [kernel for kernel in kernels if begin <= kernel.start < end]
    by_part: dict[str, list[Kernel]] = {part: [] for part in PARTS}
    for kernel in inside:
        by_part[part_of.get(kernel.launch, OTHER_GRAPHS if kernel.launch in graphs else OUTSIDE)].append(kernel)
    busy = _shares([[(k.start, min(k.end, end)) for k in by_part[part]] for part in PARTS])
    spans = [(_start(run), min(_end(run), end)) for run in graphs.values()]
    spans = [span for span in spans if begin <= span[0] < end]
    verify_spans = [(_start(graphs[at]), _end(graphs[at])) for at, part in part_of.items() if part == VERIFY]
    with_graphs_whole = _length([*spans, *((k.start, min(k.end, end)) for k in inside)])
    gaps = end - begin - sum(busy)
    ms = 1 / (1000 * steps)
    return Step(
        steps=steps,
        step_ms=(end - begin) * ms,
        verify_ms=busy[0] * ms,
        draft_ms=busy[1] * ms,
        other_graphs_ms=busy[2] * ms,
        outside_ms=busy[3] * ms,
        gaps_ms=gaps * ms,
        gaps_in_graphs_ms=(with_graphs_whole - sum(busy)) * ms,
        verify_span_ms=_length(verify_spans) * ms,
        kernels={part: len(by_part[part]) / steps for part in PARTS},
        outside_kernels=_by_name(by_part[OUTSIDE], steps),
        graph_kernels={part: _by_name(by_part[part], steps)[:LONGEST] for part in GRAPHS},
    )


def _start(run: Iterable[Kernel]) -> float:
    return min(kernel.start for kernel in run)


def _end(run: Iterable[Kernel]) -> float:
    return max(kernel.end for kernel in run)


def _kernels(events: Iterable[Mapping[str, Any]]) -> tuple[list[Kernel], set[int]]:
    """What ran on the device, and the correlation ids of the launches of graphs."""
    kernels: list[Kernel] = []
    graph_launches: set[int] = set()
    for event in events:
        arguments = event.get("args") or {}
        correlation = arguments.get("correlation")
        if event.get("cat") in DEVICE_CATEGORIES:
            start = float(event["ts"])
            launch = -1 - len(kernels) if correlation is None else correlation  # one of its own
            kernels.append(Kernel(event["name"], start, start + float(event["dur"]), launch))
        elif "GraphLaunch" in event.get("name", "") and correlation is not None:
            graph_launches.add(correlation)
    if not kernels:
        raise TraceError("the trace has no kernel of a GPU")
    return kernels, graph_launches


def _kinds(graphs: Mapping[int, Sequence[Kernel]]) -> list[list[int]]:
    """The launches of each graph, those first that take the most time."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for launch, run in graphs.items():
        by_size[len(run)].append(launch)

    def time(launches: list[int]) -> float:
        return sum(kernel.end - kernel.start for launch in launches for kernel in graphs[launch])

    return sorted(by_size.values(), key=time, reverse=True)


def _parts(graphs: Mapping[int, Sequence[Kernel]]) -> dict[int, str]:
    """The part that each launch of a graph is of."""
    names = itertools.chain((VERIFY, DRAFT), itertools.repeat(OTHER_GRAPHS))
    return {launch: name for name, kind in zip(names, _kinds(graphs), strict=False) for launch in kind}


def _shares(parts: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """How long each part runs while none before it does."""
    shares: list[float] = []
    seen: list[tuple[float, float]] = []
    covered = 0.0
    for part in parts:
        seen += part
        total = _length(seen)
        shares.append(total - covered)
        covered = total
    return shares


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _by_name(kernels: Iterable[Kernel], steps: int) -> list[tuple[str, float, float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel.end - kernel.start)
    rows = [(name, len(times) / steps, sum(times) / steps) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])
