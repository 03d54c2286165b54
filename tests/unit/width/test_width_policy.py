"""The width policy as a whole, in simulation: throughput, load that moves, noise, wrong tables, probes, ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width.group import Group, OneStepLate
from tests.support.width_simulation import (
    BUCKETS,
    EASY,
    GOOD,
    HARD,
    POOR,
    PREFILLS,
    QUIET,
    WIDTHS,
    BusyMachine,
    Draft,
    Fixed,
    Machine,
    Oracle,
    Rank,
    Run,
    Server,
    adaptive,
    serve,
    steady_mix,
)

NOISY = Machine(jitter=0.1, outliers=0.02)
DRAFTS = {"good": Draft(GOOD), "poor": Draft(POOR), "mixed": Draft(EASY, HARD)}


@functools.cache
def steady(profile: str, concurrency: int, policy: str | int) -> Run:
    """900 steps at one concurrency of ours, 60 of a fixed width (whose expectation does not vary)."""
    ours = policy == "ours"
    chooser = adaptive(QUIET, concurrency) if ours else Fixed(int(policy))
    server = serve(chooser, QUIET, DRAFTS[profile])
    return server.run(concurrency, steps=900 if ours else 60)


def test_the_profiles_have_the_accept_lengths_that_were_measured() -> None:
    lengths = dict(zip(WIDTHS, 1 + DRAFTS["good"].expected[0], strict=True))
    assert lengths[16] == pytest.approx(6.4, abs=0.05) and lengths[8] == pytest.approx(5.1, abs=0.02)
    assert lengths[4] == pytest.approx(3.2, abs=0.1)
    assert 1 + DRAFTS["poor"].expected[0, -1] == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("concurrency", [1, 8, 32, 64, 128, 256, 1024, 4096])
def test_throughput_is_that_of_the_best_fixed_width_at_every_concurrency(concurrency: int) -> None:
    fixed = {width: steady("good", concurrency, width).rate for width in WIDTHS}
    ours = steady("good", concurrency, "ours")
    assert ours.rate >= 0.97 * max(fixed.values())
    if concurrency in (64, 128):
        assert ours.rate >= {64: 1.25, 128: 1.4}[concurrency] * fixed[16]  # the built-in default, by width alone


@pytest.mark.parametrize("concurrency", [64, 256])
def test_a_poor_draft_costs_nothing_against_no_speculation(concurrency: int) -> None:
    plain = steady("poor", concurrency, 1).rate
    assert steady("poor", concurrency, "ours").rate >= 0.97 * plain
    assert steady("poor", concurrency, 16).rate < 0.4 * plain  # what the built-in default makes of it


@pytest.mark.parametrize("seed", range(3))
def test_it_settles_within_thirty_steps_of_a_change_of_load(seed: int) -> None:
    server = serve(adaptive(QUIET, 128, seed=seed), QUIET, DRAFTS["good"], seed=seed)
    server.run(1, steps=150)
    up, down = server.run(128, steps=200), server.run(1, steps=200)
    assert up.settled() <= 30 and down.settled() <= 30
    assert max(up.held[30:]) <= 6 and min(down.held[30:]) >= 12


def over_a_changing_load(policy: Any) -> float:
    server = serve(policy, QUIET, DRAFTS["mixed"], hard=0.5)
    runs = [server.run(concurrency, seconds=1.5) for concurrency in (1, 8, 64, 256, 32, 128, 8, 1)]
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def test_easy_and_hard_requests_under_a_changing_load_go_better_than_at_any_single_width() -> None:
    ours = over_a_changing_load(adaptive(QUIET, 256))
    assert ours >= 1.05 * max(over_a_changing_load(Fixed(width)) for width in WIDTHS)
    assert ours >= 0.97 * over_a_changing_load(Oracle())


def over_changing_traffic(policy: Any, concurrency: int) -> float:
    server, runs = serve(policy, QUIET, DRAFTS["mixed"]), []
    for hard in (0, 1, 0, 1):
        server.ranks[0].hard = hard
        runs.append(server.run(concurrency, seconds=4.0))
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def test_traffic_that_turns_from_easy_to_hard_goes_better_than_at_any_single_width() -> None:
    ours = over_changing_traffic(adaptive(QUIET, 32), 32)
    assert ours >= 1.02 * max(over_changing_traffic(Fixed(width), 32) for width in WIDTHS)


@pytest.mark.parametrize("concurrency, hard", [(32, 0.5), (64, 0.2), (64, 0.5), (128, 0.2)])
def test_a_steady_mix_goes_as_well_as_at_the_best_single_width(concurrency: int, hard: float) -> None:
    # Hard requests pile up: most tokens per second of the batch that is there would be less over time.
    def rate(policy: Callable[[int], Any]) -> float:
        return float(np.mean([steady_mix(policy(seed), concurrency, hard, seed).rate for seed in range(6)]))

    fixed = [rate(lambda _, width=width: Fixed(width)) for width in (2, 4, 6, 8)]  # the others are far below
    assert rate(lambda seed: adaptive(QUIET, concurrency, seed=seed)) >= 0.99 * max(fixed)


@pytest.mark.parametrize("first", [1, 16])
def test_a_steady_mix_ends_at_one_width_whichever_was_held_before(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The batch is what the held width made of it, and every request is valued by what that width commits of it.
    policy = adaptive(QUIET, 64)
    server, times = serve(policy, QUIET, DRAFTS["mixed"], hard=0.5), policy.decider.step_times
    flattered = np.where(np.array(WIDTHS) == first, 1e-3, 1.0)
    with monkeypatch.context() as at_first:
        seconds = times.seconds
        at_first.setattr(times, "seconds", lambda *load: flattered * seconds(*load))
        assert set(server.run(64, steps=500).held) == {first}
    server.run(64, steps=600)
    assert np.median(server.run(64, steps=300).held) == 4


def test_probes_cost_at_most_a_hundredth_of_the_time() -> None:
    for profile, concurrency in [("good", 1), ("good", 32), ("good", 128), ("poor", 64), ("poor", 256)]:
        run = steady(profile, concurrency, "ours")
        assert any(run.probes)
        assert run.lost <= 0.01 * run.seconds, (profile, concurrency)


def test_probes_cost_no_more_while_the_traffic_changes_under_them() -> None:
    server, lost, seconds = serve(adaptive(NOISY, 256), NOISY, DRAFTS["mixed"]), 0.0, 0.0
    for concurrency, hard in ((256, 1), (256, 0), (32, 1), (128, 0), (8, 1), (64, 0)):
        server.ranks[0].hard = hard
        run = server.run(concurrency, seconds=4.0)
        lost, seconds = lost + run.lost, seconds + run.seconds
    assert lost <= 0.01 * seconds


def test_an_abandoned_width_is_found_again_when_the_draft_gets_better() -> None:
    server = serve(adaptive(QUIET, 64), QUIET, DRAFTS["poor"])
    assert max(server.run(64, seconds=5.0).held[-50:]) <= 2
    server.ranks[0].draft = DRAFTS["good"]
    run = server.run(64, seconds=20.0)
    assert run.settled(0.95) <= 500
    server.ranks[0].draft = DRAFTS["poor"]
    assert np.mean(server.run(64, steps=200).worth[30:]) >= 0.97  # what is drafted shows at once


@pytest.mark.parametrize("concurrency", [8, 128])
def test_noise_and_pauses_in_step_times_do_not_make_it_flap(concurrency: int) -> None:
    server = serve(adaptive(NOISY, concurrency), NOISY, DRAFTS["good"])
    server.run(concurrency, steps=200)
    run = server.run(concurrency, steps=800)
    assert run.changes <= 30
    assert np.mean(run.worth) >= 0.97


@pytest.mark.parametrize(("profile", "concurrency"), [("good", 8), ("poor", 32)])
def test_what_slows_all_steps_for_a_while_is_held_against_no_width(profile: str, concurrency: int) -> None:
    fixed = max(steady(profile, concurrency, width).rate for width in WIDTHS)
    machine = BusyMachine(jitter=0.03, outliers=0.01)
    for seed in range(4):
        server = serve(adaptive(machine, concurrency, seed=seed), machine, DRAFTS[profile], seed=seed)
        assert server.run(concurrency, steps=2000).rate >= 0.97 * fixed


def test_one_width_that_is_best_by_far_is_never_left() -> None:
    server = serve(adaptive(NOISY, 1), NOISY, Draft([0.97] * 15))
    server.run(1, steps=50)
    assert server.run(1, steps=500).changes == 0


@pytest.mark.parametrize("seed", range(2))
def test_a_start_up_table_that_is_wrong_by_a_third_is_corrected(seed: int) -> None:
    wrong = np.random.default_rng(seed).uniform(0.7, 1.3, (len(BUCKETS), len(WIDTHS)))
    server = serve(adaptive(QUIET, 64, wrong=wrong, seed=seed), QUIET, DRAFTS["good"], seed=seed)
    server.run(64, steps=1500)
    assert np.mean(server.run(64, steps=300).worth) >= 0.97


def test_a_table_whose_narrow_widths_look_too_slow_is_corrected() -> None:
    wrong = np.tile(np.linspace(1.5, 0.5, len(WIDTHS)), (len(BUCKETS), 1))
    server = serve(adaptive(QUIET, 128, wrong=wrong), QUIET, DRAFTS["good"])
    before = server.run(128, steps=5)
    server.run(128, steps=1500)
    assert np.mean(before.worth) < 0.95 < 0.97 <= np.mean(server.run(128, steps=300).worth)


@pytest.mark.parametrize("seed", [3, 12])
def test_where_all_widths_take_as_long_one_request_stays_at_the_widest(seed: int) -> None:
    """Luck of some hundred steps is no property of a width, and what comes after it is none of another one."""
    machine = Machine(jitter=0.02, outliers=0.01)
    machine.table[0, 1:] = 5.9e-3
    server = serve(adaptive(machine, 64, seed=seed), machine, Draft(GOOD), seed=seed, clock=seed)
    server.run(64, steps=150)
    server.run(1, steps=3000)
    assert server.run(1, steps=3000).held.count(16) > 2800


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


@pytest.mark.parametrize("cap, widest", [(5, 4), (1, 1)])
def test_no_width_exceeds_what_every_request_allows(cap: int, widest: int) -> None:
    server = serve(adaptive(QUIET, 32), QUIET, DRAFTS["good"], caps=lambda kinds: np.full(len(kinds), cap))
    run = server.run(32, steps=150)
    assert max(run.widths) == widest
    assert any(run.probes) == (cap > 1)


@pytest.mark.parametrize(
    "floor, cap, narrowest", [(5, 16, 6), (1000, 1000, 16), (6, 6, 6), (5, 5, 4), (1, 1, 1), (2, 3, 2)]
)
def test_no_width_is_below_what_a_request_asks_for_as_far_as_all_allow(
    floor: int, cap: int, narrowest: int
) -> None:
    asked = dict(caps=lambda kinds: np.full(len(kinds), cap), floors=lambda kinds: np.full(len(kinds), floor))
    run = serve(adaptive(QUIET, 64), QUIET, DRAFTS["poor"], **asked).run(64, steps=400)
    assert min(run.widths) == narrowest
    # With a poor draft the narrowest is the best: the wider ones, where there are any, are only probed.
    assert max(run.held) == narrowest and any(run.probes) == (cap == 16)


def test_one_request_holds_its_batch_to_its_width_until_it_leaves() -> None:
    policy = adaptive(QUIET, 8)
    slots, random = np.arange(8), np.random.default_rng(0)
    policy.admit(slots, min_widths=[1] * 7 + [8])

    def widths(slots: np.ndarray) -> set[int]:
        chosen = []
        for _ in range(100):
            step = policy.choose(slots, 512 * len(slots))
            chosen.append(step.decision.width)
            accepted = (random.random(len(slots)) < 0.05).astype(int)
            said = np.full((len(slots), chosen[-1] - 1), np.log(0.05))
            policy.verified(step, np.minimum(accepted, chosen[-1] - 1), step.decision.seconds, said)
        return set(chosen)

    assert min(widths(slots)) == 8
    assert policy.metrics.steps[:4] == [0] * 4
    assert min(widths(slots[:7])) <= 2 and policy.metrics.last_change == "limit"
    assert sum(policy.metrics.steps[:3]) > 90
    policy.admit(slots[7:])  # another request in that slot
    assert min(widths(slots)) < 8


def test_requests_that_are_not_drafted_for_do_not_vote_for_a_wide_block() -> None:
    widths = []
    for off in (0.0, 0.9):
        alike = Draft(GOOD, GOOD)
        caps = lambda kinds: np.where(kinds == 1, 1, 16)  # noqa: E731
        server = serve(adaptive(QUIET, 64), QUIET, alike, caps=caps, hard=off)
        server.run(64, steps=50)
        widths.append(np.median(server.run(64, steps=50).held))
    assert widths[0] >= 4 and widths[1] <= 2


def test_a_fixed_width_is_kept_and_costs_no_probe() -> None:
    policy = adaptive(QUIET, 8, WidthConfig(fixed=8))
    run = serve(policy, QUIET, DRAFTS["poor"]).run(8, steps=60)
    assert set(run.widths) == {8} and not any(run.probes)
    assert policy.metrics.steps == [60]


def test_results_without_a_step_and_steps_without_a_result_cost_one_line_and_no_estimate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy, slots = adaptive(QUIET, 8, WidthConfig()), np.arange(3)
    policy.leave_out("a result of 3 requests that no step waits for")
    assert "a result of 3 requests that no step waits for: expected one result for each step" in caplog.text
    step = policy.choose(slots, 100)
    said = np.full((3, step.decision.width - 1), np.log(0.99))
    policy.verified(step, [15, 15], 0.01, said)
    assert policy.snapshot()["left_out"] == policy.metrics.left_out == 2
    assert sum(policy.snapshot()["calibration"]["verified"]) == 0
    usual = policy.requests.work(slots, 1, 1.0).accepted
    policy.verified(step, [15] * 3, 0.01, said)
    assert sum(policy.snapshot()["calibration"]["verified"]) == said.size
    assert (policy.requests.work(slots, 1, 1.0).accepted[:, 1:] > usual[:, 1:]).all()
    assert policy.metrics.left_out == 2 and len(caplog.records) == 1


@pytest.mark.parametrize("fixed", [None, 8])
def test_a_server_goes_on_when_results_are_lost_and_learns_from_those_that_come(fixed: int | None) -> None:
    policy = adaptive(QUIET, 32, WidthConfig(fixed=fixed))
    server = serve(policy, QUIET, DRAFTS["poor"])
    (rank,) = server.ranks
    told, rank.policy.verified = rank.policy.verified, lambda *_: None
    server.run(32, steps=50)
    rank.policy.verified = told
    run = server.run(32, steps=300)
    assert set(run.widths) == {8} if fixed else np.mean(run.worth[100:]) >= 0.96


@pytest.mark.parametrize("loads", [True, False], ids=["requests of their own", "the same requests"])
def test_ranks_choose_alike_when_results_are_lost(loads: bool) -> None:
    server = group_of(4, 64, loads=loads, hard=0.5)
    losing = server.ranks[2:3] if loads else server.ranks  # ranks with the same requests lose the same
    server.run(64, steps=50)
    for rank in losing:
        verified = rank.policy.verified
        rank.policy.verified = lambda step, accepted, *told, verified=verified: verified(
            step, accepted[:-1], *told
        )  # too few
    server.run(64, steps=70)  # its `run` asserts in every step that all ranks chose one width
    assert [rank for rank in server.ranks if rank.policy.metrics.left_out > 50] == list(losing)


def test_two_runs_of_the_same_requests_choose_the_same_widths() -> None:
    first, second = (
        serve(adaptive(NOISY, 32), NOISY, DRAFTS["mixed"], hard=0.5).run(32, steps=200).widths for _ in range(2)
    )
    assert first == second and len(set(first)) > 2


def test_the_metrics_say_what_was_done_and_what_it_is_worth() -> None:
    policy = adaptive(QUIET, 128)
    server = serve(policy, QUIET, DRAFTS["good"], timed=1.0, delay=1)
    up, down = server.run(1, steps=100), server.run(128, steps=300)
    told = policy.metrics.snapshot()
    widths = up.widths + down.widths
    assert told["steps"] == {width: widths.count(width) for width in WIDTHS}
    assert sum(told["probes"].values()) == sum(up.probes) + sum(down.probes)
    assert sum(told["seconds"].values()) == pytest.approx(up.seconds + down.seconds, rel=0.15)
    assert told["changes"] >= 1 and told["last_change"] in ("load", "gain")
    plain, full = (steady("good", 128, width).rate for width in (1, 16))
    ours = steady("good", 128, "ours").rate
    assert told["estimated_over_width_1"] == pytest.approx(ours / plain, rel=0.15)
    assert told["estimated_over_block"] == pytest.approx(ours / full, rel=0.15)


# ---- Ranks -------------------------------------------------------------------------------------------------


class Board:
    """Where ranks that run in turn leave rows for one another; rank 0 is first in every round."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.rows: list[list[np.ndarray]] = []
        self.turn = [0] * ranks
        self.first: list[np.ndarray] = []
        self.shared = [0] * ranks

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
    """Ranks whose clocks read differently; with `loads` they have different requests, else the same ones."""
    board = Board(ranks)
    return Server(
        NOISY,
        *(
            Rank(
                adaptive(NOISY, requests, group=board.group(rank, loads), seed=rank),
                DRAFTS["mixed"],
                seed=rank if loads else 0,
                clock=rank,
                slots=requests,
                delay=1 + rank % 3 if loads else 2,
                **load,
            )
            for rank in range(ranks)
        ),
    )  # its `run` asserts in every step that all ranks chose one width


