"""What each width runs with: attention backends and graphs of its own, of the target and of the draft, and the
target's recurrent states of verified rows."""

from __future__ import annotations

import bisect
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

from dflash_sglang.attention.trees import serve_trees
from dflash_sglang.drafting.replays import forget as forget_replays
from dflash_sglang.drafting.step_slots import TREE_ROWS
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.patches.attention_room import plan_windows, room_for_blocks
from dflash_sglang.patches.flash3 import spare_launches
from dflash_sglang.patches.graphs import by_tokens, captured_at, keeping, leave_in_place, run_on, shared_evenly
from dflash_sglang.patches.replayed_states import move_states_in_forward
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.sglang_names.scheduler import DecodeCudaGraphRunner, ModelRunner, get_spec
from dflash_sglang.verify.recurrent import replays, states_of_width
from dflash_sglang.verify.rows import Shape
from dflash_sglang.verify.tree import Trees
from dflash_sglang.width.options import least_budget

TILE = 64  # rows: with fewer of them, GEMMs take as long


class RuntimeState(NamedTuple):
    """What a model runner runs blocks of one width with."""

    attention: Any
    graphs: Any  # SGLang's decode graph runner, its eager runner, or None
    recurrent: Any = None  # `states_of_width`

    @classmethod
    def from_runner(cls, runner: ModelRunner, width: int) -> RuntimeState:
        return cls(runner.attn_backend, runner.decode_cuda_graph_runner, states_of_width(runner, width))

    @classmethod
    def build(
        cls,
        runner: ModelRunner,
        width: int,
        sizes: Sequence[int],
        ragged: bool = False,
        trees: Trees | None = None,
    ) -> RuntimeState:
        """Build backends beside the present ones, and capture graphs at these batch sizes if those have any.

        With `ragged`, a graph is for as many tokens as these batches have, at most `width` of each request. With
        `trees`, whose nodes are the width, rows attend to their ancestors.
        The backends share SGLang's workspace: forwards follow each other on one stream.
        """
        recurrent = states_of_width(runner, width)
        settings = get_spec().override(speculative_num_draft_tokens=width)
        with settings, captured_at(sizes), keeping(runner, recurrent):
            with room_for_blocks(runner):
                attention = runner._get_attention_backend()
            spare_launches(attention)
            plan_windows(attention)
            if trees is not None:
                serve_trees(attention, trees.tree)
            if width == PLAIN and replays(runner):
                move_states_in_forward(attention)
            graphs = runner.decode_cuda_graph_runner
            if isinstance(graphs, DecodeCudaGraphRunner):
                with by_tokens() if ragged else nullcontext():
                    graphs = type(graphs)(runner, attn_backend=attention, speculative_num_draft_tokens=width)
                leave_in_place(graphs)
        return cls(attention, graphs, recurrent)


