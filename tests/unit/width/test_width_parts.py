"""The parts of the width policy: step times, requests, choice, settings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.settings.schema import PluginConfigError
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width import choice
from dflash_sglang.width.choice import Chooser
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.group import Group, OneStepLate
from dflash_sglang.width.kinds import Kind, kinds_of
from dflash_sglang.width.requests import Requests
from dflash_sglang.width.step_times import Sample, StepTimes, startup_cells
from tests.support.width_simulation import BUCKETS, GOOD, TREES, WIDTHS, Draft, Machine, adaptive, serve

# ---- Step times --------------------------------------------------------------------------------------------


def fitted(cells: dict[tuple[int, int], float], buckets: Any = (1, 8, 64), widths: Any = (1, 4, 16)) -> StepTimes:
    times = StepTimes(buckets, list(map(Kind, widths)))
    times.fit(Sample(batch, Kind(width), 0, seconds) for (batch, width), seconds in cells.items())
    return times


def test_start_up_measures_few_cells() -> None:
    chains = kinds_of(WIDTHS, False, [])
    assert len(startup_cells([b for b in BUCKETS if b <= 256], chains, {})) == 42
    cells = startup_cells(BUCKETS, chains, {})
    assert len(cells) == 49 and max(batch * kind.width for batch, kind, _ in cells) <= 8192
    assert {(batch, context) for batch, _, context in cells if context} == {(16, 16 * 4096)}
    every = startup_cells(BUCKETS, kinds_of(WIDTHS, True, TREES), TREES)
    assert [cell for cell in every if cell[1] in chains] == cells
    assert [cell for cell in every if cell[1].ragged] == [
        (batch, kind._replace(ragged=True), 0)
        for batch, kind, context in cells
        if kind.width in (WIDTHS[1], WIDTHS[-1]) and not context
    ]
    assert [(batch, kind.nodes) for batch, kind, _ in every if kind.nodes] == [
        *((batch, 16) for batch in (1, 2, 4, 8)), *((batch, 32) for batch in (1, 2, 4)), (1, 64), (2, 64)
    ]  # fmt: skip


@pytest.mark.parametrize("most", [32, 256, 4096])
def test_what_was_not_measured_is_filled_within_a_tenth(most: int) -> None:
    machine = Machine()
    times = adaptive(machine, most).decider.step_times
    for index, batch in enumerate(times.buckets):
        truth = machine.seconds(batch, 700 * batch)
        assert np.abs(times.seconds(index, 700 * batch) / truth - 1).max() < 0.1


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
    times = StepTimes((1, 8), [Kind(1), Kind(8)])
    cells = itertools.product((1, 8), (Kind(1), Kind(8)), [0], (0.01, 0.01, 0.5))
    long = [(8, Kind(8), 10_000, seconds) for seconds in (0.01 + 1e-3, 0.01 + 1e-3, 0.3)]
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
    times = StepTimes((1, 8), [Kind(1), Kind(4)])
    with pytest.raises(ValueError, match="batch=9: expected at most 8, the largest of the step times"):
        times.fit([Sample(9, Kind(4), 0, 0.01)])
    with pytest.raises(ValueError, match="no step time was measured"):
        times.fit([])


def test_a_tree_takes_what_was_measured_and_is_no_step_of_other_batches() -> None:
    kinds = kinds_of((1, 16), False, [16, 32])
    times = StepTimes((1, 2, 4), kinds)
    chains = [Sample(batch, Kind(width), 0, 0.01) for batch in (1, 4) for width in (1, 16)]
    trees = [(1, 16, 0.011), (2, 16, 0.013), (4, 16, 0.02), (1, 32, 0.012), (2, 32, 0.012), (2, 32, 0.5)]
    times.fit([*chains, *(Sample(batch, Kind(16, nodes=nodes), 0, seconds) for batch, nodes, seconds in trees)])
    rows = [times.seconds(bucket, 0)[2:].tolist() for bucket in range(3)]
    assert rows == [[0.011, 0.012], [0.013, 0.012], [0.02, float("inf")]]
    for _ in range(9):  # of a tree that nobody measured: the pace of the machine is as before
        times.observe(2, 3, 0, 0.02)
    assert [times.seconds(bucket, 0)[2:].tolist() for bucket in range(3)] == rows


# ---- Requests ----------------------------------------------------------------------------------------------


def requests(slots: int = 64) -> Requests:
    return Requests(16, slots)


def committed(known: Requests, slots: Any) -> np.ndarray:
    """[widths] tokens of one of these requests in a step; the harmonic mean, if they are not alike."""
    return len(slots) / needed(known, slots, 1)


def needed(known: Requests, slots: Any, held: int, share: float = 1.0) -> np.ndarray:
    """[widths] steps of one request that commit what a step of these does as it is held."""
    return known.work(np.array(slots), held, share).steps_needed(np.array(WIDTHS), np.ones(len(WIDTHS)))


def chain(*conditional: float) -> np.ndarray:
    """Chances of proposals, each with all before it."""
    return np.cumprod(conditional)


def test_what_a_request_commits_is_the_mean_of_what_was_said_of_it() -> None:
    known = requests(2)
    for step in range(200):  # every other step is easy
        known.observe(np.array([0, 1]), np.tile(chain(*[(0.9, 0.5)[step % 2]] * 15), (2, 1)))
    mean = (chain(*[0.9] * 15) + chain(*[0.5] * 15)) / 2
    expected = [1 + mean[: width - 1].sum() for width in WIDTHS]
    assert committed(known, [0]) == pytest.approx(expected, rel=0.03)


def test_a_narrow_block_says_of_later_positions_what_it_says_of_those_before_them() -> None:
    known, slot = requests(1), np.array([0])
    for _ in range(300):
        known.observe(slot, chain(*[0.8] * 15)[None])
    for _ in range(300):
        known.observe(slot, chain(0.5, 0.5)[None])
    assert committed(known, [0]) == pytest.approx(
        1 + np.cumsum([0, *chain(0.5, 0.5, *[0.8] * 13)])[np.array(WIDTHS) - 1], rel=0.01
    )


def test_a_new_request_starts_as_the_average_one_and_results_of_its_slots_last_one_are_known_as_such() -> None:
    known, slots = requests(4), np.arange(4)
    for _ in range(100):
        known.observe(slots, np.array([chain(*[chance] * 15) for chance in (0.1, 0.7, 0.7, 0.7)]))
    assert committed(known, [0])[-1] < 1.2
    known.admit(np.array([0]), step=100)
    average = 1 + (chain(*[0.1] * 15) + 3 * chain(*[0.7] * 15)).sum() / 4
    assert committed(known, [0])[-1] == pytest.approx(average, rel=0.02)
    assert known.are_in(slots, 99).tolist() == [False, True, True, True]
    assert known.are_in(slots, 100).all()


def test_a_request_is_counted_up_to_its_own_limit() -> None:
    known, free = requests(2), requests(1)
    known.admit(np.array([0, 1]), 0, [1, 5])
    for _ in range(50):
        known.observe(np.array([0, 1]), chain(*[0.8] * 15) * (np.arange(15) < np.array([[0], [4]])))
    one, five = committed(known, [0]), committed(known, [1])
    assert one.tolist() == [1.0] * 7
    assert five[:3] == pytest.approx(committed(free, [0])[:3], rel=0.01)
    assert five[3:] == pytest.approx([five[3]] * 4) and five[3] == pytest.approx(1 + chain(*[0.8] * 4).sum())
    assert known.cap(np.array([0])) == 1 and known.cap(np.array([0, 1])) == 5
    known.admit(np.array([0, 1]), 1)
    assert known.cap(np.array([0, 1])) == 16
    assert committed(known, [0]) == pytest.approx(committed(free, [0])), "limits of others are no average"


def test_the_floor_of_a_batch_is_the_highest_of_its_requests() -> None:
    known, none = requests(3), np.zeros(0, int)
    known.admit(np.array([0, 1, 2]), 0, min_widths=[1, 5, 40])
    assert [known.floor(np.array(slots)) for slots in ([0], [1], [0, 1], [2, 1])] == [1, 5, 5, 16]
    assert known.floor(none) == 1 and known.cap(none) == 1
    known.admit(np.array([1, 2]), 1)
    assert known.floor(np.array([0, 1, 2])) == 1


@pytest.mark.parametrize(("held", "share"), [(1, 1.0), (4, 1.0), (16, 1.0), (16, 0.6), (16, 1.2)])
def test_a_batch_needs_the_steps_in_which_the_tokens_of_each_request_are_committed(
    held: int, share: float
) -> None:
    known = requests(1024)
    hard = np.random.default_rng(0).random(1024) < 0.25
    chances = np.array([chain(*[0.55 if of else 0.95] * 15) for of in hard])
    for _ in range(400):
        known.observe(np.arange(1024), chances)
    accepted = np.concatenate([np.zeros((1024, 1)), chances.cumsum(axis=1)], axis=1)[:, np.array(WIDTHS) - 1]
    tokens = 1 + accepted[:, [WIDTHS.index(held)]] * share
    for n, off in ((64, 0.01), (1024, 0.1)):  # of many, some are looked at
        steps = needed(known, range(n), held, share)
        assert steps == pytest.approx((tokens / (1 + accepted))[:n].sum(axis=0), rel=off)


# ---- Choice ------------------------------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_the_chooser_keeps_to_what_is_allowed_and_spends_no_more_than_its_budget(data: Any) -> None:
    number = st.floats(0.1, 10)
    chooser = Chooser(7)
    spent, time, held = 0.0, 0.0, None
    dearest = [0.0] * 7
    for _ in range(data.draw(st.integers(1, 4))):
        committed = np.cumsum(data.draw(st.lists(number, min_size=7, max_size=7)))
        seconds = np.cumsum(data.draw(st.lists(number, min_size=7, max_size=7)))
        bucket = data.draw(st.integers(0, 3))
        allowed = sorted(data.draw(st.sets(st.integers(0, 6), min_size=1)))
        for _ in range(60):
            chosen = chooser.choose(bucket, allowed, dict(enumerate(committed)), dict(enumerate(seconds)))
            probe = chosen.reason == "probe"
            held = held if probe else chosen.kind  # a change is made at once
            assert chosen.kind in allowed and held in allowed
            assert not probe or chosen.kind != held
            rates = committed / seconds
            assert rates[held] * 1.02 >= rates[allowed].max() * (1 - 1e-9)
            time += seconds[held]
            if probe:
                cost = seconds[chosen.kind] - committed[chosen.kind] / rates[held]
                dearest[chosen.kind] = max(dearest[chosen.kind], seconds[held])
                spent += max(cost, 0.0)
    assert spent <= choice.PROBE_BUDGET * time + sum(dearest)


def test_a_small_promise_does_not_move_it_and_another_batch_size_does_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "PROBE_BUDGET", 0.0)
    chooser = Chooser(3)

    def choose(bucket: int, allowed: list[int], *committed: float) -> tuple[int, str]:
        return chooser.choose(bucket, allowed, dict(enumerate(committed)), dict.fromkeys(range(3), 1.0))

    every = [0, 1, 2]
    assert choose(0, every, 1, 2.0, 2.1) == (2, "start")
    assert choose(0, every, 1, 2.13, 2.1) == (2, "hold")
    assert choose(1, every, 1, 2.13, 2.1) == (1, "load")
    assert choose(1, every, 1, 2.13, 2.3) == (2, "gain")
    assert choose(1, [0, 1], 1, 2.13, 2.3) == (1, "limit")
    assert choose(1, [2], 1, 2.5, 2.3) == (2, "limit")
    assert choose(1, every, 1, 2.31, 2.3) == (1, "limit"), "by less than the margin"


def test_a_shape_is_probed_the_more_often_the_less_it_costs() -> None:
    chooser = Chooser(3)
    committed, seconds = {0: 1, 1: 4, 2: 4}, {0: 1, 1: 1, 2: 1.1}
    tried = [chooser.choose(0, [0, 1, 2], committed, seconds).kind for _ in range(2000)]
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
        Decision(4, None, None, None, "probe", 0.5, 1.0, 1.5, 2.0),
        Decision(6, 48, None, None, "limit", 0.25, 0.75, 3.0, 4.0),
        Decision(16, None, 32, None, "gain", 0.25, 1.25, 3.0, 4.0),
        Decision(16, None, None, 64, "copy", 0.0, 1.0, 3.0, 4.0),
    )
    for decision in told:
        assert Decision.from_row(decision.row()) == decision


def test_widths_follow_the_block() -> None:
    assert WidthConfig().states(16) == (1, 2, 4, 6, 8, 12, 16)
    assert WidthConfig().states(10) == (1, 2, 4, 6, 8, 10)
    assert WidthConfig(widths=(4, 8)).states(8) == (1, 4, 8)
    assert WidthConfig(fixed=8).states(16) == (8,) and WidthConfig(fixed="block").states(16) == (16,)
    assert WidthConfig(fixed=1).states(16) == (1,)
    fixed = WidthConfig(fixed="tree 32")
    assert (fixed.states(16), fixed.trees, WidthConfig().trees) == ((16,), (32,), (16, 32, 64))
    assert WidthConfig.from_mapping({"trees": [64, 16, 16]}).trees == (16, 64)
    assert replace(fixed, memory_reserve=1.0).trees == (32,)


@pytest.mark.parametrize(
    "values, message",
    [
        ([], "width: expected a JSON object, found list"),
        ({"width": 4}, "unknown key 'width'. Known keys: widths, fixed, trees"),
        ({"widths": []}, r"widths=\[\] \(list\): expected a list of whole numbers"),
        ({"widths": [4, "8"]}, r"widths='8' \(str\): expected whole numbers from 1"),
        (
            {"fixed": 0},
            r"fixed=0 \(int\): expected a whole number from 1 to the draft's block, 'block' for that, or",
        ),
        ({"fixed": "tree"}, r"fixed='tree' \(str\): expected .* or 'tree N'"),
        ({"fixed": "tree 65"}, r"fixed=65 \(int\): expected whole numbers from 2 to 64"),
        ({"fixed": 4, "trees": [16]}, r"fixed=4 and trees=\[16\]: give one of them"),
        ({"trees": 16}, r"trees=16 \(int\): expected a list of whole numbers from 2 to 64"),
        ({"trees": [16, 1]}, r"trees=1 \(int\): expected whole numbers from 2 to 64"),
        ({"fixed": True}, r"fixed=True \(bool\)"),
        ({"fixed": 4, "widths": [4, 8]}, "give one of them"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_was_expected(values: Any, message: str) -> None:
    with pytest.raises(PluginConfigError, match=message):
        WidthConfig.from_mapping(values)


def test_the_widest_block_that_is_asked_for_is_told_to_start_up() -> None:
    for values in ({"widths": [4, 16]}, {"fixed": 16}):
        assert WidthConfig.from_mapping(values).widest == 16
    assert WidthConfig(fixed="block").widest == 1
