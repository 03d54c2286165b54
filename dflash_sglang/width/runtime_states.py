"""Blocks of several widths: each has attention backends and graphs of its own, of the target and of the draft."""

from __future__ import annotations

import bisect
import gc
import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_sglang.patches.attention_room import room_for_blocks
from dflash_sglang.patches.flash3 import spare_launches
from dflash_sglang.patches.flashinfer_windows import plan_windows
from dflash_sglang.patches.graph_captures import by_tokens, captured_at, shared_evenly
from dflash_sglang.patches.graph_inputs import leave_in_place, load_inputs_once
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.sglang_names.scheduler import DecodeCudaGraphRunner, get_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.models.draft import DFlashDraftModel

TILE = 64  # rows: with fewer of them, GEMMs take as long


class Lane(NamedTuple):
    """What a model runner runs blocks of one width with."""

    attention: Any
    graphs: Any  # SGLang's decode graph runner, its eager runner, or None

    @classmethod
    def present(cls, runner: ModelRunner) -> Lane:
        return cls(runner.attn_backend, runner.decode_cuda_graph_runner)

    @classmethod
    def built(cls, runner: ModelRunner, width: int, sizes: Sequence[int], in_parts: bool = False) -> Lane:
        """Backends and graphs beside the present ones, captured at these batch sizes if those are; `in_parts`:
        for as many tokens as these have, whoever's they are and at most `width` of each request.

        Such backends share SGLang's workspace: forwards follow each other on one stream.
        """
        with get_spec().override(speculative_num_draft_tokens=width), captured_at(sizes):
            with room_for_blocks(runner):
                attention = runner._get_attention_backend()
            spare_launches(attention)
            plan_windows(attention)
            graphs = runner.decode_cuda_graph_runner
            if isinstance(graphs, DecodeCudaGraphRunner):
                kind = by_tokens(type(graphs)) if in_parts else type(graphs)
                graphs = kind(runner, attn_backend=attention, speculative_num_draft_tokens=width)
                leave_in_place(graphs)
        return cls(attention, graphs)

    def take(self, runner: ModelRunner) -> None:
        runner.attn_backend, runner.decode_cuda_graph_runner = self


