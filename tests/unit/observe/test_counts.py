"""Counters of steps against counting by hand, and the parts of a step's time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.observe.counts import Counts, DoneStep, Shape
from dflash_sglang.observe.observer import decode_line
from dflash_sglang.observe.step_split import EVERY, StepSplit

BLOCK = 8


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps of requests with a `max_width`, in whole blocks of some width or in parts of them."""
    out = []
    for _ in range(draw(st.integers(1, 6))):
        width, n = draw(st.integers(1, BLOCK)), draw(st.integers(1, 4))
        lens = [draw(st.integers(1, width)) for _ in range(n)] if draw(st.booleans()) else None
        most = [draw(st.integers(1, BLOCK)) for _ in range(n)]
        rows = [min(a, b) for a, b in zip(most, lens or [width] * n, strict=True)]
        out.append(dict(width=width, lens=lens, most=most, accepted=[draw(st.integers(0, r - 1)) for r in rows]))
    return out


def added(counts: Counts, step: dict[str, Any], whole: str | None = None) -> None:
    lens = None if step["lens"] is None else np.array(step["lens"])
    counts.add(DoneStep(step["width"], step["accepted"], np.array(step["most"]), lens, whole))


@given(steps())
def test_a_proposal_counts_as_verified_where_its_request_could_commit_it(served: list[dict[str, Any]]) -> None:
    counts, verified, accepted, rows, committed, drafted = (
        Counts(BLOCK, ragged=True, chooses=True),
        [0] * 7,
        [0] * 7,
        0,
        0,
        0,
    )
    for step in served:
        added(counts, step)
        for i, done in enumerate(step["accepted"]):
            length = step["width"] if step["lens"] is None else step["lens"][i]
            rows, committed, drafted = rows + length, committed + done + 1, drafted + step["width"] - 1
            for position in range(1, BLOCK):
                verified[position - 1] += position < min(length, step["most"][i])
                accepted[position - 1] += position <= done
    told = counts.snapshot()
    assert told["verified"] == verified and told["accepted"] == accepted
    assert (told["steps"], told["request_steps"]) == (len(served), sum(len(step["most"]) for step in served))
    assert (told["verified_rows"], told["committed_tokens"]) == (rows, committed)
    assert told["drafted_proposals"] == drafted
    assert told["accept_length"] == committed / told["request_steps"]
    assert told["accept_rate"] == (sum(accepted) / sum(verified) if any(verified) else 0.0)


def test_the_accept_rate_is_of_what_was_verified_whatever_the_width() -> None:
    counts = Counts(16, ragged=False, chooses=False)
    for width, accepted in ((16, 3), (4, 3), (1, 0)):
        added(counts, dict(width=width, lens=None, most=[16], accepted=[accepted]))
    totals = counts.totals()
    assert totals.accept_rate == 6 / 18
    assert (totals.accept_length, totals.drafting_accept_length) == (3, 4)


def test_a_tree_verifies_its_nodes_and_drafts_a_block() -> None:
    counts = Counts(16, ragged=True, chooses=True)
    counts.add(DoneStep(16, [7, 0], np.array([16, 16]), nodes=32))
    counts.add(DoneStep(16, [3], np.array([16]), np.array([5])))
    totals = counts.totals()
    assert (totals.rows, totals.drafted, totals.committed) == (64 + 5, 45, 13)
    assert counts.shapes == {Shape(32, "tree", "chosen"): 1, Shape(16, "ragged", "chosen"): 1}


def test_what_was_copied_is_told_apart_from_what_the_draft_proposed() -> None:
    counts = Counts(16, ragged=False, chooses=False)
    counts.add(DoneStep(4, [3, 1, 0], np.array([16, 16, 2]), copied=np.array([True, False, False])))
    counts.add(DoneStep(4, [2], np.array([16])))
    totals = counts.totals()
    assert totals.verified[:4].tolist() == [4, 3, 3, 0] and totals.accepted[:4].tolist() == [3, 2, 1, 0]
    assert totals.verified_drafts[:4].tolist() == [3, 2, 2, 0]
    assert totals.accepted_drafts[:4].tolist() == [2, 1, 0, 0]
    assert totals.committed == 4 + 6


