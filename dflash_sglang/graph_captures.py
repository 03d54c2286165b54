"""How SGLang's graph runners capture: at which sizes, after how many warm-ups, and what happens meanwhile."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from dflash_sglang.compat import FullCudaGraphBackend, get_exec
from dflash_sglang.config.width import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.compat import DecodeCudaGraphRunner


@contextmanager
def captured_at(sizes: Sequence[int]) -> Iterator[None]:
    """SGLang's graphs that are made meanwhile are for these batch sizes, if it makes any."""
    config = get_exec().graph.cuda_graph_config.decode
    usual = config.bs
    if sizes:
        config.bs = list(sizes)
    try:
        yield
    finally:
        config.bs = usual


@contextmanager
def heap_left_alone() -> Iterator[None]:
    """SGLang collects garbage before and after the captures of a runner, each time among all objects of the
    process, a million: half a second. Meanwhile among new ones alone, and by nobody else."""
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


def warm_up_less(runner: ModelRunner) -> None:
    """From now on this runner's graphs run less often what they are to capture. SGLang runs a forward twice before
    it captures it, each time for as long as the capture takes: what is done once in a process is done, and kernels
    are loaded. What is left: two runs before the first capture of the runner; one before the first of its later
    graphs, and where as many rows of drafted blocks were not captured before; else none.

    Where pieces of a forward are captured, SGLang's backend needs what a warm-up returns, and all are left.
    """
    graphs: Any = runner._decode_cuda_graph_runner_cls()
    known: set[int] = set()  # rows that were captured

    class WarmedUpLess(graphs):
        def capture(self) -> None:
            if not isinstance(self.backend, FullCudaGraphBackend):
                super().capture()
                return
            whole = self.backend.capture_one
            new, first = not known, True

            def capture_one(key: Any, forward: Callable[[], Any], **more: Any) -> None:
                nonlocal first
                rows = key.size if self.ragged_verify_mode else key.size * self.captured_req_width
                spared = 0 if new else 1
                if not first and not self.enable_torch_compile and (new or rows in known):
                    spared += 1
                runs = chain(repeat(lambda: None, spared), repeat(forward))  # called twice, then captured
                whole(key, lambda: next(runs)(), **more)
                first = False
                if self.captured_req_width > PLAIN:
                    known.add(rows)

            self.backend.capture_one = capture_one
            try:
                super().capture()
            finally:
                del self.backend.capture_one

    runner._decode_cuda_graph_runner_cls = lambda: WarmedUpLess


def by_tokens(graphs: type[DecodeCudaGraphRunner]) -> type[DecodeCudaGraphRunner]:
    """SGLang's graphs of a ragged verify, which it makes for algorithms that ask for them by the environment."""

    class ByTokens(graphs):
        ragged_verify_mode = property(lambda self: True, lambda self, mode: None)

    return ByTokens
