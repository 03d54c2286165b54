"""When steps verify more rows than a block: what is learnt of copies, and what the policy makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.chains import KEPT, PRICE, Chains
from dflash_sglang.width.group import Group
from dflash_sglang.width.policy import WidthPolicy
from dflash_sglang.width.step_times import Sample
from tests.support import copy_loop

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
    first = chosen.choose(SLOT, 100, longest=64)
    assert first.decision.chain is None
    told = np.zeros((1, BLOCK - 1), np.float32)
    chosen.verified(first, [first.decision.width - 1], 0.01, told, promised=copied(0.99))
    step = chosen.choose(SLOT, 100, longest=64)
    assert step.decision.shape == Shape(BLOCK, chain=64)
    assert type(step.decision).from_row(step.decision.row()) == step.decision
    chosen.verified(step, [63], 0.02, told, promised=copied(0.99))
    assert chosen.choose(SLOT, 100, longest=32).decision.shape == Shape(BLOCK, chain=32)
    assert chosen.choose(SLOT, 100, longest=0).decision.chain is None
    counts = chosen.metrics.snapshot()
    assert counts["shapes"]["copy 64"] == counts["shapes"]["copy 32"] == 1
    assert counts["changes"] == 0


@pytest.mark.parametrize("widest, chain", [([64, 3], 64), ([63, 3], None), ([16, 16], None)])
def test_no_step_is_longer_than_the_widest_that_a_request_of_its_batch_allows(widest, chain):
    chosen, both = policy(), np.array([1, 2])
    chosen.chains.pay = lambda slots: True  # type: ignore[method-assign]
    chosen.admit(both, widest)
    assert chosen.choose(both, 100, longest=64).decision.chain == chain


def test_a_max_width_bounds_what_counts_as_verified_up_to_the_longest_chain():
    known = policy()
    known.admit(np.array([1, 2, 3, 4]), [64, 20, 16, 5])
    assert known.requests.most(np.array([1, 2, 3, 4])).tolist() == [64, 20, 16, 5]
    assert known.requests.cap(np.array([1, 2])) == BLOCK
    assert known.requests.cap(np.array([4])) == 5


@pytest.mark.parametrize("chains", [{}, {32: 4}])
def test_there_is_an_account_of_long_chains_where_these_are_served(chains):
    assert bool(Chains(BLOCK, 8, chains)) is bool(chains)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (None, None),
        ("fixed", "steps have one width only"),
        ("loads", "ranks hold requests of their own"),
        ("attention", "no test verifies longer chains with SimpleNamespace"),
        ("positions", "positions of three axes"),
        ("padding", "without padding"),
        ("experts", "what layers chose is reported"),
        ("indexer", "what layers chose is reported"),
    ],
)
def test_launches_without_longer_chains_say_why(what: str | None, why: str | None) -> None:
    from dflash_sglang.width import startup

    target: Any = SimpleNamespace(
        attn_backend=SimpleNamespace(**({} if what == "attention" else {"serve_trees": None})),
        model_config=SimpleNamespace(model_is_mrope=what == "positions"),
        server_args=SimpleNamespace(
            disable_cuda_graph_padding=what == "padding",
            enable_return_routed_experts=what == "experts",
            enable_return_indexer_topk=what == "indexer",
        ),
    )
    group = Group(gather=(lambda row: row) if what == "loads" else None)
    asked = WidthConfig(fixed=BLOCK if what == "fixed" else None), target, group
    reason = startup.why_no_chains(*asked)
    assert (reason is None) == (why is None) and (why or "") in (reason or "")


def test_chains_that_would_leave_too_little_memory_are_not_served_and_the_log_says_so(monkeypatch, caplog) -> None:
    from dflash_sglang.width import startup

    caplog.set_level("INFO")
    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    states: Any = SimpleNamespace(chains={})
    states.add_chain = states.chains.__setitem__
    left = iter([3.0, 2.6, 2.6])
    startup.add_chains(CHAINS, states, lambda: next(left), 2.5, None)
    assert states.chains == {64: 2}
    assert "copies beyond blocks: 64 rows up to 2 requests; left out, to keep 2.5 GB free: [32]" in caplog.text
    states.chains.clear()
    startup.add_chains(CHAINS, states, lambda: 9.0, 2.5, "steps have one width only")
    assert not states.chains
    assert "copies beyond blocks: none: steps have one width only" in caplog.text


def test_long_chains_gain_on_copied_text_and_lose_nothing_on_other_text() -> None:
    found = copy_loop.gains(8)
    assert found["64"]["rewrite"] > 1.6 * found["block"]["rewrite"] > 2.0
    assert found["64"]["edits"] > 1.08 * found["block"]["edits"] > 1.1
    assert min(found["64"]["code"], found["64"]["prose"]) > 0.995
