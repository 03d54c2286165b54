"""WidthPolicy alone: what it keeps from step to step, and from one request of a slot to the next; and copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width.policy import Stretch, WidthPolicy
from dflash_sglang.width.step_times import Sample

BLOCK, LONG = 16, 64
SURE, POOR = 0.99, 0.3  # chances that the draft gives each proposal


def policy(**more: Any) -> WidthPolicy:
    """Of steps that take 10 ms and 1 ms more for every row."""
    settings: dict[str, Any] = dict(trees={16: 4}, chains={32: 4, LONG: 2}, budgets=[4, 8, 16, 32, 64])
    out = WidthPolicy(WidthConfig(), BLOCK, [1, 2, 4], 9, **(settings | more))
    assert out.decider is not None
    out.decider.step_times.fit(
        [Sample(bs, kind, 100 * bs, 0.01 + 0.001 * bs * (kind.nodes or kind.width))
         for kind in out.kinds for bs in (1, 2, 4)]
    )  # fmt: skip
    return out


def come_back(
    chosen: WidthPolicy,
    step: Stretch,
    share: float,
    right: float,
    seconds: float | None = 0.02,
    accepted: Any = None,
) -> None:
    """Result of a step of which every request accepts this share, or so many [n] proposals. right: chance that a
    copied token is."""
    n, shape = len(step.slots), step.decision.shape
    logprobs = np.full((n, shape.width - 1), np.log(SURE if share > 0.5 else POOR), np.float32)
    lens = mass = None
    if shape.budget is not None:
        lens = np.full(n, shape.budget // n)
    if shape.nodes is not None:
        mass = np.tile(-np.arange(shape.nodes, dtype=np.float32), (n, 1))
    most = (shape.chain or shape.width if lens is None else int(lens[0])) - 1
    of_each = [min(int(share * ((shape.chain or shape.width) - 1)), most)] * n if accepted is None else accepted
    chosen.verified(step, of_each, logprobs, lens, mass, np.full(n, right, np.float32))
    if seconds is not None:
        chosen.timed(step, seconds)


def serve(
    chosen: WidthPolicy, slots: list[int], steps: int, share: float, right: float = 0.0, longest: int = LONG
) -> list[Any]:
    """The decisions of so many steps."""
    decisions = []
    for _ in range(steps):
        step = chosen.choose(np.array(slots), 100 * len(slots), longest=longest)
        come_back(chosen, step, share, right)
        decisions.append(step.decision)
    return decisions


@pytest.mark.parametrize(("share", "right", "then"), [(1.0, SURE, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
def test_a_slot_that_was_used_decides_as_a_fresh_one(share, right, then):
    used, fresh = policy(), policy()
    for chosen in (used, fresh):
        chosen.admit(np.array([1, 3]))
        serve(chosen, [1], 40, share, right)
        serve(chosen, [3], 20, 0.5)
    used.admit(np.array([1]))
    fresh.admit(np.array([2]))
    assert serve(used, [1], 20, then) == serve(fresh, [2], 20, then)


def test_a_result_that_comes_after_its_slot_was_given_away_is_not_the_next_requests():
    told, untold = policy(), policy()
    for chosen in (told, untold):
        chosen.admit(np.array([1]))
        serve(chosen, [1], 20, 1.0)
        late = [chosen.choose(np.array([1]), 100) for _ in range(2)]
        chosen.admit(np.array([1]))
        for step in late if chosen is told else ():
            come_back(chosen, step, 0.0, 0.0, seconds=None)
    assert serve(told, [1], 20, 0.5) == serve(untold, [1], 20, 0.5)


def test_the_time_of_steps_of_copies_is_not_that_of_blocks():
    quick, slow = policy(), policy()
    for chosen, seconds in ((quick, 0.02), (slow, 0.06)):
        chosen.admit(np.array([1]))
        serve(chosen, [1], 20, 1.0, SURE)
        for _ in range(20):
            step = chosen.choose(np.array([1]), 100, longest=LONG)
            assert step.decision.chain == LONG
            come_back(chosen, step, 1.0, SURE, seconds)
    assert serve(quick, [1], 20, 0.3, longest=0) == serve(slow, [1], 20, 0.3, longest=0)


def test_blocks_go_on_after_steps_of_copies_as_if_there_had_been_none():
    copied, not_copied = policy(), policy()
    for chosen in (copied, not_copied):
        chosen.admit(np.array([1, 2]))
        serve(chosen, [1], 20, 1.0, SURE, longest=0)  # copies of one of them would come true
        serve(chosen, [2], 20, 0.0, longest=0)
        serve(chosen, [1, 2], 1, 0.3, SURE, longest=0)
        for _ in range(3):  # the results of these and of the next steps never come
            chosen.choose(np.array([1, 2]), 200)
        for _ in range(3):
            step = chosen.choose(np.array([1, 2]), 200, longest=LONG if chosen is copied else 0)
            assert (step.decision.chain is not None) == (chosen is copied)
    after = [serve(chosen, [1, 2], 20, 0.3, longest=0) for chosen in (copied, not_copied)]
    ours, others = ({decision.kind for decision in of if not decision.probe} for of in after)
    assert ours == others and len(ours) == 1, "decisions hold for other steps"


# ---- Copies --------------------------------------------------------------------------------------------------


def blocks(**more: Any) -> WidthPolicy:
    """Of blocks of 16 rows, and of copies."""
    out = policy(trees={}, budgets=None, **more)
    out.admit(np.arange(9), None, [BLOCK] * 9)
    return out


def long_next(chosen: WidthPolicy, *slots: int, longest: int = LONG) -> bool:
    step = chosen.choose(np.array(slots), 100, longest=longest)
    assert step.decision.chain in (None, longest)
    return step.decision.chain is not None


def step_of(chosen: WidthPolicy, accepted: list[int], right: float, slots: list[int], longest: int = 0) -> None:
    come_back(chosen, chosen.choose(np.array(slots), 100, longest=longest), 1.0, right, accepted=accepted)


@pytest.mark.parametrize(
    ("accepted", "right", "pays"), [(15, SURE, True), (15, 0.0, False), (14, SURE, False), (15, 0.5, False)]
)
def test_a_request_whose_copy_came_true_to_the_end_of_a_block_gets_long_chains(accepted, right, pays):
    chosen = blocks()
    step_of(chosen, [accepted], right, [1])
    assert long_next(chosen, 1) is pays and not long_next(chosen, 2)


def test_a_copy_that_comes_true_to_the_end_of_a_block_is_gone_on_with_though_a_decision_holds():
    chosen = blocks()
    for _ in range(12):  # of steps 8 to 15 one decision
        step_of(chosen, [3], 0.0, [1], LONG)
    step_of(chosen, [15], SURE, [1], LONG)
    assert long_next(chosen, 1)


@pytest.mark.parametrize(("accepted", "goes_on"), [(16, False), (17, True), (63, True), (3, False)])
def test_long_chains_go_on_while_they_give_a_tenth_more_than_blocks(accepted, goes_on):
    chosen = blocks()
    step_of(chosen, [15], SURE, [1])
    step, steps = chosen.choose(np.array([1]), 100, longest=LONG), 0
    while step.decision.chain is not None and steps < 100:
        come_back(chosen, step, 1.0, SURE, accepted=[accepted])
        step, steps = chosen.choose(np.array([1]), 100, longest=LONG), steps + 1
    assert (steps == 100) is goes_on
    assert goes_on or 5 < steps < 40, "they are left after some steps in which they gave nothing"
    told = chosen.snapshot()
    assert told["shapes"]["copy 64"] == steps + goes_on and told["changes"] == 0


def test_one_request_that_copies_is_enough_for_a_batch_and_new_ones_begin_as_all_lately_were():
    chosen = blocks()
    step_of(chosen, [15, 5], SURE, [1, 2])
    step_of(chosen, [63, 5], SURE, [1, 2], LONG)
    assert long_next(chosen, 1, 2) and long_next(chosen, 1, 2, longest=32) and not long_next(chosen, 2)
    assert not long_next(chosen, 1, longest=0)
    for accepted, copies in ((3, False), (63, True)):
        for _ in range(300):
            step_of(chosen, [15 if copies else accepted], SURE, [1])
        chosen.admit(np.array([4]))
        assert long_next(chosen, 4) is copies


@pytest.mark.parametrize(
    ("widest", "longest", "chain"), [([64, 3], 64, True), ([63, 3], 64, False), ([16, 16], 32, False)]
)
def test_no_step_is_longer_than_the_widest_that_a_request_of_its_batch_allows(widest, longest, chain):
    chosen = blocks()
    chosen.admit(np.array([1, 2]), widest, [BLOCK] * 2)
    for _ in range(3):
        step_of(chosen, [15, 2], SURE, [1, 2])
    assert long_next(chosen, 1, 2, longest=longest) is chain
    assert chosen.requests.most(np.array([1, 2])).tolist() == widest
    assert chosen.requests.cap(np.array([1, 2])) == BLOCK


@pytest.mark.parametrize(
    ("most", "least", "nodes"),
    [([16, 16], [1, 1], 16), ([5, 16], [1, 1], 16), ([5, 8], [1, 1], None), ([16, 16], [1, 4], None)],
)
def test_where_the_width_is_fixed_requests_that_ask_for_a_width_get_no_trees(most, least, nodes):
    fixed = WidthPolicy(WidthConfig(fixed="tree 16"), BLOCK, [1, 2, 4], 9, trees={16: 2})
    slots = np.array([1, 2])
    fixed.admit(slots, most, least)
    assert fixed.choose(slots, 200).decision.tree_nodes == nodes
    fixed.admit(slots)
    assert fixed.choose(slots, 200).decision.tree_nodes == 16
    assert fixed.choose(slots, 200, trees=False).decision.tree_nodes is None