class Widths:
    """The widths of blocks that can be served, one at a time.

    Prefill has no width: it runs with what the widest blocks have, as if there were no others (`use_widest`).
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        model: DFlashDraftModel,
        block_size: int,
        draft_scope: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Once graphs of the widest blocks, `block_size`, exist. draft_scope: in which the draft is captured."""
        self._target, self._draft, self._model, self._draft_scope = target, draft, model, draft_scope
        self._lanes = {block_size: (Lane.present(target), Lane.present(draft))}
        for lane in self._lanes[block_size]:
            leave_in_place(lane.graphs)
        self._used = self._widest = block_size
        self._parts: Lane | None = None
        self._in_parts = False

    @property
    def served(self) -> list[int]:
        """Ascending."""
        return sorted(self._lanes)

    def add(self, widths: Iterable[int], sizes: Sequence[int] | None = None) -> None:
        """Builds what these need and captures it at these batch sizes, by default at those of the widest blocks.
        Blocks of one token have no draft forward. What is garbage afterwards holds no memory of the device."""
        for width in widths:
            if width not in self._lanes:
                own = self._fitting(captured_sizes(self._target), width) if sizes is None else sizes
                self._lanes[width] = self._built(width, own)
                gc.collect()
        self._model.serve_blocks_of(self._used)

    def _built(self, width: int, sizes: Sequence[int]) -> tuple[Lane, Lane]:
        """The target's and the draft's."""
        target = Lane.built(self._target, width, sizes)
        load_inputs_once(target.graphs)
        if width == PLAIN:
            return target, Lane.present(self._draft)
        self._model.serve_blocks_of(width)
        with self._draft_scope():
            return target, Lane.built(self._draft, width, sizes)

    def add_while_free(self, widths: Iterable[int], free: Callable[[], float], reserve: float) -> dict[int, float]:
        """Adds one width after the other, the most useful first, as long as the next one should leave `reserve` of
        what is `free()`, if it takes what the dearest took. Plain decoding is added at any price.

        Returns what each took, in the order in which they were added.
        """
        took: dict[int, float] = {}
        for width in by_use(widths, self._widest):
            before, sizes = free(), self._sizes(width)
            capturable = bool(sizes) or not captured_sizes(self._target)
            if width == PLAIN or (capturable and before - max(took.values(), default=0.0) >= reserve):
                self.add([width], sizes)
                took[width] = before - free()
        return took

    def _sizes(self, width: int) -> list[int]:
        """Batch sizes that another width is captured at: of those that have as many rows as a whole block, for
        fewer rows take as long; and within a tile of rows one of those between two powers of two, for the same
        reason. Plain decoding at more."""
        sizes = sparse(captured_sizes(self._target))
        rows = 1 if width == PLAIN else self._widest
        sizes = [size for size in sizes if size * width >= rows or size == sizes[-1]]
        sizes = [
            size
            for size, larger in zip_longest(sizes, sizes[1:])
            if larger is None or larger * width > TILE or _octave(size) != _octave(larger)
        ]
        return self._fitting(sizes, width)

    def _fitting(self, sizes: Sequence[int], width: int) -> list[int]:
        """These batch sizes of blocks of a width, as ranks can share them, and with no more rows than the widest
        blocks have: SGLang's graphs have one buffer for their logits."""
        most = self._widest * max(captured_sizes(self._target), default=0)
        return [size for size in shared_evenly(sizes, self._target, width) if size * width <= most]

    def add_parts(self) -> None:
        """Builds what verifies blocks in part."""
        sizes = sparse(captured_sizes(self._target))
        self._parts = Lane.built(self._target, self._widest, sizes, in_parts=True)
        load_inputs_once(self._parts.graphs)

    def captured_requests(self, tokens: int, requests: int) -> int | None:
        """Requests that the graph for so many tokens in parts was captured with; None where there is none that
        these fit in."""
        graphs = None if self._parts is None else self._parts.graphs
        if not isinstance(graphs, DecodeCudaGraphRunner) or tokens not in graphs.capture_num_tokens:
            return None
        captured = graphs._ragged_capture_slots(tokens)
        return captured if requests <= captured else None

    def totals(self, most_requests: int) -> list[int]:
        """Numbers of tokens in parts, ascending, to `most_requests` whole blocks and beyond: those that are
        captured, then 1, 3 and 5 times powers of two."""
        graphs = None if self._parts is None else self._parts.graphs
        captured = list(graphs.capture_num_tokens) if isinstance(graphs, DecodeCudaGraphRunner) else [0]
        most = most_requests * self._widest
        more = sorted(factor << power for factor in (1, 3, 5) for power in range(most.bit_length()))
        beyond = [tokens for tokens in more if captured[-1] < tokens < 2 * most]
        totals = [tokens for tokens in (*captured, *beyond) if tokens]
        return totals[: bisect.bisect_left(totals, most) + 1]

    def use_widest(self) -> None:
        self.use(self._widest)

    def use(self, width: int, in_parts: bool = False) -> None:
        """From the next forward on; `in_parts`: the target's blocks are verified in part. Raises KeyError for a
        width that is not served."""
        if (width, in_parts) == (self._used, self._in_parts):
            return
        target, draft = self._lanes[width]
        if in_parts:
            assert self._parts is not None, "add_parts comes first"
            target = self._parts
        target.take(self._target)
        draft.take(self._draft)
        self._used, self._in_parts = width, in_parts


def captured_sizes(runner: ModelRunner) -> list[int]:
    """Batch sizes that a runner's steps are padded to, ascending; none where nothing is captured."""
    graphs = runner.decode_cuda_graph_runner
    return sorted(graphs.capture_bs) if isinstance(graphs, DecodeCudaGraphRunner) else []


def sparse(sizes: Sequence[int]) -> list[int]:
    """Of ascending batch sizes those that are 1, 3 or 5 times a power of two, and the largest: half as long to
    capture as SGLang's, and a step is padded by a third at most."""
    return [size for size in sizes if size // (size & -size) in (1, 3, 5) or size == sizes[-1]]


def _octave(size: int) -> int:
    """The same for all sizes from after a power of two to the next."""
    return (size - 1).bit_length()


def by_use(widths: Iterable[int], served: int) -> list[int]:
    """The other widths, plain decoding first, then always the one whose ratio to all before is furthest from one:
    the costs and accepts of a width resemble those of its neighbours."""
    left, known = set(widths) - {served, PLAIN}, [served, PLAIN]
    while left:
        next_one = max(left, key=lambda width: (min(abs(math.log(width / other)) for other in known), width))
        known.append(next_one)
        left.remove(next_one)
    return [PLAIN, *known[2:]]
