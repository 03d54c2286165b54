"""The parts of the width policy: step times, acceptance, choice, settings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.settings.width import WidthConfig, WidthConfigError
from dflash_sglang.width import choice
from dflash_sglang.width.acceptance import Acceptance, steps_needed
from dflash_sglang.width.choice import Chooser
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.group import Group, OneStepLate
from dflash_sglang.width.step_times import Sample, StepTimes, startup_cells
from tests.support.width_simulation import BUCKETS, EASY, GOOD, HARD, WIDTHS, Draft, Machine, adaptive, serve

# ---- Step times --------------------------------------------------------------------------------------------


def fitted(cells: dict[tuple[int, int], float], buckets: Any = (1, 8, 64), widths: Any = (1, 4, 16)) -> StepTimes:
    times = StepTimes(buckets, widths)
    times.fit(Sample(batch, width, 0, seconds) for (batch, width), seconds in cells.items())
    return times


def test_start_up_measures_few_cells() -> None:
    assert len(startup_cells([b for b in BUCKETS if b <= 256], WIDTHS)) == 42
    cells = startup_cells(BUCKETS, WIDTHS)
    assert len(cells) == 49 and max(batch * width for batch, width, _ in cells) <= 8192
    assert {(batch, context) for batch, _, context in cells if context} == {(16, 16 * 4096)}


@pytest.mark.parametrize("most", [32, 256, 4096])
def test_what_was_not_measured_is_filled_within_a_tenth(most: int) -> None:
    machine = Machine()
    times = adaptive(machine, most).decider.step_times
    for index, batch in enumerate(times.buckets):
        truth = machine.seconds(batch, 700 * batch)
        assert np.abs(np.array(times.seconds(index, 700 * batch)) / truth - 1).max() < 0.1


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_a_monotone_table_stays_monotone_and_measured_cells_stay_as_measured(data: Any) -> None:
    steps = st.lists(st.floats(0, 5), min_size=6, max_size=6)
    table = 1 + np.cumsum(np.cumsum([data.draw(steps) for _ in range(5)], axis=0), axis=1)
    buckets, widths = (1, 3, 8, 21, 55), (1, 2, 4, 6, 8, 16)
    seen = data.draw(st.sets(st.sampled_from(range(1, 5)), min_size=1, max_size=4)) | {0}
    times = fitted(
        {(buckets[b], width): table[b, w] for b in seen for w, width in enumerate(widths)}, buckets, widths
    )
    rows = np.array([times.seconds(b, 0) for b in range(5)])
    assert (np.diff(rows, axis=0) >= -1e-9).all() and (rows > 0).all()
    assert (np.diff(rows[: max(seen) + 1], axis=1) >= -1e-9).all()
    for b in seen:
        assert rows[b] == pytest.approx(table[b])


def test_a_width_that_was_not_measured_lies_between_its_neighbours() -> None:
    rows = fitted({(b, w): b * w for b in (1, 8) for w in (1, 4, 16)}, (1, 8), (1, 4, 8, 16))
    assert rows.seconds(1, 0) == pytest.approx([8, 32, 64, 128])


def test_the_cost_of_context_is_measured_and_one_pause_does_not_spoil_it() -> None:
    times = StepTimes((1, 8), (1, 8))
    cells = itertools.product((1, 8), (1, 8), [0], (0.01, 0.01, 0.5))
    long = [(8, 8, 10_000, seconds) for seconds in (0.01 + 1e-3, 0.01 + 1e-3, 0.3)]
    times.fit(Sample(*cell) for cell in [*cells, *long])
    assert times.seconds(1, 20_000) == pytest.approx([0.012, 0.012])


def test_observations_correct_a_cell_whatever_pauses_lie_between_them() -> None:
    random = np.random.default_rng(0)
    times = fitted({(b, w): 0.01 for b in (1, 8) for w in (1, 4, 16)}, (1, 8))
    for step in range(400):
        pause = 5.0 if step % 20 == 0 else 1.0
        times.observe(1, 1, 0, 0.013 * pause * (1 + 0.1 * random.standard_normal()))
    assert times.seconds(1, 0)[1] == pytest.approx(0.013, rel=0.04)


def test_a_machine_slower_than_at_start_up_changes_no_ratio_that_was_not_seen() -> None:
    times = fitted({(b, w): 0.01 * w for b in (1, 8) for w in (1, 4, 16)}, (1, 8))
    for _ in range(300):
        for width in (0, 1):
            times.observe(1, width, 0, 0.013 * (1, 4)[width])
    here, elsewhere = times.seconds(1, 0), times.seconds(0, 0)
    assert here[:2] == pytest.approx([0.013, 0.052], rel=0.02)
    assert here[2] / here[1] == pytest.approx(4, rel=0.15)  # follows, though it was never served
    assert elsewhere[1] / elsewhere[0] == pytest.approx(4, rel=0.05)


def test_a_burst_of_slow_steps_at_one_width_changes_no_ratio() -> None:
    times = fitted({(8, width): 0.01 * width for width in (1, 4, 16)}, (8,))
    for _ in range(50):
        times.observe(0, 1, 0, 0.04)
    for _ in range(40):
        times.observe(0, 1, 0, 0.12)
    slow = times.seconds(0, 0)
    assert slow == pytest.approx([0.03, 0.12, 0.48], rel=0.1)
    for _ in range(5):
        times.observe(0, 1, 0, 0.04)
    assert times.seconds(0, 0) == pytest.approx([0.01, 0.04, 0.16], rel=0.05)


def test_what_is_known_of_a_width_grows_old_so_that_a_few_probes_correct_it() -> None:
    times = fitted({(8, width): 0.01 * width for width in (1, 4)}, (8,), (1, 4))
    for step in range(600):  # width 4 takes a quarter longer for a while, and is then seen every 50 steps
        times.observe(0, 0, 0, 0.01)
        if step < 200 or not step % 50:
            times.observe(0, 1, 0, 0.05 if step < 200 else 0.04)
        if step == 199:
            assert times.seconds(0, 0) == pytest.approx([0.01, 0.05], rel=0.02)
    assert times.seconds(0, 0) == pytest.approx([0.01, 0.04], rel=0.04)


def test_step_times_refuse_what_has_no_place_in_the_table() -> None:
    times = StepTimes((1, 8), (1, 4))
    with pytest.raises(ValueError, match="batch=9: expected at most 8, the largest of the step times"):
        times.fit([Sample(9, 4, 0, 0.01)])
    with pytest.raises(ValueError, match="no step time was measured"):
        times.fit([])


# ---- Acceptance --------------------------------------------------------------------------------------------


def acceptance(slots: int = 64, widths: Any = WIDTHS) -> Acceptance:
    return Acceptance(widths, slots)


def committed(estimate: Acceptance, slots: Any) -> np.ndarray:
    """[widths] tokens of one of these requests in a step; the harmonic mean, if they are not alike."""
    return len(slots) / needed(estimate, slots, WIDTHS.index(1))


def needed(estimate: Acceptance, slots: Any, held: int) -> np.ndarray:
    """[widths] steps of one request that commit what a step of these does at the held width."""
    return steps_needed(estimate.work(np.array(slots), held))


def teach(estimate: Acceptance, draft: Draft, kinds: np.ndarray, width: int, steps: range, seed: int = 0) -> None:
    random, slots = np.random.default_rng(seed), np.arange(len(kinds))
    for step in steps:
        estimate.observe(step, slots, width, draft.accepted(kinds, width, random))


def test_an_accepted_narrow_block_says_nothing_about_later_positions() -> None:
    estimate, four = acceptance(), WIDTHS.index(4)
    for step in range(50):
        estimate.observe(step, np.arange(64), four, np.full(64, 3))
    assert estimate._trials[:3] == pytest.approx([estimate._trials[0]] * 3) and estimate._trials[0] > 200
    assert estimate._trials[3:].tolist() == [0.0] * 12  # position 4 and later were never tried
    assert (estimate.hazard[:3] < 0.02).all()


def test_a_rejection_counts_at_its_position_and_nothing_after_it() -> None:
    estimate = acceptance(1)
    estimate.observe(1, np.array([0]), WIDTHS.index(16), np.array([2]))
    assert [trials > 0 for trials in estimate._trials] == [True] * 3 + [False] * 12
    assert estimate._rejections.tolist() == [0, 0, 1] + [0] * 12


@pytest.mark.parametrize("served", [(16,), (4, 16), (2, 4, 6, 8, 12, 16)])
def test_acceptance_per_position_is_recovered_from_any_mixture_of_widths(served: tuple[int, ...]) -> None:
    estimate, draft = acceptance(), Draft(GOOD)
    for turn in range(120):
        teach(
            estimate,
            draft,
            np.zeros(64, int),
            WIDTHS.index(served[turn % len(served)]),
            range(turn, turn + 1),
            turn,
        )
    assert 1 - estimate.hazard == pytest.approx(np.array(GOOD), abs=0.08)
    assert committed(estimate, range(64)) == pytest.approx(1 + draft.expected[0], rel=0.04)


def test_easy_and_hard_requests_are_told_apart_at_a_narrow_width() -> None:
    estimate, draft, kinds = acceptance(), Draft(EASY, HARD), np.arange(64) % 2
    teach(estimate, draft, kinds, WIDTHS.index(16), range(60))
    estimate.admit(np.arange(64), 60)
    teach(estimate, draft, kinds, WIDTHS.index(4), range(60, 100))
    for kind in (0, 1):
        slots = np.flatnonzero(kinds == kind)
        # At 16, where these requests were never served, too.
        assert committed(estimate, slots) == pytest.approx(1 + draft.expected[kind], rel=0.3)
    assert estimate.level(0) < 0.6 < 1.4 < estimate.level(1)


def test_a_width_that_accepts_by_a_profile_of_its_own_is_learnt_as_such() -> None:
    own = {width: [0.92] * 15 if width == 8 else [0.8] * 15 for width in WIDTHS}
    estimate, draft = acceptance(), Draft(own)
    for turn in range(600):
        teach(estimate, draft, np.zeros(64, int), WIDTHS.index((16, 8)[turn % 2]), range(turn, turn + 1), turn)
    tokens = committed(estimate, range(64))
    for width in (8, 16):
        assert tokens[WIDTHS.index(width)] == pytest.approx(1 + draft.expected[0, WIDTHS.index(width)], rel=0.12)


def test_a_new_request_starts_as_the_average_one_and_forgets_its_slots_last() -> None:
    estimate, hard = acceptance(4), WIDTHS.index(16)
    for step in range(40):
        estimate.observe(step, np.arange(4), hard, np.array([0, 8, 8, 8]))
    assert estimate.level(0) > 2
    estimate.admit(np.array([0]), step=40)
    assert estimate.level(0) == 1
    # The results of two steps that the last owner was in arrive now.
    for step in (38, 39):
        estimate.observe(step, np.arange(4), hard, np.array([0, 8, 8, 8]))
    assert estimate.level(0) == 1
    estimate.observe(40, np.arange(4), hard, np.array([0, 8, 8, 8]))
    assert estimate.level(0) > 1


def test_a_request_is_counted_up_to_its_own_limit() -> None:
    estimate = acceptance(2)
    estimate.admit(np.array([0, 1]), 0, [1, 5])
    free = committed(acceptance(1), [0])
    one, five = committed(estimate, [0]), committed(estimate, [1])
    assert one.tolist() == [1.0] * 7
    assert five[:3] == pytest.approx(free[:3], rel=0.01)
    assert five[3:] == pytest.approx([five[3]] * 4) and free[2] < five[3] < free[3]
    assert estimate.cap(np.array([0])) == 1 and estimate.cap(np.array([0, 1])) == 5
    estimate.observe(1, np.array([1]), WIDTHS.index(16), np.array([4]))  # all that its limit lets it accept
    assert estimate._rejections.tolist() == [0.0] * 15
    estimate.admit(np.array([0, 1]), 1)
    assert estimate.cap(np.array([0, 1])) == 16


def test_the_floor_of_a_batch_is_the_highest_of_its_requests() -> None:
    estimate, none = acceptance(3), np.zeros(0, int)
    estimate.admit(np.array([0, 1, 2]), 0, min_widths=[1, 5, 40])
    assert [estimate.floor(np.array(slots)) for slots in ([0], [1], [0, 1], [2, 1])] == [1, 5, 5, 16]
    assert estimate.floor(none) == 1
    estimate.admit(np.array([1, 2]), 1)
    assert estimate.floor(np.array([0, 1, 2])) == 1


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 1000), hazard=st.floats(0.02, 0.9), spread=st.floats(0.0, 1.0))
def test_estimates_are_monotone_in_the_width_and_within_their_bounds(
    seed: int, hazard: float, spread: float
) -> None:
    random, estimate = np.random.default_rng(seed), acceptance(16)
    chance = np.clip(hazard * (1 + spread * random.standard_normal(16)), 0.01, 0.99)
    for step in range(30):
        width = int(random.integers(len(WIDTHS)))
        accepted = np.minimum(random.geometric(chance) - 1, WIDTHS[width] - 1)
        estimate.observe(step, np.arange(16), width, accepted)
    estimate.observe(30, np.arange(16), WIDTHS.index(16), np.full(16, 3))
    tokens = committed(estimate, range(16))
    assert tokens[0] == pytest.approx(1)
    assert (tokens >= 1 - 1e-9).all() and (tokens <= np.array(WIDTHS) + 1e-9).all()
    parts = [needed(estimate, [slot], 3) for slot in range(16)]
    assert np.sum(parts, axis=0) == pytest.approx(needed(estimate, range(16), 3))
    estimate.factor[:] = 1.0  # a width's own factor may say that the draft proposes worse at it
    estimate._tabulate()
    assert (np.diff(committed(estimate, range(16))) >= -1e-9).all()


def test_a_batch_needs_the_steps_in_which_the_tokens_of_each_request_are_committed() -> None:
    estimate, draft, kinds = acceptance(), Draft(EASY, HARD), np.arange(64) % 4 // 3
    teach(estimate, draft, kinds, WIDTHS.index(16), range(200))
    each = 1 + draft.expected[kinds]  # [request, width]
    for held in (0, WIDTHS.index(4), WIDTHS.index(16)):
        steps = needed(estimate, range(64), held)
        assert steps[held] == pytest.approx(64)
        assert steps == pytest.approx((each[:, held, None] / each).sum(axis=0), rel=0.15)


# ---- Choice ------------------------------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_the_chooser_keeps_to_floor_and_limit_and_spends_no_more_than_its_budget(data: Any) -> None:
    number = st.floats(0.1, 10)
    chooser = Chooser(WIDTHS)
    spent, time, held = 0.0, 0.0, None
    dearest = [0.0] * 7
    for _ in range(data.draw(st.integers(1, 4))):
        committed = np.cumsum(data.draw(st.lists(number, min_size=7, max_size=7)))
        seconds = np.cumsum(data.draw(st.lists(number, min_size=7, max_size=7)))
        limit, bucket = data.draw(st.integers(1, 16)), data.draw(st.integers(0, 3))
        floor = data.draw(st.just(1) | st.integers(1, 20))
        allowed = [width for width, w in enumerate(WIDTHS) if floor <= w <= limit]
        allowed = allowed or [max(width for width, w in enumerate(WIDTHS) if w <= limit)]
        for _ in range(60):
            chosen = chooser.choose(bucket, limit, floor, committed.tolist(), seconds.tolist())
            probe = chosen.reason == "probe"
            held = held if probe else chosen.width  # a change is made at once
            assert chosen.width in allowed and held in allowed
            assert not probe or chosen.width != held
            rates = committed / seconds
            assert rates[held] * 1.02 >= rates[allowed].max() * (1 - 1e-9)
            time += seconds[held]
            if probe:
                cost = seconds[chosen.width] - committed[chosen.width] / rates[held]
                dearest[chosen.width] = max(dearest[chosen.width], seconds[held])
                spent += max(cost, 0.0)
    assert spent <= choice.PROBE_BUDGET * time + sum(dearest)


def test_a_small_promise_does_not_move_it_and_another_batch_size_does_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.0)
    chooser = Chooser((1, 4, 8))
    first = chooser.choose(0, 16, 1, [1, 2.0, 2.1], [1, 1, 1])
    assert (first.width, first.reason) == (2, "start")
    assert chooser.choose(0, 16, 1, [1, 2.13, 2.1], [1, 1, 1]).reason == "hold"
    assert chooser.choose(1, 16, 1, [1, 2.13, 2.1], [1, 1, 1]).reason == "load"
    better = chooser.choose(1, 16, 1, [1, 2.13, 2.3], [1, 1, 1])
    assert (better.width, better.reason) == (2, "gain")
    limited = chooser.choose(1, 5, 1, [1, 2.13, 2.3], [1, 1, 1])
    assert (limited.width, limited.reason) == (1, "limit")
    raised = chooser.choose(1, 16, 5, [1, 2.5, 2.3], [1, 1, 1])
    assert (raised.width, raised.reason) == (2, "limit")
    freed = chooser.choose(1, 16, 1, [1, 2.31, 2.3], [1, 1, 1])  # by less than the margin
    assert (freed.width, freed.reason) == (1, "limit")


def test_a_width_is_probed_the_more_often_the_less_it_costs() -> None:
    chooser = Chooser((1, 4, 8))
    tried = [chooser.choose(0, 16, 1, [1, 4, 4], [1, 1, 1.1]).width for _ in range(2000)]
    assert tried.count(2) > 4 * tried.count(0) > 0
    assert tried.count(1) > 1800


@settings(max_examples=12, derandomize=True)
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


# ---- The policy's calls, its settings ----------------------------------------------------------------------


def test_an_exchange_that_is_one_step_late_starts_with_no_requests() -> None:
    def late() -> OneStepLate:
        return OneStepLate(lambda row: lambda: np.stack([row, 2 * row]))

    gather = late()
    assert (gather(np.array([1.0, 2.0])) == 0).all()
    assert gather(np.array([5.0, 5.0])).tolist() == [[1.0, 2.0], [2.0, 4.0]]
    policy = adaptive(Machine(), 64, group=Group(gather=late()))
    assert policy.choose(np.arange(64), 64 * 500).decision.width == 16  # the widest, before anything is known


def test_a_group_of_one_chooses_as_no_group_does() -> None:
    alone, grouped = (
        serve(adaptive(Machine(jitter=0.05), 32, group=group), Machine(jitter=0.05), Draft(GOOD)).run(32, steps=60)
        for group in (None, Group(gather=lambda row: row[None]))
    )
    assert alone.widths == grouped.widths and len(set(alone.widths)) > 1


def test_a_decision_is_the_same_for_the_ranks_that_are_told_of_it() -> None:
    told = (
        Decision(4, None, "probe", 0.5, 1.0, 1.5, 2.0),
        Decision(6, 48, "limit", 0.25, 0.75, 3.0, 4.0),
    )
    for decision in told:
        assert Decision.from_row(decision.row()) == decision


def test_widths_follow_the_block() -> None:
    assert WidthConfig().states(16) == (1, 2, 4, 6, 8, 12, 16)
    assert WidthConfig().states(10) == (1, 2, 4, 6, 8, 10)
    assert WidthConfig(widths=(4, 8)).states(8) == (1, 4, 8)
    assert WidthConfig(fixed=8).states(16) == (8,) and WidthConfig(fixed="block").states(16) == (16,)
    assert WidthConfig(fixed=1).states(16) == (1,)


@pytest.mark.parametrize(
    "values, message",
    [
        ([], "width: expected a JSON object, found list"),
        ({"width": 4}, "unknown key 'width'. Known keys: widths, fixed, ragged"),
        ({"widths": []}, r"widths=\[\] \(list\): expected a list of whole numbers"),
        ({"widths": [4, "8"]}, r"widths='8' \(str\): expected whole numbers from 1"),
        ({"fixed": 0}, r"fixed=0 \(int\): expected a whole number from 1 to the draft's block, or 'block'"),
        ({"fixed": True}, r"fixed=True \(bool\)"),
        ({"fixed": 4, "widths": [4, 8]}, "give one of them"),
        ({"margin": 0.05}, r"margin=0.05: expected no such key: the policy has one margin, 2 %. Remove it"),
        ({"per_request": True}, "per_request=True: expected no such key: it is called ragged now. Rename it"),
        *(
            ({key: 1}, rf"width: {key}=1: expected no such key: .*Remove it")
            for key in ("probe_budget", "prior_acceptance", "prior_strength", "memory", "exchange_every")
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_was_expected(values: Any, message: str) -> None:
    with pytest.raises(WidthConfigError, match=message):
        WidthConfig.from_mapping(values)


def test_the_widest_block_that_is_asked_for_is_told_to_start_up() -> None:
    for values in ({"widths": [4, 16]}, {"fixed": 16}):
        assert WidthConfig.from_mapping(values).widest == 16
    assert WidthConfig(fixed="block").widest == 1