class RuntimeStates:
    """The runtime states of all served widths, one of which is in use.

    A prefill has no width. It runs with the state of the widest blocks (`use_widest`).
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        model: DFlashDraftModel,
        block_size: int,
        draft_scope: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Graphs of the widest blocks, `block_size`, exist already. draft_scope: the draft is captured in it."""
        self._target, self._draft, self._model, self._draft_scope = target, draft, model, draft_scope
        own = RuntimeState.from_runner(target, block_size), RuntimeState.from_runner(draft, block_size)
        self._states = {block_size: own}
        for state in own:
            leave_in_place(state.graphs)
        self._widest = block_size
        self._used = Shape(block_size)
        self._ragged: RuntimeState | None = None  # the target's, whatever the width of the draft's blocks
        self._trees: dict[int, tuple[RuntimeState, int]] = {}  # the target's, and the most requests, by nodes
        self.chains: dict[int, int] = {}  # {rows: the most requests of a step} of the chains beyond blocks

    @property
    def serves_ragged(self) -> bool:
        return self._ragged is not None

    def add(self, width: int, sizes: Sequence[int] | None = None) -> None:
        """Build the states of a width, captured at `sizes`, by default at those of the widest blocks.

        Width 1 has no draft forward, and chains beyond blocks begin with the widest ones."""
        if width in self._states:
            return
        sizes = self._fitting(captured_sizes(self._target), width) if sizes is None else sizes
        target, draft = RuntimeState.build(self._target, width, sizes), self._states[self._widest][1]
        if PLAIN < width < self._widest:
            self._model.serve_blocks_of(width)
            with self._draft_scope():
                draft = RuntimeState.build(self._draft, self._model.spec.draft_rows(width), sizes)
            self._model.serve_blocks_of(self._used.width)
        self._states[width] = target, draft

    def recurrent(self, width: int) -> Any:
        """The target's recurrent states in steps of this width (`states_of_width`)."""
        return self._states[width][0].recurrent

    def drop(self, widths: Iterable[int]) -> None:
        """Serve these widths no longer."""
        self.use_widest()
        for width in widths:
            del self._states[width]
        forget_replays()
        gc.collect()

    def add_while_free(self, widths: Iterable[int], free: Callable[[], float], reserve: float) -> dict[int, float]:
        """Add one width after the other, the most useful first, while `reserve` of what is `free()` should remain.

        The next width is taken to cost what the dearest did. Width 1 is added at any price. Returns the price of
        each, in the order in which they were added.
        """
        took: dict[int, float] = {}
        for width in by_use(widths, self._widest):
            before, sizes = free(), self._sizes(width)
            capturable = bool(sizes) or not captured_sizes(self._target)
            if width == PLAIN or (capturable and before - max(took.values(), default=0.0) >= reserve):
                self.add(width, sizes)
                took[width] = before - free()
        return took

    def _sizes(self, width: int) -> list[int]:
        """The batch sizes that a width is captured at.

        A batch needs as many rows as one whole block: fewer rows take as long. Within a tile of rows one batch
        size between two powers of two is enough, for the same reason. Width 1 has no such lower bound.
        """
        sizes = sparse(captured_sizes(self._target))
        rows = 1 if width == PLAIN else self._widest
        sizes = [size for size in sizes if size * width >= rows or size == sizes[-1]]
        sizes = [
            size
            for size, larger in zip_longest(sizes, sizes[1:])
            # Both lie after the same power of two otherwise.
            if larger is None or larger * width > TILE or (size - 1).bit_length() != (larger - 1).bit_length()
        ]
        return self._fitting(sizes, width)

    def _fitting(self, sizes: Sequence[int], width: int) -> list[int]:
        """These batch sizes as ranks can share them, without those of more rows than the widest blocks have:
        SGLang's graphs share one buffer of logits."""
        most = self._widest * max(captured_sizes(self._target), default=0)
        return [size for size in shared_evenly(sizes, self._target, width) if size * width <= most]

    def add_ragged(self) -> None:
        """Build the target's state of ragged steps."""
        sizes = sparse(captured_sizes(self._target))
        self._ragged = RuntimeState.build(self._target, self._widest, sizes, ragged=True)

    @property
    def trees(self) -> dict[int, int]:
        """{nodes: the most requests of a step} of the trees that are served."""
        return {nodes: requests for nodes, (_, requests) in self._trees.items()}

    def tree_sizes(self, nodes: int, padded: int) -> list[int]:
        """The batch sizes at which trees of so many nodes are served, ascending; none where they do not fit.

        padded: the most requests, with the padding of the draft's graph, that have candidates for trees."""
        most = min(most_requests([nodes]), self._target.req_to_token_pool.size)
        sizes, drafted = [1 << power for power in range(most.bit_length())], captured_sizes(self._draft)
        if not drafted:
            return sizes
        fitting = self._fitting(sizes, nodes)
        return [size for size in fitting if next((of for of in drafted if of >= size), padded + 1) <= padded]

    def add_trees(self, trees: Trees, sizes: Sequence[int], captured: AbstractContextManager[None]) -> None:
        """Build the target's state of these trees. captured: the tail of the graphs accepts trees meanwhile."""
        with captured:
            state = RuntimeState.build(self._target, trees.nodes, sizes, trees=trees)
        self._trees[trees.nodes] = state, trees.requests

    def add_chain(self, rows: int, requests: int) -> None:
        """Build the target's state of chains of more rows than a block, for so many requests at most; none where
        graphs have no room for them."""
        most = min(requests, self._target.req_to_token_pool.size)
        sizes = [1 << power for power in range(most.bit_length())]
        if captured_sizes(self._target):
            sizes = self._fitting(sizes, rows)
        if sizes:
            self.add(rows, sizes)
            self.chains[rows] = sizes[-1]

    def captured_requests(self, tokens: int, requests: int) -> int | None:
        """The number of requests that the ragged graph of so many tokens was captured with; None if there is no
        such graph, or it is too small for these requests."""
        graphs = None if self._ragged is None else self._ragged.graphs
        if not isinstance(graphs, DecodeCudaGraphRunner) or tokens not in graphs.capture_num_tokens:
            return None
        captured = graphs._ragged_capture_slots(tokens)
        return captured if requests <= captured else None

    def verify_budgets(self, most_requests: int) -> list[int]:
        """The numbers of tokens that ragged steps may verify, ascending, up to `most_requests` whole blocks.

        These are the captured ones, then 1, 3 and 5 times powers of two."""
        graphs = None if self._ragged is None else self._ragged.graphs
        captured = list(graphs.capture_num_tokens) if isinstance(graphs, DecodeCudaGraphRunner) else [0]
        most = most_requests * self._widest
        more = sorted(factor << power for factor in (1, 3, 5) for power in range(most.bit_length()))
        beyond = [tokens for tokens in more if captured[-1] < tokens < 2 * most]
        budgets = [tokens for tokens in (*captured, *beyond) if tokens]
        return budgets[: bisect.bisect_left(budgets, most) + 1]

    def shapes(self, widths: Iterable[int]) -> list[Shape]:
        """One of each form that steps of these widths can have; the ragged one for two requests."""
        shapes = [*map(Shape, widths), *(Shape(self._widest, nodes=nodes) for nodes in self._trees)]
        shapes += [Shape(self._widest, chain=rows) for rows in self.chains]
        if self.serves_ragged and self._target.req_to_token_pool.size > 1:
            budget = least_budget(self.verify_budgets(2), 2, self._widest)
            if budget is not None:
                shapes.append(Shape(self._widest, budget))
        return shapes

    def use_widest(self) -> None:
        self.use(Shape(self._widest))

    def use(self, shape: Shape) -> None:
        """Install what steps of this shape run with, for the next forwards. Raises KeyError for a width or trees
        that are not served."""
        used = shape if shape.budget is None else shape._replace(budget=0)  # all budgets have one state
        if used == self._used:
            return
        target, draft = self._states[shape.chain or shape.width]
        if shape.nodes is not None:
            target, _ = self._trees[shape.nodes]
        if shape.budget is not None:
            assert self._ragged is not None, "add_ragged comes first"
            target = self._ragged
        run_on(self._target, *target)
        run_on(self._draft, *draft)
        self._used = used


