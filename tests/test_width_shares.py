"""Tokens of a step shared out among its requests: ranking, totals, step times, and the policy with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.scheduling.width import Group, StepTimes, WidthConfig, WidthPolicy
from dflash_sglang.scheduling.width.acceptance import Acceptance
from dflash_sglang.scheduling.width.ragged_times import RaggedTimes
from dflash_sglang.scheduling.width.shares import PLAINLY, RESTS, Claims, Rule, Shares, whole_blocks
from tests.width_simulation import QUIET, WIDTHS, Fixed, Machine, adaptive, steady_mix, tiers

BLOCK = 8
EASIEST, HARDEST = 0.08, 4.0  # levels


class Requests:
    """Requests of these levels, in slots from 0 on, and their shares."""

    def __init__(self, levels: list[float], caps: list[int] | None = None, widths: Any = (1, 4, BLOCK)):
        self.acceptance = Acceptance(widths, len(levels), prior_acceptance=0.7, prior_strength=2, memory=64)
        self.slots, self.levels = np.arange(len(levels)), np.array(levels)
        self.caps = np.array(caps or [widths[-1]] * len(levels))
        self.acceptance.admit(self.slots, 0, None if caps is None else caps)
        self.acceptance._place[:] = self.levels / (1 + self.levels)
        self.claims = Claims(self.acceptance)

    def committed(self, lens: np.ndarray) -> np.ndarray:
        """[n] tokens of a step, by the model of `Acceptance`: hazards of 0.3 times the level."""
        accepted = np.maximum(1 - 0.3 * self.levels, 0.0)
        return np.array([sum(chance**k for k in range(n)) for chance, n in zip(accepted, lens, strict=True)])

    def lens(self, width: int, tokens: int) -> list[int]:
        return self.claims.lens(self.slots, self.claims.rule(self.slots, width, tokens)).tolist()


def nodes_between(low: float, high: float) -> list[float]:
    """Levels that are tabulated."""
    places = np.arange(1, 23) / 23
    return [float(level) for level in places / (1 - places) if low <= level <= high]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_other_shares_cost_less_than_those_of_the_r_that_a_step_costs_besides(data: Any) -> None:
    levels = data.draw(st.lists(st.sampled_from(nodes_between(0.05, 3.0)), min_size=1, max_size=3))
    of = Requests(levels)
    rest = data.draw(st.integers(1, len(RESTS) - 2))
    lens = of.claims.lens(of.slots, Rule(2, rest, 0.0))

    def cost(lens: Any) -> float:
        return float(((RESTS[rest] + np.array(lens)) / of.committed(lens)).sum())

    least = min(cost(each) for each in itertools.product(range(1, BLOCK + 1), repeat=len(levels)))
    assert cost(lens) == pytest.approx(least, rel=1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_shares_use_up_what_there_is_within_the_width_and_what_requests_allow(data: Any) -> None:
    n = data.draw(st.integers(1, 40))
    levels = data.draw(st.lists(st.floats(0.02, 10), min_size=n, max_size=n))
    caps = data.draw(st.none() | st.lists(st.integers(1, BLOCK), min_size=n, max_size=n))
    width = data.draw(st.sampled_from([1, 2]))
    of = Requests(levels, caps)
    most = np.minimum(of.caps, of.acceptance.widths[width])
    tokens = data.draw(st.integers(n, n * BLOCK))
    lens = of.lens(width, tokens)
    assert (np.array(lens) >= 1).all() and (np.array(lens) <= most).all()
    assert sum(lens) <= tokens
    if caps is None:
        assert sum(lens) == min(tokens, most.sum())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_row_of_a_step_is_nobodys(data: Any) -> None:
    lens = np.array(data.draw(st.lists(st.integers(1, BLOCK), min_size=1, max_size=20)))
    width = data.draw(st.integers(int(lens.max()), BLOCK))
    tokens = data.draw(st.integers(int(lens.sum()), len(lens) * BLOCK + 9))
    shares = Shares.filling(lens, width, tokens)
    assert (shares is None) == (tokens >= len(lens) * width)
    if shares is not None:
        assert shares.tokens == tokens
        assert (shares.lens >= lens).all() and (shares.lens <= width).all()


def test_an_easy_request_has_more_tokens_than_a_hard_one() -> None:
    easy, hard = Requests([EASIEST, HARDEST]).lens(2, 10)
    assert (easy, hard) == (8, 2)
    assert Requests([EASIEST, HARDEST]).lens(2, 2) == [1, 1]


def test_levels_between_those_that_are_tabulated_have_tokens_between_theirs() -> None:
    of = Requests(np.linspace(0.2, 2.0, 60).tolist())
    lens = of.claims.lens(of.slots, Rule(2, 12, 0.5))
    smooth = np.convolve(lens, np.ones(8) / 8, "valid")
    assert (np.diff(smooth) <= 0.13).all() and smooth[0] > smooth[-1] + 3


@pytest.mark.parametrize("caps", [None, [8, 3]])
def test_a_batch_needs_what_its_requests_need_and_tends_to_where_the_slow_ones_are_more(
    caps: list[int] | None,
) -> None:
    easy, hard = nodes_between(0.1, 0.2)[0], nodes_between(1.5, 3.0)[0]
    of = Requests([easy, hard], caps)
    needed, demand = of.claims.demand(of.slots, PLAINLY)
    assert needed[0] == pytest.approx(2.0) and demand[0] == pytest.approx(2.0)
    for rest in (1, 9, len(RESTS) - 1):
        lens = of.claims.lens(of.slots, Rule(2, rest, 0.0) if rest + 1 < len(RESTS) else whole_blocks(2))
        steps = 1 / of.committed(lens)
        assert needed[2, rest] == pytest.approx(steps.sum())
        assert demand[2, rest] == pytest.approx(2 * (lens * steps).sum() / steps.sum())
    held, _ = of.claims.demand(of.slots, whole_blocks(2))
    assert held[2, -1] == pytest.approx(2.0), "as they are held"
    assert held[0, 0] == pytest.approx(of.committed(lens).sum())


# ---- Estimates ---------------------------------------------------------------------------------------------


def test_a_request_that_was_verified_in_part_says_nothing_of_what_was_not() -> None:
    def learnt(lens: list[int] | None, accepted: list[int]) -> Acceptance:
        acceptance = Acceptance((1, 4), 4, prior_acceptance=0.8, prior_strength=2, memory=64)
        acceptance.admit(np.array([1, 2]), 0)
        for step in range(40):
            acceptance.observe(
                step, np.array([1, 2]), 1, np.array(accepted), None if lens is None else np.array(lens)
            )
        return acceptance

    parts = learnt([2, 4], [1, 3])
    assert parts.level(1) < 1 and parts.level(2) < parts.level(1), "both accepted all, the second one more"
    assert learnt([2, 1], [0, 0]).level(1) > 2
    assert learnt([2, 1], [0, 0]).level(2) == 1.0, "nothing was drafted for it"


def test_a_step_is_its_draft_at_a_width_and_its_verified_tokens() -> None:
    times = StepTimes((1, 8), (1, 4, 8))
    truth = lambda batch, width, tokens: 5 + (0.2 * batch * width if width > 1 else 0) + 0.5 * tokens  # noqa: E731
    for batch, width in itertools.product((1, 8), (1, 4, 8)):
        times.record(batch, width, 0, truth(batch, width, batch * width))
    times.fit()
    ragged = RaggedTimes(times)
    for batch, width in itertools.product((1, 8), (4, 8)):
        ragged.record(batch, width, 0, truth(batch, width, batch))
    ragged.fit()
    tokens = [8, 20, 50, 64]
    got = ragged.seconds(1, times.seconds(1, 0), tokens)
    assert got[1].tolist() == pytest.approx([truth(8, 4, t) for t in tokens])
    assert got[2].tolist() == pytest.approx([truth(8, 8, t) for t in tokens])
    other = RaggedTimes(times)
    other.load(ragged.table())
    assert (other.seconds(1, times.seconds(1, 0), tokens) == got).all()


# ---- The policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("concurrency", "hard", "width"), [(32, 0.5, 6), (64, 0.2, 6)])
def test_a_mixed_batch_goes_better_than_at_any_single_width(concurrency: int, hard: float, width: int) -> None:
    best = steady_mix(Fixed(width), concurrency, hard, seed=0).rate  # of all, see docs/width.md
    ours = steady_mix(adaptive(QUIET, concurrency, ragged=True), concurrency, hard, seed=0).rate
    assert ours > 1.02 * best


def test_shares_of_served_steps_fit_the_width_and_are_the_total() -> None:
    policy = adaptive(Machine(), 8, WidthConfig(widths=WIDTHS, probe_budget=0.05), ragged=True)
    slots, random = np.arange(6), np.random.default_rng(0)
    caps = [16, 1, 3, 16, 16, 2]
    policy.admit(slots, caps)
    seen = set()
    for step in range(300):
        decision = policy.choose(slots, 6 * 512, uniform=step % 10 == 0)
        assert step % 10 or decision.shares is None
        lens = np.full(6, decision.width) if decision.shares is None else decision.shares.lens
        if decision.shares is not None:
            assert (lens >= 1).all() and (lens <= decision.width).all()
            assert decision.shares.tokens in policy.ragged._totals
            seen.add(tuple(lens))
        accepted = (random.random((6, 15)) < 0.9).cumprod(axis=1).sum(axis=1)
        policy.verified(np.minimum(accepted, np.minimum(lens, caps) - 1), 0.007)
    assert len(seen) > 2


def test_a_batch_with_a_floor_verifies_whole_blocks_from_it_on() -> None:
    policy = adaptive(Machine(), 64, WidthConfig(widths=WIDTHS, probe_budget=0.05), ragged=True)
    slots, parts = np.arange(64), []
    policy.admit(slots, [16] * 32 + [12] * 32, [1] * 63 + [6])
    for batch in (slots, slots[:63]):
        chosen = []
        for _ in range(100):
            chosen.append(policy.choose(batch, len(batch) * 512))
            lens = np.full(len(batch), chosen[-1].width)
            if chosen[-1].shares is not None:
                lens = chosen[-1].shares.lens
            lens = np.minimum(lens, np.where(batch < 32, 16, 12))
            policy.verified(np.where(batch % 2 == 0, lens - 1, 0), 0.007)
        parts.append(sum(decision.shares is not None for decision in chosen))
        if len(batch) == 64:
            assert min(decision.width for decision in chosen) >= 6
    assert parts[0] == 0 < parts[1]


def test_steps_verified_in_part_are_learnt_from_as_such() -> None:
    policy = adaptive(Machine(), 64, WidthConfig(widths=WIDTHS, probe_budget=0.0), ragged=True)
    slots = np.arange(64)
    policy.admit(slots)
    before = policy.step_times.seconds(policy.step_times.bucket(64), 64 * 512)
    parts = 0
    for _ in range(40):
        decision = policy.choose(slots, 64 * 512)
        lens = np.full(64, decision.width) if decision.shares is None else decision.shares.lens
        parts += lens.min() < decision.width
        policy.verified(np.where(slots < 32, lens - 1, 0), policy._in_flight[-1].expected_seconds)
    assert parts > 5
    assert max(policy.acceptance.level(slot) for slot in slots[:32]) < 0.2, "nothing of them was rejected"
    after = policy.step_times.seconds(policy.step_times.bucket(64), 64 * 512)
    assert after == pytest.approx(before, rel=1e-6), "they took what they had to"


def test_totals_that_cannot_be_are_refused_with_what_was_expected() -> None:
    for totals in ([], [128, 4], [127]):
        with pytest.raises(ValueError, match=r"totals=.*expected ascending.*at least 128, max_requests=8"):
            WidthPolicy(WidthConfig(), 16, [8], 8, totals=totals)
    with pytest.raises(ValueError, match="expected none where ranks hold requests of their own"):
        WidthPolicy(WidthConfig(), 16, [8], 8, Group(gather_loads=lambda row: row[None]), totals=tiers(128))
