"""WidthPolicy as a black box, in simulation: the shapes it settles at, what moves it, limits, prefills, ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width import decider
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.options import Kind
from dflash_sglang.width.ranks import Group, OneStepLate
from dflash_sglang.width.step_times import Interruptions
from tests.support.width_simulation import (
    BUCKETS,
    EASY,
    GOOD,
    HARD,
    POOR,
    PREFILLS,
    QUIET,
    TREES,
    WIDTHS,
    Draft,
    Fixed,
    Machine,
    Oracle,
    Rank,
    Recorded,
    Run,
    Server,
    adaptive,
    between_prefills,
    serve,
    shared,
    steady_mix,
)

NOISY = Machine(jitter=0.1, outliers=0.02)
DRAFTS = {"good": Draft(GOOD), "poor": Draft(POOR), "mixed": Draft(EASY, HARD)}


@functools.cache
def steady(profile: str, concurrency: int, policy: str | int) -> Run:
    """400 steps at one concurrency of ours, 40 of a fixed width (whose expectation does not vary)."""
    ours = policy == "ours"
    chooser = adaptive(QUIET, concurrency) if ours else Fixed(int(policy))
    return serve(chooser, QUIET, DRAFTS[profile]).run(concurrency, steps=400 if ours else 40)


# ---- What it settles at --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "concurrency", "over_block"),
    [
        ("good", 1, 0.97), ("good", 32, 1.1), ("good", 128, 1.4), ("poor", 32, 1.9), ("poor", 256, 2.5),
    ],
)  # fmt: skip
def test_throughput_is_that_of_the_best_fixed_width_and_probes_cost_a_hundredth(profile, concurrency, over_block):
    fixed = {width: steady(profile, concurrency, width).rate for width in WIDTHS}
    ours = steady(profile, concurrency, "ours")
    assert ours.rate >= 0.97 * max(fixed.values()) and ours.rate >= over_block * fixed[16]
    assert any(ours.probes) and ours.lost <= 0.01 * ours.seconds


@settings(max_examples=5, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_it_converges_to_the_best_width_of_any_machine_and_draft(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (len(BUCKETS), len(WIDTHS))
    machine = Machine(jitter=0.02)
    # Step times that grow with batch and width, in steps of any size.
    machine.table = 0.004 + 0.02 * np.cumsum(random.gamma(0.3, 0.2, shape), axis=1)
    machine.table += 0.004 * np.cumsum(random.gamma(0.5, 0.5, (shape[0], 1)), axis=0)
    falling = np.clip(random.uniform(0.3, 0.97) - np.cumsum(random.exponential(0.01, 15)), 0.05, 0.99)
    batch = int(random.choice([8, 32, 128]))
    server = serve(adaptive(machine, batch, seed=seed), machine, Draft(falling.tolist()), seed=seed)
    server.run(batch, steps=150)
    run = server.run(batch, steps=150)
    assert np.mean(run.worth) >= 0.94
    assert np.mean([worth for worth, probe in zip(run.worth, run.probes, strict=True) if not probe]) >= 0.95


def test_a_steady_mix_goes_as_well_as_at_the_best_single_width_and_ragged_steps_better() -> None:
    # Hard requests pile up: most tokens per second of the batch that is there would be less over time.
    def rate(policy: Any, **draft: float) -> float:
        return steady_mix(policy, 32, 0.5, seed=0, steps=600, **draft).rate

    def ragged() -> Any:
        return adaptive(QUIET, 32, ragged=True)

    best = rate(Fixed(6))  # the others are below
    assert rate(adaptive(QUIET, 32)) >= 0.99 * best
    assert rate(ragged()) > 1.01 * best
    told_apart = rate(ragged(), spread=1.0)
    assert told_apart > 1.08 * best
    # A draft that thinks otherwise of its proposals: what comes true is learnt.
    assert rate(ragged(), spread=1.0, sure=0.5) > 0.98 * told_apart


def test_trees_are_verified_where_they_pay_and_are_served() -> None:
    draft = Recorded()
    for concurrency, best in ((1, 64), (2, 16), (8, 16)):
        policy, rates = adaptive(QUIET, concurrency, ragged=True, trees=TREES), []
        for chooser in (policy, Fixed(16, best)):
            server = serve(chooser, QUIET, draft)
            server.run(concurrency, steps=200)
            rates.append(server.run(concurrency, steps=800).rate)
        assert rates[0] > 0.94 * rates[1], (concurrency, rates)
        shapes = {name: steps for name, steps in policy.snapshot()["shapes"].items() if steps}
        trees = {nodes for nodes, most in TREES.items() if f"tree {nodes}" in shapes}
        assert trees <= {nodes for nodes, most in TREES.items() if concurrency <= most}
        # Among more requests the likeliest rows of chains commit as much.
        assert concurrency > 1 or sum(shapes[f"tree {nodes}"] for nodes in trees) > 660, shapes
    policy = adaptive(QUIET, 8, ragged=True, trees={64: 8})  # none of 64 nodes was measured beyond what is below
    server = serve(policy, QUIET, draft)
    server.run(8, steps=100)
    assert not policy.choose(np.arange(8), 4096, trees=False).decision.tree_nodes


# ---- What moves it -------------------------------------------------------------------------------------------


def test_it_settles_within_thirty_steps_of_a_change_of_load() -> None:
    server = serve(adaptive(QUIET, 128), QUIET, DRAFTS["good"])
    server.run(1, steps=150)
    up, down = server.run(128, steps=200), server.run(1, steps=200)
    assert up.settled() <= 30 and down.settled() <= 30
    assert max(up.held[30:]) <= 6 and min(down.held[30:]) >= 12


LOADS = tuple((concurrency, 0.5) for concurrency in (1, 8, 64, 256, 32, 128, 8, 1))
TRAFFIC = ((32, 0.0), (32, 1.0)) * 2


@pytest.mark.parametrize(("stretches", "seconds", "gain"), [(LOADS, 1.5, 1.05), (TRAFFIC, 4.0, 1.02)])
def test_load_and_traffic_that_change_go_better_than_at_any_single_width(stretches, seconds, gain):
    def rate(policy: Any) -> float:
        server, runs = serve(policy, QUIET, DRAFTS["mixed"]), []
        for concurrency, hard in stretches:
            server.ranks[0].hard = hard
            runs.append(server.run(concurrency, seconds=seconds))
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    ours = rate(adaptive(QUIET, 256))
    assert ours >= gain * max(rate(Fixed(width)) for width in (4, 6, 8))  # the others are far below
    assert ours >= 0.96 * rate(Oracle())


def test_an_abandoned_width_is_found_again_when_the_draft_gets_better() -> None:
    server = serve(adaptive(QUIET, 64), QUIET, DRAFTS["poor"])
    assert max(server.run(64, seconds=5.0).held[-50:]) <= 2
    server.ranks[0].draft = DRAFTS["good"]
    assert server.run(64, seconds=20.0).settled(0.95) <= 500
    server.ranks[0].draft = DRAFTS["poor"]
    assert np.mean(server.run(64, steps=200).worth[30:]) >= 0.97  # what is drafted shows at once


def test_noise_and_pauses_in_step_times_do_not_make_it_flap() -> None:
    for concurrency in (8, 128):
        server = serve(adaptive(NOISY, concurrency), NOISY, DRAFTS["good"])
        server.run(concurrency, steps=200)
        run = server.run(concurrency, steps=800)
        assert run.changes <= 12 and np.mean(run.worth) >= 0.97, concurrency
    server = serve(adaptive(NOISY, 1), NOISY, Draft([0.97] * 15))  # one width is best by far
    server.run(1, steps=50)
    assert server.run(1, steps=500).changes == 0


def test_what_slows_all_steps_for_a_while_is_held_against_no_width() -> None:
    machine = Machine(jitter=0.02, outlier=4.0)
    server = serve(adaptive(machine, 32), machine, DRAFTS["good"])
    server.run(32, steps=200)
    for machine.outliers in (1.0, 0.0, 1.0, 0.0):  # all steps take four times as long
        assert set(server.run(32, steps=60).held) == {8}


@pytest.mark.parametrize(("wrong", "concurrency"), [("by a third", 64), ("narrow widths look too slow", 128)])
def test_a_start_up_table_that_is_wrong_is_corrected(wrong: str, concurrency: int) -> None:
    by = np.random.default_rng(0).uniform(0.7, 1.3, (len(BUCKETS), len(WIDTHS)))
    if "narrow" in wrong:
        by = np.tile(np.linspace(1.5, 0.5, len(WIDTHS)), (len(BUCKETS), 1))
    server = serve(adaptive(QUIET, concurrency, wrong=by), QUIET, DRAFTS["good"])
    before = np.mean(server.run(concurrency, steps=5).worth)
    server.run(concurrency, steps=1000)
    assert np.mean(server.run(concurrency, steps=200).worth) >= 0.97
    assert "third" in wrong or before < 0.95


def test_where_all_widths_take_as_long_one_request_stays_at_the_widest() -> None:
    """Luck of some hundred steps is no property of a width, and what comes after it is none of another one."""
    machine = Machine(jitter=0.02, outliers=0.01)
    machine.table[0, 1:] = 5.9e-3
    server = serve(adaptive(machine, 64, seed=3), machine, Draft(GOOD), seed=3, clock=3)
    server.run(64, steps=150)
    server.run(1, steps=1500)
    assert server.run(1, steps=1000).held.count(16) > 930


@pytest.mark.parametrize(("draft", "host", "best"), [("good", (8e-3, 8e-3), 16), ("poor", (2e-3, 8e-3), 1)])
def test_where_the_host_takes_longer_than_the_device_its_time_counts_and_no_width_is_blamed(draft, host, best):
    """A fast target: for eight requests the device takes 2.8 to 5 ms, for 128 more than the host."""
    machine = Machine(jitter=0.02, outliers=0.01, host=host)
    machine.table *= 0.4
    server = serve(adaptive(machine, 128), machine, DRAFTS[draft])
    server.run(8, steps=20)
    settled = server.run(8, steps=200)
    assert settled.held.count(best) > 0.95 * len(settled.held)
    assert settled.rate >= 0.97 * serve(Fixed(best), machine, DRAFTS[draft]).run(8, steps=100).rate
    assert server.run(128, steps=200).settled(0.95) <= 30


def test_where_a_change_of_kind_takes_the_host_longer_than_the_device_few_are_probed() -> None:
    """A very fast target on an H200: a step takes 1.2 ms of the device and of the host, a change 1.3 ms more."""
    machine = Machine(jitter=0.05, outliers=0.01, host=(0.9e-3, 1.2e-3), switch=1.3e-3)
    machine.table *= 0.2
    server = serve(adaptive(machine, 128), machine, DRAFTS["good"])
    server.run(1, steps=100)
    settled = server.run(1, steps=1000)
    assert settled.rate >= 0.98 * serve(Fixed(16), machine, DRAFTS["good"]).run(1, steps=100).rate
    assert 0 < sum(settled.probes) < 0.01 * len(settled.probes), "each kind is still tried"


def test_long_contexts_widen_the_block() -> None:
    # Reading the context costs every width the same, so that verifying more tokens of it costs little.
    widths = {}
    for prompt in (256, 16_384):
        server = serve(adaptive(QUIET, 128), QUIET, DRAFTS["good"], prompt=prompt)
        server.run(128, steps=100)
        run = server.run(128, steps=100)
        widths[prompt] = np.median(run.held)
        assert np.mean(run.worth) >= 0.97
    assert widths[256] <= 6 and widths[16_384] >= 8


# ---- Start-up's table ----------------------------------------------------------------------------------------


def test_the_time_of_every_width_is_known_within_a_tenth_and_requests_can_ask_for_each() -> None:
    for most in (32, 4096):
        machine, policy = Machine(), adaptive(Machine(), most)
        for batch in policy.buckets:
            slots, truth = np.arange(batch), machine.seconds(batch, 700 * batch)
            for width, seconds in zip(WIDTHS, truth, strict=True):
                policy.admit(slots, [width] * batch, [width] * batch)
                decision = policy.choose(slots, 700 * batch).decision
                assert decision.width == width
                assert decision.seconds == pytest.approx(seconds, rel=0.1), (batch, width)
    with pytest.raises(ValueError, match="batch=5000: expected at most 4096, the largest of the step times"):
        policy.choose(np.zeros(5000, int), 0)
    with pytest.raises(ValueError, match="no step time was measured"):
        policy.decider.step_times.fit([])


# ---- Requests' limits ----------------------------------------------------------------------------------------


def drive(policy: Any, slots: np.ndarray, steps: int, chances: Any, **may: Any) -> list[Decision]:
    """Steps of requests whose proposals have these chances [requests, 15]."""
    random, decisions = np.random.default_rng(0), []
    for _ in range(steps):
        step = policy.choose(slots, 512 * len(slots), **may)
        decision = step.decision
        said, lens = np.tile(chances, (len(slots), 1))[: len(slots), : decision.width - 1], None
        accepted = (random.random(said.shape) < said).cumprod(axis=1).sum(axis=1)
        if decision.verify_budget is not None:
            lens = shared(np.log(said), decision.verify_budget)
            accepted = np.minimum(accepted, lens - 1)
        policy.verified(step, accepted, np.log(said), lens)
        policy.timed(step, decision.seconds)
        decisions.append(decision)
    return decisions


TWO_KINDS = np.array([[0.95], [0.3]]) * np.linspace(1, 0.8, 15)  # easy requests and hard ones in turn


def test_one_request_holds_its_batch_to_its_width_and_to_whole_blocks_until_it_leaves(monkeypatch) -> None:
    monkeypatch.setattr(decider, "PROBE_BUDGET", 0.05)
    policy, slots = adaptive(Machine(), 64, ragged=True), np.arange(64)
    policy.admit(slots, None, [1] * 63 + [8])
    chosen = drive(policy, slots, 100, TWO_KINDS)
    assert min(of.width for of in chosen) == 8 and not any(of.verify_budget for of in chosen)
    chosen = drive(policy, slots[:63], 100, TWO_KINDS)
    assert min(of.width for of in chosen) < 8 and policy.metrics.last_change == "limit"
    assert any(of.verify_budget for of in chosen)
    policy.admit(slots[63:])  # another request in that slot
    assert min(of.width for of in drive(policy, slots, 100, TWO_KINDS)) < 8


def test_requests_that_are_not_drafted_for_do_not_vote_for_a_wide_block() -> None:
    widths = []
    for off in (0.0, 0.9):
        caps = lambda kinds: np.where(kinds == 1, 1, 16)  # noqa: E731
        server = serve(adaptive(QUIET, 64), QUIET, Draft(GOOD, GOOD), caps=caps, hard=off)
        server.run(64, steps=50)
        widths.append(np.median(server.run(64, steps=50).held))
    assert widths[0] >= 4 and widths[1] <= 2


# ---- Ragged steps --------------------------------------------------------------------------------------------


def test_what_is_verified_together_is_a_budget_between_a_token_and_a_block_of_each(monkeypatch) -> None:
    monkeypatch.setattr(decider, "PROBE_BUDGET", 0.05)
    for requests in (6, 64):
        machine, slots = Machine(), np.arange(requests)
        policy = adaptive(machine, requests, ragged=True)
        policy.admit(slots)
        chosen = [of for of in drive(policy, slots, 200, TWO_KINDS) if of.verify_budget is not None]
        assert len({of.verify_budget for of in chosen}) > 1
        for of in chosen:
            assert of.verify_budget in policy.budgets and requests <= of.verify_budget < requests * of.width
            truth = machine.kind_seconds(requests, 512 * requests, Kind(of.width, True), of.verify_budget)
            assert of.seconds == pytest.approx(truth, rel=0.1)
        assert not any(of.verify_budget for of in drive(policy, slots, 20, TWO_KINDS, ragged=False))


def test_ragged_steps_that_take_longer_than_start_up_says_are_given_up() -> None:
    machine, rates = Machine(jitter=0.02, outliers=0.01, parts=1.2), []
    for ragged in (True, False):
        server = serve(adaptive(machine, 64, ragged=ragged), machine, DRAFTS["mixed"], hard=0.5)
        server.run(64, steps=300)
        rates.append(server.run(64, steps=500).rate)
    assert rates[0] > 0.97 * rates[1]


# ---- Prefills ------------------------------------------------------------------------------------------------


@functools.cache
def interrupted(policy: str | int, concurrency: int, answer: int) -> Run:
    """Of ours, ours with ragged steps, or a fixed width."""
    chooser = Fixed(policy) if isinstance(policy, int) else adaptive(QUIET, concurrency, ragged=policy == "ragged")
    return between_prefills(chooser, concurrency, answer)


@pytest.mark.parametrize(
    ("concurrency", "answer", "near"),
    [(1, 512, (12, 16)), (256, 128, (4, 6))],
)
def test_with_prefills_between_steps_it_is_as_good_as_the_best_fixed_width(concurrency, answer, near):
    best = max(interrupted(width, concurrency, answer).rate for width in near)  # the others are far below
    for policy in ("ours", "ragged"):
        assert interrupted(policy, concurrency, answer).rate >= 0.97 * best, policy
    # Short answers want wider blocks than step times say.
    assert np.median(interrupted("ours", concurrency, answer).held) >= (16 if concurrency == 1 else 4)


def test_how_often_prefills_come_is_counted_and_foretold_for_steps_that_commit_more_or_less() -> None:
    random = np.random.default_rng(0)
    for share in (0.6, 1.0):
        counted = Interruptions()
        for _ in range(2000):
            counted.step(200.0, random.random() < share)
        arrivals = -math.log(1 - counted.share(np.array(200.0)))  # per step
        assert counted.share(np.array(200.0)) == pytest.approx(min(share, 127 / 128), abs=0.1)
        tokens = np.array([20.0, 100.0, 400.0, 800.0])
        assert counted.share(tokens) == pytest.approx(1 - np.exp(-arrivals * tokens / 200), abs=0.02)


# ---- Results, metrics ----------------------------------------------------------------------------------------


def test_results_without_a_step_and_steps_without_a_result_cost_one_line_and_no_estimate(caplog) -> None:
    policy, slots = adaptive(QUIET, 8, WidthConfig()), np.arange(3)
    policy.leave_out("a result of 3 requests that no step waits for")
    assert "a result of 3 requests that no step waits for: expected one result for each step" in caplog.text
    step = policy.choose(slots, 100)
    said = np.full((3, step.decision.width - 1), np.log(0.99))
    policy.verified(step, [15, 15], said)
    policy.choose(slots, 100, ragged=False)
    assert policy.snapshot()["left_out"] == 2 and not any(policy.snapshot()["calibration"]["verified"])
    policy.verified(step, [15] * 3, said)
    policy.choose(slots, 100)
    assert sum(policy.snapshot()["calibration"]["verified"]) == said.size
    assert policy.metrics.left_out == 2 and len(caplog.records) == 1


def test_the_metrics_say_what_was_done_and_what_it_is_worth() -> None:
    policy = adaptive(QUIET, 128)
    server = serve(policy, QUIET, DRAFTS["good"], timed=1.0, delay=1)
    up, down = server.run(1, steps=100), server.run(128, steps=300)
    told = policy.snapshot()
    widths = up.widths + down.widths
    assert told["steps"] == {width: widths.count(width) for width in WIDTHS}
    assert sum(told["probes"].values()) == sum(up.probes) + sum(down.probes)
    assert told["changes"] >= 1 and told["last_change"] in ("load", "gain")
    rates = {of: steady("good", 128, of).rate for of in ("ours", 1, 16)}
    assert told["estimated_over_width_1"] == pytest.approx(rates["ours"] / rates[1], rel=0.15)
    assert told["estimated_over_block"] == pytest.approx(rates["ours"] / rates[16], rel=0.15)
    said = told["calibration"]
    assert sum(said["accepted"]) == pytest.approx(sum(said["expected"]), rel=0.05)
    assert sum(said["verified"]) <= sum(w - 1 for w in up.widths) + 128 * sum(w - 1 for w in down.widths)


# ---- Ranks ---------------------------------------------------------------------------------------------------


class Board:
    """Where ranks that run in turn leave rows for one another; rank 0 is first in every round."""

    def __init__(self, ranks: int):
        self.rows: list[list[np.ndarray]] = []
        self.turn, self.shared = [0] * ranks, [0] * ranks
        self.first: list[np.ndarray] = []

    def group(self, rank: int, loads: bool) -> Group:
        gather = OneStepLate(functools.partial(self.post, rank)) if loads else None
        return Group(rank == 0, functools.partial(self.broadcast, rank), gather)

    def broadcast(self, rank: int, row: np.ndarray) -> np.ndarray:
        if rank == 0:
            self.first.append(row.copy())
        self.shared[rank] += 1
        return self.first[self.shared[rank] - 1]

    def post(self, rank: int, row: np.ndarray) -> Any:
        turn = self.turn[rank]
        self.turn[rank] += 1
        if rank == 0:
            self.rows.append([])
        self.rows[turn].append(row)
        return lambda: np.stack(self.rows[turn])


def group_of(ranks: int, requests: int, *, loads: bool = True, **load: Any) -> Server:
    """Ranks whose clocks read differently; with `loads` they have different requests, else the same ones. Its
    `run` asserts in every step that all ranks chose one width."""
    board = Board(ranks)
    delays = [1 + rank % 3 if loads else 2 for rank in range(ranks)]
    return Server(NOISY, *(
        Rank(
            adaptive(NOISY, requests, group=board.group(rank, loads), seed=rank),
            DRAFTS["mixed"],
            seed=rank if loads else 0,
            clock=rank,
            slots=requests,
            delay=delays[rank],
            **load,
        )
        for rank in range(ranks)
    ))  # fmt: skip


def test_ranks_choose_alike_within_what_the_requests_of_any_of_them_ask_for() -> None:
    board, random = Board(3), np.random.default_rng(0)
    policies = [adaptive(NOISY, 4, group=board.group(rank, loads=True), seed=rank) for rank in range(3)]
    for _ in range(40):
        floors, caps, batches = [], [], []
        for policy in policies:
            n = int(random.integers(5))
            bounds = np.sort(random.integers(1, 21, (n, 2)), axis=1)
            policy.prefill()
            policy.admit(np.arange(n), bounds[:, 1], bounds[:, 0])
            batches.append(np.arange(n))
            floors += bounds[:, 0].tolist()
            caps += bounds[:, 1].tolist()
        for late in (True, False):  # the first step's load is that of the batches before
            ranks = list(zip(policies, batches, strict=True))
            steps = [policy.choose(batch, 500 * len(batch)) for policy, batch in ranks]
            (width,) = {step.decision.width for step in steps}
            if floors and not late:
                allowed = [width for width in WIDTHS if width <= max(caps)]
                assert width in ([w for w in allowed if w >= max(floors)] or allowed[-1:])
            for (policy, batch), step in zip(ranks, steps, strict=True):
                policy.verified(step, np.zeros(len(batch), int))
    server = group_of(3, 64, hard=1.0, floors=lambda kinds: np.full(len(kinds), 4))  # each of them, not their sum
    assert set(server.run(64, steps=60).held[30:]) == {4}


@pytest.mark.parametrize("loads", [True, False], ids=["requests of their own", "the same requests"])
def test_ranks_choose_alike_whatever_their_clocks_their_prefills_and_lost_results(loads: bool) -> None:
    server = group_of(4, 64, loads=loads, hard=0.5)
    run = server.run(64, steps=300)
    assert run.changes > 0 and np.mean(run.worth[100:]) >= 0.96
    server.machine = Machine(jitter=0.1, outliers=0.02, **PREFILLS)
    for rank in server.ranks:
        rank.tokens = 64
    server.run([64, 16, 0, 3] if loads else 64, steps=150)  # an idle one is told of the others' prefills
    first, *others = (rank.policy for rank in server.ranks)
    assert first.decider.interruptions.share(np.array(64.0)) > 0.1
    assert all(other.decider is None for other in others)
    assert all(other.metrics.last_change == first.metrics.last_change for other in others)
    losing = server.ranks[2:3] if loads else server.ranks  # ranks with the same requests lose the same
    for rank in losing:
        told = rank.policy.verified
        rank.policy.verified = lambda step, accepted, *more, told=told: told(step, accepted[:-1], *more)
    server.run(64, steps=70)
    assert [rank for rank in server.ranks if rank.policy.metrics.left_out > 50] == list(losing)
