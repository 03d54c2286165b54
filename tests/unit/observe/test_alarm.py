"""The alarm: when it speaks, how often, and what its line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_sglang.checkpoint import DraftSpec, read_config
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.observe.alarm import (
    BREAK_EVEN,
    CHANCE,
    FELL,
    NONE,
    SILENCE,
    STAYS,
    WINDOW,
    Alarm,
    Raised,
    Window,
)
from dflash_sglang.observe.causes import Causes
from dflash_sglang.observe.counts import Totals
from dflash_sglang.pair import pair_directories
from tests.zoo import step3p5

RESULT = Path(__file__).with_name("alarm_cases.json")  # of servers whose draft or target was changed
CASES = json.loads(RESULT.read_text())["cases"]
BLOCK = 16
GOOD = (0.8, 0.7, 0.6)
HARD = (0.14, 0.12, 0.095)  # few are accepted, and after these the next ones
BROKEN = (0.22, 0.08, 0.04)  # more of the first ones, and nothing after them
CAUSES = Causes(DraftSpec.from_config(read_config(pair_directories()["draft"])), [4, 2, 0], 5, 320, "none")


def interval(by_position: Any, request_steps: int = WINDOW, steps: int = 100, width: int = BLOCK) -> Totals:
    """Of steps that verify this width, and copy nothing."""
    accepted = np.zeros(BLOCK - 1, np.int64)
    accepted[: len(by_position)] = np.round(np.array(by_position) * request_steps)
    inside = np.arange(1, BLOCK) < width
    by_position = inside * request_steps, inside * accepted
    return Totals(steps, request_steps, 0, request_steps * width, *by_position, *by_position)


def fed(alarm: Alarm, windows: list[Any], now: float = 0.0) -> list[Raised | None]:
    return [alarm.observe(interval(window), 0, now) for window in windows]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['pair']}, {case['text']}")
@pytest.mark.parametrize("width", [4, BLOCK])
def test_what_a_server_measured_is_judged_as_the_server_did_at_any_width(case: dict[str, Any], width: int) -> None:
    alarm = Alarm(BLOCK)
    for _ in range(STAYS):
        alarm.observe(interval(case["by_position"], width=width), 0, 0.0)
    assert (alarm.state == NONE) == (case["alarm"] == "none")


def test_a_line_is_due_once_low_windows_follow_each_other_and_the_next_one_an_hour_later() -> None:
    alarm = Alarm(BLOCK)
    *silent, raised = fed(alarm, [BROKEN] * STAYS)
    assert not any(silent) and raised == Raised(CHANCE, Window(BROKEN), None) and alarm.state == CHANCE
    assert not any(fed(alarm, [BROKEN] * 50, now=SILENCE - 1))
    assert [line is not None for line in fed(alarm, [BROKEN] * 3, now=SILENCE)] == [True, False, False]


def test_windows_of_hard_text_raise_nothing_and_end_a_row_of_low_ones() -> None:
    alarm = Alarm(BLOCK)
    assert not any(fed(alarm, [HARD] * 20))
    assert not any(fed(alarm, ([BROKEN] * (STAYS - 1) + [HARD]) * 5)) and alarm.state == NONE
    fed(alarm, [BROKEN] * STAYS)
    assert alarm.state == FELL
    fed(alarm, [HARD])
    assert alarm.state == NONE


def test_a_pair_that_worked_after_warm_up_fell_and_one_that_never_did_is_at_chance_level() -> None:
    alarm = Alarm(BLOCK)
    *_, raised = fed(alarm, [GOOD, HARD] + [BROKEN] * STAYS)
    assert raised == Raised(FELL, Window(BROKEN), Window(GOOD))


def test_a_draft_whose_proposals_are_never_accepted_is_at_chance_level() -> None:
    assert fed(Alarm(BLOCK), [(0.0, 0.0, 0.0)] * STAYS)[-1] is not None


def test_loops_of_a_text_do_not_make_a_broken_draft_look_sound() -> None:
    """All that is accepted is in runs, but hardly anything is."""
    assert fed(Alarm(BLOCK), [(0.04, 0.024, 0.024)] * STAYS)[-1] is not None


def test_intervals_add_up_to_a_window_and_steps_that_verify_too_little_do_not_count() -> None:
    alarm = Alarm(BLOCK)
    for _ in range(4 * STAYS - 1):
        assert alarm.observe(interval(BROKEN, WINDOW // 4), 0, 0.0) is None
        assert alarm.observe(interval(BROKEN, WINDOW, width=3), 0, 0.0) is None
    assert alarm.observe(interval(BROKEN, WINDOW // 4), 0, 0.0) is not None


def test_copies_that_come_true_hide_no_broken_draft() -> None:
    alarm = Alarm(BLOCK)
    copies = interval((1.0,) * (BLOCK - 1))
    nothing = np.zeros(BLOCK - 1, np.int64)
    copies = copies._replace(verified_drafts=nothing, accepted_drafts=nothing)
    raised = [alarm.observe(steps, 0, 0.0) for _ in range(STAYS) for steps in (interval(BROKEN), copies)]
    assert [line is not None for line in raised] == [False] * (2 * STAYS - 2) + [True, False]


@pytest.mark.parametrize(("block", "shares", "state"), [
    (1, (), NONE), (2, (0.07,), CHANCE), (2, (0.08,), NONE), (3, (0.3, 0.11), CHANCE), (3, (0.3, 0.15), NONE),
])  # fmt: skip
def test_blocks_of_few_proposals_are_judged_by_these(block: int, shares: tuple[float, ...], state: str) -> None:
    """After the last of them the next ones are taken to come true as often, after an only one in 85 %."""
    alarm = Alarm(block)
    for _ in range(STAYS):
        alarm.observe(interval(shares, width=block), 0, 0.0)
    assert alarm.state == state


@pytest.mark.parametrize(
    "requests, plain_share, state",
    [(4, 0.95, BREAK_EVEN), (4, 0.85, NONE), (64, 1.0, NONE)],
)
def test_drafting_that_does_not_pay_is_told_where_few_requests_run(
    requests: int, plain_share: float, state: str
) -> None:
    alarm = Alarm(BLOCK)
    steps = interval((), requests * WINDOW, WINDOW, width=1)
    raised = [alarm.observe(steps, int(plain_share * WINDOW), 0.0) for _ in range(STAYS)]
    assert alarm.state == state
    assert raised[:-1] == [None] * (STAYS - 1)
    assert raised[-1] == (None if state == NONE else Raised(BREAK_EVEN, None, None))


def test_the_line_has_what_was_seen_and_the_facts_of_the_pair_in_order() -> None:
    causes = Causes(CAUSES.spec, [4, 2, 0], 5, 320, "fp8", context_tokens=5000)
    line = causes.line(Raised(CHANCE, Window(BROKEN), None), 10)
    assert "accept proposal 1 2 3, with all before it: 22% 8% 4% (accept length about 1.4). Check" in line
    wanted = (
        "(1) target_layers=[4, 2, 0] of 5", "(2) mask_token_id=259", "(3) vocabulary: draft 320, target 320",
        "(4) draft quantization=fp8: try the bf16 draft",
        "(5) layers=0-1 sliding(128) causal, 2 full not causal, at contexts of 500 tokens on average",
        "(6) the draft is trained for this very target", "(7) chat template and thinking mode",
    )  # fmt: skip
    assert [line.index(part) for part in wanted] == sorted(line.index(part) for part in wanted)
    assert "\n" not in line
    fell = causes.line(Raised(FELL, Window(BROKEN), Window(GOOD)), 10)
    assert "After warm-up they were 80% 70% 60% (accept length about 6.5)" in fell
    assert "(1) weights of the target were updated, and the draft's were not" in fell
    assert "width 1 is estimated to be faster" in causes.line(Raised(BREAK_EVEN, None, None), 10)


def test_the_line_names_no_features_of_layers_that_are_the_targets_own() -> None:
    spec = MtpSpec.from_config(step3p5.hub_config())
    line = Causes(spec, (), 5, 320, "none").line(Raised(CHANCE, Window(BROKEN), None), 10)
    assert "(1) vocabulary: draft 320" in line and "layers=0-2 sliding(25) causal" in line
    assert "target_layers" not in line and "mask_token_id" not in line


def test_the_line_tells_of_an_update_without_layers_that_are_the_targets_own() -> None:
    spec = MtpSpec.from_config(step3p5.hub_config())
    line = Causes(spec, (), 5, 320, "none").line(Raised(FELL, Window(BROKEN), Window(GOOD)), 10)
    assert "(1) weights of the target were updated without those of its multi-token-prediction layers" in line
    assert "the draft's were not" not in line
