"""How SGLang's graph runners capture: at which sizes, after how many runs, and without collecting the whole heap's
garbage."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, repeat
from typing import Any

from sglang.srt.model_executor.runner import decode_cuda_graph_runner

from dflash_sglang.patches.apply import replaced
from dflash_sglang.sglang_names.scheduler import (
    ModelRunner,
    get_cuda_graph_batch_size_alignment,
    get_exec,
    get_flags,
)


@contextmanager
def captured_at(sizes: Sequence[int]) -> Iterator[None]:
    """SGLang's graphs that are made meanwhile are for these batch sizes, if it makes any."""
    config = get_exec().graph.cuda_graph_config.decode
    with replaced("graph-sizes", config, list(sizes) if sizes else config.bs):
        yield


def shared_evenly(sizes: Sequence[int], runner: ModelRunner, width: int) -> list[int]:
    """Raise each batch size to the next one whose rows the ranks can share evenly: SGLang captures no others."""
    if not sizes:
        return []
    gathers = any(runner.decode_graph_gather_requirements())
    ranks = get_cuda_graph_batch_size_alignment(gathered_buffer_required=gathers)
    multiple = ranks // math.gcd(ranks, width)
    return sorted({-(-size // multiple) * multiple for size in sizes})


def capture_one(
    capture: Callable[..., None], backend: Any, key: Any, forward: Callable[[], Any], *args: Any, **kwargs: Any
) -> None:
    """Hook around `FullCudaGraphBackend.capture_one`: a forward runs once before it is captured, not twice.

    One run is needed: Triton loads a kernel at its first launch, which CUDA forbids in a capture. A backend's
    first forward runs twice, as does each that torch.compile compiles.
    """
    twice = not backend._graphs or get_flags().capture.enable_torch_compile
    runs = chain([] if twice else [lambda: None], repeat(forward))
    capture(backend, key, lambda: next(runs)(), *args, **kwargs)


@contextmanager
def heap_left_alone() -> Iterator[None]:
    """Let SGLang collect garbage among new objects only, around the captures of a runner.

    It collects before and after them, each time among the million objects of the process: half a second.
    """
    by_itself = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        with get_exec().graph.override(enable_cudagraph_gc=True):  # else SGLang unfreezes after a capture
            yield
    finally:
        gc.unfreeze()
        if by_itself:
            gc.enable()


def by_tokens() -> AbstractContextManager[None]:
    """SGLang's graphs that are made meanwhile are of a ragged verify: one for each number of tokens.

    SGLang makes them for algorithms that ask for them by the environment.
    """
    return replaced("ragged-graphs", decode_cuda_graph_runner, lambda spec_algorithm: True)