def test_sixty_four_ranks_with_requests_of_their_own_choose_one_width_and_a_good_one() -> None:
    server = group_of(64, 64, hard=0.5)
    uneven = [64 * (rank % 4) // 3 for rank in range(64)]  # a quarter of them idle
    assert np.mean(server.run(uneven, steps=50).worth[20:]) >= 0.95
    few = server.run([int(rank == 5) for rank in range(64)], steps=30)
    assert np.mean(few.worth[20:]) >= 0.9 and min(few.held[20:]) >= 4


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_ranks_choose_alike_within_what_the_requests_of_any_of_them_ask_for(data: Any) -> None:
    board, requests = Board(3), 4
    policies = [adaptive(NOISY, requests, group=board.group(rank, loads=True), seed=rank) for rank in range(3)]
    number = st.integers(1, 20)
    for _ in range(4):
        floors, caps, batches = [], [], []
        for policy in policies:
            n = data.draw(st.integers(0, requests))
            bounds = [sorted(data.draw(st.tuples(number, number))) for _ in range(n)]
            policy.admit(np.arange(n), [most for _, most in bounds], [least for least, _ in bounds])
            batches.append(np.arange(n))
            floors += [least for least, _ in bounds]
            caps += [most for _, most in bounds]
        for late in (True, False):  # the first step's load is that of the batches before
            ranks = list(zip(policies, batches, strict=True))
            steps = [policy.choose(batch, 500 * len(batch)) for policy, batch in ranks]
            (width,) = {step.decision.width for step in steps}
            if floors and not late:
                allowed = [width for width in WIDTHS if width <= max(caps)]
                assert width in ([w for w in allowed if w >= max(floors)] or allowed[-1:])
            for (policy, batch), step in zip(ranks, steps, strict=True):
                policy.verified(step, np.zeros(len(batch), int), 0.01)


def test_tensor_parallel_ranks_whose_clocks_differ_choose_alike() -> None:
    run = group_of(8, 64, loads=False, hard=0.5).run(64, steps=300)
    assert run.changes > 0 and np.mean(run.worth[100:]) >= 0.96


@pytest.mark.parametrize("loads", [True, False], ids=["requests of their own", "the same requests"])
def test_ranks_choose_alike_when_requests_of_one_are_prefilled_between_steps(loads: bool) -> None:
    server = group_of(4, 64, loads=loads, hard=0.5, tokens=64)
    server.machine = Machine(jitter=0.1, outliers=0.02, **PREFILLS)
    batches = [64, 16, 0, 3] if loads else [64] * 4  # one of them idle, it is told of the others' prefills
    server.run(batches, steps=300)
    first, *others = (rank.policy for rank in server.ranks)
    assert first.decider.interruptions.share(64.0) > 0.1
    assert all(other.decider is None for other in others)
    assert all(other.metrics.last_change == first.metrics.last_change for other in others)
