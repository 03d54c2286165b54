"""Ragged steps and trees: step times, verify budgets, and the policy with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash_sglang.width import choice
from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.decider import Decider
from dflash_sglang.width.kinds import Kind, kinds_of
from dflash_sglang.width.options import TABULATE_EVERY, AllOptions, least_budget
from dflash_sglang.width.step_times import Sample, StepTimes
from tests.support.width_simulation import (
    EASY,
    HARD,
    QUIET,
    Draft,
    Fixed,
    Machine,
    adaptive,
    serve,
    shared,
    steady_mix,
)

# ---- Step times --------------------------------------------------------------------------------------------


def test_a_ragged_step_is_its_draft_at_a_width_and_its_verified_tokens() -> None:
    kinds = kinds_of((1, 4, 8), True, [])
    times = StepTimes((1, 8), kinds)
    truth = lambda batch, width, tokens: 5 + (0.2 * batch * width if width > 1 else 0) + 0.5 * tokens  # noqa: E731
    times.fit(
        Sample(batch, kind, 0, truth(batch, kind.width, batch if kind.ragged else batch * kind.width))
        for batch, kind in itertools.product((1, 8), kinds)
    )
    tokens = np.array([8, 20, 50, 64])
    for width in (4, 8):
        index = kinds.index(Kind(width, ragged=True))
        got = [times.of_kind(1, index, 0, more) for more in times.added(1, tokens)]
        assert got == pytest.approx([truth(8, width, t) for t in tokens])


def test_what_ragged_steps_take_beyond_the_table_is_their_own() -> None:
    kinds = kinds_of((1, 8), True, [])
    times = StepTimes((8,), kinds)
    times.fit(Sample(8, kind, 0, seconds) for kind, seconds in zip(kinds, (0.01, 0.02, 0.012), strict=True))
    more = float(times.added(0, np.array([32]))[0])
    for step in range(400):  # a quarter more
        times.observe(0, 2, 0, 1.25 * (0.012 + more), more)
        if step % 20 == 0:
            times.observe(0, 1, 0, 0.02)
    assert times.of_kind(0, 2, 0, more) == pytest.approx(1.25 * (0.012 + more), rel=0.02)
    assert times.of_kind(0, 1, 0) == pytest.approx(0.02, rel=0.03)


# ---- Options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [0, 1, 10, 100])
def test_options_of_a_batch_are_each_kinds_budgets_with_its_own_shares_and_the_best_of_each_is_found(requests):
    budgets, trees = [1, 3, 20, 64, 200, 700], [16, 32]
    kinds, confidence, random = (
        kinds_of((1, 2, 4, 16), True, trees),
        Confidence(16, trees),
        np.random.default_rng(0),
    )
    all_options = AllOptions(kinds, budgets, confidence)
    all_options.of(requests)
    for _ in range(TABULATE_EVERY):  # what was tabulated before is not used
        said = random.beta(4.0, 1.0, (8, 15))
        confidence.observe(np.log(said), (random.random((8, 15)) < said).cumprod(axis=1).sum(axis=1), None)
    options, rows = all_options.of(requests), []
    for number, kind in enumerate(kinds):
        if not kind.ragged:
            rows.append((number, kind.width, 0, confidence.of_tree(kind.nodes) if kind.nodes else 1.0))
            continue
        (line,) = confidence.shares([kind.width])
        of_kind = [budget for budget in budgets if requests <= budget < requests * kind.width]
        rows += [(number, kind.width, budget, np.interp(budget / requests, *line)) for budget in of_kind]
    got = np.stack([options.kind, options.width, options.budget, options.share], axis=1)
    assert got == pytest.approx(np.array(rows))
    assert requests < 100 or Kind(2, ragged=True) not in {kinds[kind] for kind in options.kind}
    rates = random.random(len(rows))
    best = {
        number: max((rate, at) for at, rate in enumerate(rates) if rows[at][0] == number)[1] for number, *_ in rows
    }
    assert Decider(kinds, [128], {16: 8, 32: 4})._best(options, rates) == best


# ---- The policy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("concurrency", "hard", "width"), [(32, 0.5, 6), (64, 0.2, 6)])
@pytest.mark.parametrize(("spread", "gain"), [(None, 1.01), (1.0, 1.08)])
def test_a_mixed_batch_goes_better_than_at_any_single_width(
    concurrency: int, hard: float, width: int, spread: float | None, gain: float
) -> None:
    # The best fixed width, by docs/results/width-simulated.md.
    best = steady_mix(Fixed(width), concurrency, hard, seed=0, spread=spread).rate
    ours = steady_mix(adaptive(QUIET, concurrency, ragged=True), concurrency, hard, seed=0, spread=spread).rate
    assert ours > gain * best


def chances_of(random: np.random.Generator, requests: int, width: int) -> np.ndarray:
    """[requests, proposals] of easy requests and hard ones in turn."""
    mean = np.where(np.arange(requests)[:, None] % 2, 0.3, 0.95)
    return random.beta(4 * mean, 4 * (1 - mean), (requests, width - 1))


def test_what_is_verified_together_is_a_budget_between_a_token_and_a_block_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.05)
    policy = adaptive(Machine(), 8, ragged=True)
    slots, random = np.arange(6), np.random.default_rng(0)
    policy.admit(slots)
    seen = set()
    for step in range(300):
        chosen = policy.choose(slots, 6 * 512, ragged=step % 10 != 0)
        decision = chosen.decision
        chances, lens = chances_of(random, 6, decision.width), None
        if decision.verify_budget is not None:
            assert step % 10 and 6 <= decision.verify_budget < 6 * decision.width
            assert decision.verify_budget in policy.budgets
            seen.add(decision.verify_budget)
            lens = shared(np.log(chances), decision.verify_budget)
        accepted = (random.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
        if lens is not None:
            accepted = np.minimum(accepted, lens - 1)
        policy.verified(chosen, accepted, 0.007, np.log(chances), lens)
    assert len(seen) > 1


def test_a_batch_with_a_floor_verifies_full_blocks_from_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.05)
    policy = adaptive(Machine(), 64, ragged=True)
    slots, parts, random = np.arange(64), [], np.random.default_rng(0)
    policy.admit(slots, [16] * 32 + [12] * 32, [1] * 63 + [6])
    for batch in (slots, slots[:63]):
        chosen = []
        for _ in range(100):
            step = policy.choose(batch, len(batch) * 512)
            chosen.append(step.decision)
            chances, lens = chances_of(random, len(batch), chosen[-1].width), None
            accepted = (random.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
            if chosen[-1].verify_budget is not None:
                lens = shared(np.log(chances), chosen[-1].verify_budget)
                accepted = np.minimum(accepted, lens - 1)
            accepted = np.minimum(accepted, np.where(batch < 32, 15, 11))
            policy.verified(step, accepted, 0.007, np.log(chances), lens)
        parts.append(sum(decision.verify_budget is not None for decision in chosen))
        if len(batch) == 64:
            assert min(decision.width for decision in chosen) >= 6
    assert parts[0] == 0 < parts[1]


def test_ragged_steps_take_what_they_had_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.0)
    policy = adaptive(Machine(), 64, ragged=True)
    slots, random = np.arange(64), np.random.default_rng(0)
    policy.admit(slots)
    times = policy.decider.step_times
    before = times.seconds(times.bucket(64), 64 * 512)
    parts = 0
    for _ in range(40):
        step = policy.choose(slots, 64 * 512)
        decision = step.decision
        chances, lens = chances_of(random, 64, decision.width), None
        accepted = (random.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
        if decision.verify_budget is not None:
            parts, lens = parts + 1, shared(np.log(chances), decision.verify_budget)
            accepted = np.minimum(accepted, lens - 1)
        policy.verified(step, accepted, decision.seconds, np.log(chances), lens)
    assert parts > 5
    after = times.seconds(times.bucket(64), 64 * 512)
    assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("hard", [0.2, 0.5])
def test_ragged_steps_that_take_longer_than_start_up_says_are_given_up(hard: float) -> None:
    machine, rates = Machine(jitter=0.02, outliers=0.01, parts=1.2), []
    for ragged in (True, False):
        server = serve(adaptive(machine, 64, ragged=ragged), machine, Draft(EASY, HARD), hard=hard)
        server.run(64, steps=400)
        rates.append(server.run(64, steps=1000).rate)
    assert rates[0] > 0.97 * rates[1]


def test_as_few_tokens_as_can_be_are_rehearsed_where_they_are_no_whole_blocks() -> None:
    budgets = adaptive(Machine(), 64, ragged=True).budgets
    assert least_budget(budgets, 5, 2) == 5 and least_budget(budgets, 7, 2) == 8
    assert least_budget(budgets, 1, 1) is None and least_budget(budgets, 5, 1) is None
