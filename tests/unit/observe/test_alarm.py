"""The alarm: when it speaks, how often, and what its line says."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_sglang.checkpoint import DraftSpec, read_config
from dflash_sglang.checkpoint.in_words import PairFacts
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.observe.alarm import CHANCE, FELL, NONE, SILENCE, STAYS, WINDOW, Alarm, Causes, Raised, Window
from dflash_sglang.observe.counts import Totals
from tests.zoo import step3p5
from training.pair import pair_directories

BLOCK = 16
GOOD = (0.8, 0.7, 0.6)
HARD = (0.14, 0.12, 0.095)  # few are accepted, and after these the next ones
BROKEN = (0.22, 0.08, 0.04)  # more of the first ones, and nothing after them
# Shares of request-steps that accept the first proposals, and the state after windows of them. What servers
# measured (docs/results/alarm.md), a draft that is never accepted, and one that is only in loops of a text.
JUDGED = {
    "own text": ((0.8274, 0.714, 0.6016), NONE),
    "own text, temperature 1": ((0.6273, 0.4392, 0.3122), NONE),
    "own text, temperature 1.5": ((0.4836, 0.2774, 0.1824), NONE),
    "random bytes": ((0.5498, 0.395, 0.3134), NONE),
    "random bytes, temperature 1": ((0.35, 0.1742, 0.1085), NONE),
    "Russian": ((0.1659, 0.1387, 0.1076), NONE),
    "German, temperature 1": ((0.4973, 0.2736, 0.1631), NONE),
    "contexts of 3000 tokens": ((0.757, 0.6168, 0.4704), NONE),
    "layer ids swapped": ((0.2181, 0.0764, 0.0462), CHANCE),
    "wrong mask token": ((0.0429, 0.0235, 0.0221), CHANCE),
    "features of the last layer times 64": ((0.1661, 0.0643, 0.0374), CHANCE),
    "features of the first layer times 8": ((0.556, 0.3128, 0.1643), NONE),
    "features of the first layer times 64": ((0.4035, 0.165, 0.0785), NONE),
    "draft of another target": ((0.006, 0.0002, 0.0), CHANCE),
    "never accepted": ((0.0, 0.0, 0.0), CHANCE),
    "loops of a text": ((0.04, 0.024, 0.024), CHANCE),
}
# Blocks of few proposals are judged by these. After the last of them the next ones are taken to come true as
# often, after an only one in 85 %.
SHORT = [(1, (), NONE), (2, (0.07,), CHANCE), (2, (0.08,), NONE), (3, (0.3, 0.11), CHANCE), (3, (0.3, 0.15), NONE)]


def interval(by_position: Any, request_steps: int = WINDOW, width: int = BLOCK) -> Totals:
    """Of steps that verify this width, and copy nothing."""
    accepted = np.zeros(BLOCK - 1, np.int64)
    accepted[: len(by_position)] = np.round(np.array(by_position) * request_steps)
    inside = np.arange(1, BLOCK) < width
    by_position = inside * request_steps, inside * accepted
    return Totals(100, request_steps, 0, request_steps * width, *by_position, *by_position)


def fed(alarm: Alarm, *windows: Any, now: float = 0.0, **steps: int) -> list[Raised | None]:
    return [alarm.observe(interval(window, **steps), now) for window in windows]


def test_windows_are_judged_by_their_first_positions_at_any_width() -> None:
    cases = [(BLOCK, width, *case) for case in JUDGED.values() for width in (4, BLOCK)]
    wrong = []
    for block, width, shares, state in [*cases, *((block, block, *case) for block, *case in SHORT)]:
        alarm = Alarm(block)
        raised = fed(alarm, *[shares] * STAYS, width=width)
        if alarm.state != state or (raised[-1] is None) != (state == NONE):
            wrong.append((block, width, shares, alarm.state, raised))
    assert not wrong


def test_a_line_is_due_once_low_windows_follow_each_other_and_the_next_one_an_hour_later() -> None:
    alarm = Alarm(BLOCK)
    *silent, raised = fed(alarm, *[BROKEN] * STAYS)
    assert not any(silent) and raised == Raised(CHANCE, Window(BROKEN), None) and alarm.state == CHANCE
    assert not any(fed(alarm, *[BROKEN] * 50, now=SILENCE - 1))
    assert [line is not None for line in fed(alarm, *[BROKEN] * 3, now=SILENCE)] == [True, False, False]


def test_a_pair_that_worked_fell_and_windows_of_hard_text_end_a_row_of_low_ones() -> None:
    alarm = Alarm(BLOCK)
    assert not any(fed(alarm, *([BROKEN] * (STAYS - 1) + [GOOD, HARD]) * 5)) and alarm.state == NONE
    *_, raised = fed(alarm, *[BROKEN] * STAYS)
    assert raised == Raised(FELL, Window(BROKEN), Window(GOOD)) and alarm.state == FELL
    fed(alarm, HARD)
    assert alarm.state == NONE


def test_intervals_add_up_and_steps_that_verify_too_little_or_copies_do_not_count() -> None:
    alarm, nothing = Alarm(BLOCK), np.zeros(BLOCK - 1, np.int64)
    copies = interval((1.0,) * (BLOCK - 1))._replace(verified_drafts=nothing, accepted_drafts=nothing)
    for _ in range(4 * STAYS - 1):
        assert alarm.observe(interval(BROKEN, WINDOW // 4), 0.0) is None
        assert alarm.observe(interval(BROKEN, width=3), 0.0) is None and alarm.observe(copies, 0.0) is None
    assert alarm.observe(interval(BROKEN, WINDOW // 4), 0.0) is not None


BESIDE = ["the target: expected the very checkpoint", "the text: expected the chat template"]
OF_DRAFT = [
    "target_layer_ids=[4, 2, 0] of 5: expected the layers that the draft was trained on, counted from 0, in that "
    "order; these do not ascend", "mask_token_id=259: ", "layers=0-1 sliding(128) causal, 2 full not causal; rope",
    "vocabulary: draft 320, target 321: ", "draft quantization=fp8: try the bf16 draft", "contexts of 500 tokens ",
]  # fmt: skip
OF_MTP = ["layers=0-2 sliding(25) causal: ", "vocabulary: draft 320, target 321: ", "contexts of 500 tokens on"]


def test_the_line_has_what_was_seen_and_the_facts_of_the_pair_in_order() -> None:
    config = read_config(pair_directories()["draft"])
    config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": [4, 2, 0]}
    draft, mtp = DraftSpec.from_config(config), MtpSpec.from_config(step3p5.hub_config())
    updated = "weights of the target were updated"
    fell = Raised(FELL, Window(BROKEN), Window(GOOD))
    for spec, quantised, raised, causes in (
        (draft, "fp8", Raised(CHANCE, Window(BROKEN), None), [*OF_DRAFT, *BESIDE]),
        (draft, "fp8", fell, [f"{updated}, and the draft's were not", *BESIDE, *OF_DRAFT]),
        (mtp, "none", fell, [f"{updated} without those of its multi-token-prediction layers", *BESIDE, *OF_MTP]),
    ):
        line = Causes(PairFacts(spec, 5, 321, quantised), context_tokens=5000).line(raised, 10)
        assert "accept proposal 1 2 3, with all before it: 22% 8% 4% (accept length about 1.4). " in line
        assert ("After warm-up they were 80% 70% 60% (accept length about 6.5)" in line) == (raised == fell)
        at = [line.find(f"({number}) {cause}") for number, cause in enumerate(causes, start=1)]
        assert -1 not in at and at == sorted(at) and f"({len(causes) + 1})" not in line and "\n" not in line
