"""When steps verify more rows than a block: what is learnt of copies, and what the policy makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.chains import KEPT, PRICE, Chains
from dflash_sglang.width.policy import WidthPolicy
from dflash_sglang.width.step_times import Sample

BLOCK, CHAINS = 16, {32: 4, 64: 2}
BLOCKS, LONG = Shape(BLOCK), Shape(BLOCK, chain=64)
SLOT = np.array([2])


def of(*accepted: int) -> np.ndarray:
    return np.array(accepted)


def copied(*right: float) -> np.ndarray:
    return np.array(right, np.float32)


def test_a_request_whose_copy_came_true_to_the_end_of_a_block_gets_long_chains_and_others_do_not():
    for accepted, right, pays in ((15, 0.99, True), (15, 0.0, False), (14, 0.99, False), (15, 0.5, False)):
        chains = Chains(BLOCK, 8, CHAINS)
        chains.admit(SLOT)
        chains.observe(SLOT, BLOCKS, of(accepted), copied(right))
        assert chains.pay(SLOT) is pays, (accepted, right)
        assert not chains.pay(np.array([3]))


def test_long_chains_go_on_while_they_give_a_tenth_more_than_blocks():
    for accepted, pays in ((16, False), (17, True), (63, True), (3, False)):
        chains = Chains(BLOCK, 8, CHAINS)
        chains.observe(SLOT, BLOCKS, of(15), copied(0.99))
        for _ in range(100):
            chains.observe(SLOT, LONG, of(accepted), copied(0.0))
        beyond = max(accepted + 1 - BLOCK, 0)
        assert (beyond > PRICE * min(accepted + 1, BLOCK)) is pays, "of the case itself"
        assert chains.pay(SLOT) is pays, accepted


def test_a_request_leaves_long_chains_after_some_steps_in_which_they_gave_nothing():
    chains, steps = Chains(BLOCK, 8, CHAINS), 0
    chains.observe(SLOT, LONG, of(63), copied(0.99))
    while chains.pay(SLOT):
        chains.observe(SLOT, LONG, of(4), copied(0.0))
        steps += 1
    assert steps == next(n for n in range(99) if (1 - KEPT) * 48 * KEPT**n <= PRICE * within(n))


def within(steps: int) -> float:
    known = KEPT * 1.0 + (1 - KEPT) * 16
    for _ in range(steps):
        known += (1 - KEPT) * (5 - known)
    return known


def test_one_request_that_copies_is_enough_for_the_batch_and_new_ones_begin_as_all_lately_were():
    chains, both = Chains(BLOCK, 8, CHAINS), np.array([1, 2])
    chains.observe(both, LONG, of(63, 5), copied(0.9, 0.0))
    assert chains.pay(both)
    assert not chains.pay(both[1:])
    for accepted, pays in ((3, False), (63, True)):
        for _ in range(300):
            chains.observe(both[:1], LONG, of(accepted), copied(0.9))
        chains.admit(np.array([4]))
        assert chains.pay(np.array([4])) is pays


def policy(**more: Any) -> WidthPolicy:
    out = WidthPolicy(WidthConfig(), BLOCK, [1, 2, 4, 8], 9, chains=CHAINS, **more)
    assert out.decider is not None
    out.decider.fit([Sample(1, kind, 1, 0.01) for kind in out.kinds])
    return out


def test_a_step_verifies_the_longest_chain_that_its_batch_allows_where_copies_pay_and_tells_what_it_was():
    chosen = policy()
    chosen.admit(SLOT)
    first = chosen.choose(SLOT, 100, False, 64)
    assert first.decision.chain is None
    told = np.zeros((1, BLOCK - 1), np.float32)
    chosen.verified(first, [first.decision.width - 1], 0.01, told, promised=copied(0.99))
    step = chosen.choose(SLOT, 100, False, 64)
    assert step.decision.shape == Shape(BLOCK, chain=64)
    assert type(step.decision).from_row(step.decision.row()) == step.decision
    chosen.verified(step, [63], 0.02, told, promised=copied(0.99))
    assert chosen.choose(SLOT, 100, False, 32).decision.shape == Shape(BLOCK, chain=32)
    assert chosen.choose(SLOT, 100, False, 0).decision.chain is None
    counts = chosen.metrics.snapshot()
    assert counts["shapes"]["copy 64"] == counts["shapes"]["copy 32"] == 1
    assert counts["changes"] == 0


def test_a_max_width_bounds_what_counts_as_verified_up_to_the_longest_chain():
    known = policy()
    known.admit(np.array([1, 2, 3, 4]), [64, 20, 16, 5])
    assert known.requests.most(np.array([1, 2, 3, 4])).tolist() == [64, 20, 16, 5]
    assert known.requests.cap(np.array([1, 2])) == BLOCK
    assert known.requests.cap(np.array([4])) == 5


@pytest.mark.parametrize("chains", [{}, {32: 4}])
def test_there_is_an_account_of_long_chains_where_these_are_served(chains):
    assert bool(Chains(BLOCK, 8, chains)) is bool(chains)
