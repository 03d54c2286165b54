"""WidthPolicy: prefills between steps are part of what a width costs."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width import choice
from dflash_sglang.width.interruptions import Interruptions
from tests.support.width_simulation import QUIET, Fixed, Machine, Run, adaptive, between_prefills, heedless


def test_how_many_steps_come_after_a_prefill_follows_from_what_they_commit() -> None:
    counted, random = Interruptions(), np.random.default_rng(0)
    assert counted.share(1e6) == 0.0
    for _ in range(2000):
        if random.random() < 0.6:
            counted.prefill(1)
            counted.prefill(1)  # another chunk: one interruption
        counted.step(200.0)
    arrivals = -np.log(1 - counted.share(200.0))  # per step
    assert counted.share(200.0) == pytest.approx(0.6, abs=0.1)
    for tokens in (20.0, 100.0, 400.0, 800.0):
        assert counted.share(tokens) == pytest.approx(1 - np.exp(-arrivals * tokens / 200), abs=0.02)
    assert counted.share(np.array([[100.0], [400.0]])).tolist() == [[counted.share(100.0)], [counted.share(400.0)]]


def test_where_every_step_comes_after_a_prefill_fewer_tokens_still_mean_fewer() -> None:
    counted = Interruptions()
    for _ in range(2000):
        counted.prefill(1)
        counted.step(100.0)
    assert counted.share(100.0) == pytest.approx(127 / 128)
    assert 0.5 < counted.share(20.0) < 0.65 and counted.share(1e9) == 1.0
    for _ in range(1000):
        counted.step(100.0)
    assert counted.share(100.0) < 1e-3  # nobody came since


def test_the_first_prefill_of_a_server_counts_like_any_other() -> None:
    counted = Interruptions()
    counted.prefill(1)
    counted.step(5.0)
    assert counted.share(5.0) == pytest.approx(1 / 128)


@functools.cache
def interrupted(policy: str | int, concurrency: int, answer: int) -> Run:
    """Of ours, ours without counting prefills, ours with ragged steps, or a fixed width."""
    if isinstance(policy, int):
        return between_prefills(Fixed(policy), concurrency, answer)
    chooser = adaptive(QUIET, concurrency, ragged=policy == "ragged")
    return between_prefills(heedless(chooser) if policy == "heedless" else chooser, concurrency, answer)


@pytest.mark.parametrize("concurrency", [1, 32, 128, 256])
@pytest.mark.parametrize("answer", [128, 512])
def test_with_prefills_between_steps_it_is_as_good_as_the_best_fixed_width(answer: int, concurrency: int) -> None:
    near = {1: (12, 16), 32: (6, 8, 12), 128: (4, 6, 8), 256: (1, 4, 6)}[concurrency]  # the others are far below
    best = max(interrupted(width, concurrency, answer).rate for width in near)
    assert interrupted("ours", concurrency, answer).rate >= 0.97 * best
    assert interrupted("ragged", concurrency, answer).rate >= 0.97 * best


def test_short_answers_of_many_requests_want_wider_blocks_than_step_times_say() -> None:
    best = max(interrupted(width, 256, 128).rate for width in (4, 6))
    assert interrupted(1, 256, 128).rate < 0.9 * best  # better, if prefills took no time
    assert interrupted("heedless", 256, 128).rate < 0.95 * best
    assert np.median(interrupted("ours", 256, 128).held) >= 4


def test_at_a_low_load_prefills_change_nothing() -> None:
    told, untold = (interrupted(policy, 1, 512) for policy in ("ours", "heedless"))
    assert np.median(told.held) == np.median(untold.held) == 16
    assert told.rate == pytest.approx(untold.rate, rel=0.01)


@pytest.mark.parametrize("once", [0.0, 0.01, 0.04])
def test_what_prefills_add_whatever_they_prefill_is_measured(once: float) -> None:
    counted, random, weights = Interruptions(), np.random.default_rng(0), 0.005
    assert counted.once(weights) == weights, "before any was measured, a pass over the weights"
    for _ in range(600):
        tokens = int(random.integers(1, 20)) * 32
        seconds = once + 25e-6 * tokens + 0.002 * random.standard_normal()
        pause = 10.0 if random.random() < 0.01 else 1.0
        counted.observe(tokens, seconds * pause, weights)
    assert counted.once(weights) == pytest.approx(once, abs=0.003)


def test_a_step_after_a_prefill_tells_what_the_prefill_added_and_nothing_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.0)
    policy, slots = adaptive(Machine(), 256, WidthConfig(widths=(1, 4))), np.arange(256)
    times, interruptions = policy.decider.step_times, policy.decider.interruptions
    policy.admit(slots)
    table = times.seconds(8, 0.0).tolist()
    for _ in range(500):
        policy.prefill(100)
        step = policy.choose(slots, 512 * 256)
        said = np.log(np.full((256, step.decision.width - 1), 0.7))
        policy.verified(step, np.minimum(np.tile([1, 2, 3, 3], 64), step.decision.width - 1),
                        step.decision.seconds + 0.02, said)  # fmt: skip
    assert times.seconds(8, 0.0).tolist() == table and step.decision.width == 4
    once = interruptions.once(times.seconds(0, 0.0)[0])
    assert once == pytest.approx(0.02, rel=0.1)
    plain, four = times.seconds(times.bucket(256), 512 * 256)
    assert sum(policy.metrics.seconds) == pytest.approx(
        policy.metrics.steps[0] * plain + policy.metrics.steps[1] * four
    )
    tokens = 256 / policy.requests.work(slots, 1, 1.0).steps_needed(np.array([4]), np.ones(1))[0]
    spent = plain + once * interruptions.share(256.0), four + once * interruptions.share(256 * tokens)
    assert policy.metrics.over_width_1 == pytest.approx(tokens * spent[0] / spent[1], rel=0.01)
    assert policy.metrics.over_block == pytest.approx(1.0)


def test_a_fixed_width_counts_no_prefills() -> None:
    policy = adaptive(QUIET, 8, WidthConfig(fixed=8))
    policy.admit(np.arange(8))
    for _ in range(100):
        policy.prefill()
        step = policy.choose(np.arange(8), 4096)
        assert step.decision.width == 8
        policy.verified(step, np.zeros(8, int), 0.01)
    assert policy.decider is None