def most_requests(trees: Iterable[int]) -> int:
    """Of a step of trees of any of these numbers of nodes; 0 without any."""
    return max((TREE_ROWS // nodes for nodes in trees), default=0)


def captured_sizes(runner: ModelRunner) -> list[int]:
    """Batch sizes that a runner's steps are padded to, ascending; none where nothing is captured."""
    graphs = runner.decode_cuda_graph_runner
    return sorted(graphs.capture_bs) if isinstance(graphs, DecodeCudaGraphRunner) else []


def sparse(sizes: Sequence[int]) -> list[int]:
    """The batch sizes among these that are 1, 3 or 5 times a power of two, and the largest.

    They take half as long to capture as SGLang's, and pad a step by a third at most."""
    return [size for size in sizes if size // (size & -size) in (1, 3, 5) or size == sizes[-1]]


def by_use(widths: Iterable[int], served: int) -> list[int]:
    """The widths beside the served one, the most useful first.

    That is width 1, then always the width whose ratio to all before is furthest from one: step times and accepts
    of a width resemble those of its neighbours."""
    left, known = set(widths) - {served, PLAIN}, [served, PLAIN]
    while left:
        next_one = max(left, key=lambda width: (min(abs(math.log(width / other)) for other in known), width))
        known.append(next_one)
        left.remove(next_one)
    return [PLAIN, *known[2:]]