def test_a_step_has_a_form_and_a_reason() -> None:
    whole, part = dict(width=4, lens=None, most=[8], accepted=[0]), dict(width=4, lens=[3], most=[8], accepted=[0])
    counts = Counts(BLOCK, ragged=True, chooses=True)
    for step, why in (
        (whole, None),
        (whole, "adjusted"),
        (part, None),
        ({**whole, "width": 1}, None),
        ({**whole, "width": 1, "most": [1]}, None),
    ):
        added(counts, step, why)
    assert counts.snapshot()["shapes"] == {
        "whole": {"chosen": 1, "adjusted": 1},
        "ragged": {"chosen": 1},
        "plain": {"chosen": 1, "max_width": 1},
    }
    assert Counts.chosen_plain(counts.shapes) == 1
    plain = Counts(BLOCK, ragged=False, chooses=False)
    added(plain, {**whole, "width": 1})
    assert plain.snapshot()["shapes"] == {"plain": {"set": 1}}
    assert not Counts.chosen_plain(plain.shapes), "nobody estimated it to be faster"
    never = Counts(BLOCK, ragged=False, chooses=False)
    added(never, whole, "adjusted")
    assert never.snapshot()["shapes"] == {"whole": {"not_ragged": 1}}


def test_the_decode_line_tells_what_came_since_the_last_one() -> None:
    counts = Counts(BLOCK, ragged=False, chooses=False)
    added(counts, dict(width=8, lens=None, most=[8, 8], accepted=[7, 7]))
    before = counts.totals()
    added(counts, dict(width=4, lens=None, most=[8, 8], accepted=[3, 1]))
    added(counts, dict(width=2, lens=None, most=[8, 8], accepted=[0, 0]))
    shapes = {Shape(4, "whole", "not_ragged"): 1, Shape(2, "whole", "not_ragged"): 1}
    assert decode_line(counts.totals().since(before), shapes) == (
        "DFlash decode, #steps: 2, accept len: 2.00, accept rate: 0.50, by position: 0.50 0.50 0.50, "
        "rows per token: 1.50, width: 2x1 4x1"
    )
    plain = Counts(BLOCK, ragged=False, chooses=False)
    added(plain, dict(width=1, lens=None, most=[8], accepted=[0]))
    assert "by position: none verified, rows per token: 1.00" in decode_line(
        plain.totals(), {Shape(1, "plain", "chosen"): 1}
    )


class Clock:
    """Marks are moments; `read` counts how many were asked for."""

    now, read = 0.0, 0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        self.read += 1
        return end - start


def test_one_step_in_many_is_timed_in_its_parts_and_read_when_the_next_one_is() -> None:
    clock: Any = Clock()
    split, last_end = StepSplit(clock), None
    for step in range(2 * EVERY + 1):
        clock.now += 1.0  # between steps
        split.begin(last_end)
        clock.now += 2.0
        split.drafted()
        clock.now += 4.0
        split.end(clock.mark())
        last_end = clock.now
        assert clock.read == 3 * split.timed
        assert split.timed == (step >= EVERY + 1)
    split.begin(last_end)
    assert split.timed == 2
    assert split.seconds == {"draft": 4.0, "verify": 8.0, "rest": 2.0}


def test_a_step_that_follows_something_else_is_not_timed_and_a_rehearsed_one_neither() -> None:
    split = StepSplit(Clock())  # type: ignore[arg-type]
    split.drafted()
    for _ in range(3 * EVERY):
        split.begin(None)
        split.drafted()
        split.end(0.0)
    assert split.timed == 0 and not split._marks


def test_a_chain_beyond_the_block_counts_its_rows_at_positions_up_to_the_longest_chains() -> None:
    counts = Counts(4 * BLOCK, ragged=True, chooses=True)
    counts.add(DoneStep(BLOCK, [2 * BLOCK - 1, 3], np.array([4 * BLOCK, BLOCK]), chain=2 * BLOCK))
    counts.add(DoneStep(BLOCK, [BLOCK - 1], np.array([4 * BLOCK])))
    told, last = counts.snapshot(), 2 * BLOCK - 1
    assert told["verified"] == [3] * (BLOCK - 1) + [1] * BLOCK + [0] * (2 * BLOCK)
    assert told["accepted"] == [3] * 3 + [2] * (BLOCK - 4) + [1] * BLOCK + [0] * (2 * BLOCK)
    assert sum(told["accepted"]) == last + 3 + BLOCK - 1
    assert (told["verified_rows"], told["drafted_proposals"]) == (5 * BLOCK, 3 * (BLOCK - 1))
    assert counts.shapes == {Shape(2 * BLOCK, "copy", "chosen"): 1, Shape(BLOCK, "whole", "chosen"): 1}
