"""Widths beside the block's: what building them does to the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any


class Graph(SimpleNamespace):
    """SGLang's settings of graphs."""

    @contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        yield
        vars(self).update(before)


class Garbage:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_captures_leave_the_objects_that_were_there_to_no_collection_of_garbage_but_their_own(monkeypatch):
    from dflash_sglang import widths

    graph = Graph(enable_cudagraph_gc=False)
    seen: list[tuple[int, bool, bool, bool]] = []
    left: list[weakref.ref[Garbage]] = []
    kept = [[] for _ in range(1000)]

    def built(runner: Any, width: int, sizes: list[int], known: set[int]) -> widths.Lane:
        left.append(weakref.ref(Garbage()))
        seen.append((width, gc.get_freeze_count() > len(kept), gc.isenabled(), graph.enable_cudagraph_gc))
        return widths.Lane(None, None)

    monkeypatch.setattr(widths.Lane, "built", built)
    monkeypatch.setattr(widths, "get_exec", lambda: SimpleNamespace(graph=graph))
    runner = SimpleNamespace(attn_backend=None, decode_cuda_graph_runner=None)
    served = widths.Widths(runner, runner, SimpleNamespace(serve_blocks_of=lambda width: None), 8, nullcontext)
    gc.unfreeze()
    with widths.heap_left_alone():
        served.add([1, 4], [1, 2])
        assert [reference() for reference in left] == [None] * 3
    assert seen == [(width, True, False, True) for width in (1, 4, 4)]
    assert served.served == [1, 4, 8]
    assert gc.get_freeze_count() == 0 and gc.isenabled() and not graph.enable_cudagraph_gc
