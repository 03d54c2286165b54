"""What the controller tells the width policy of a worker's steps: times, slots, limits, and results."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_sglang.observe.alarm import Alarm
from dflash_sglang.observe.counts import Counts
from dflash_sglang.observe.observer import Observer
from dflash_sglang.verify.rows import Excluded, Shape
from dflash_sglang.verify.step_clock import StepClock
from dflash_sglang.verify.step_result import Drafted
from dflash_sglang.width.controller import MOST_IN_FLIGHT, NOTHING_EXCLUDED, WidthController
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.options import Kind
from dflash_sglang.width.requests import Requests

BLOCK = 16


class Policy:
    """Records what it is told; chooses the widths that it is given, None to go on with the one before."""

    learns, budgets, most_trees = True, (16, 48), 1

    def __init__(self, widths: list[Any]) -> None:
        self.widths, self.told, self.may_be = widths, [], []
        self.of_draft = []
        self.requests, self.chains = Requests(BLOCK, 16), False
        self.metrics = SimpleNamespace(changes=0, last_change="load", over_width_1=1.5, over_block=2.0)

    def prefill(self) -> None:
        self.told.append(("prefill",))

    def admit(self, slots: np.ndarray, most: list[int], least: list[int]) -> None:
        self.told.append(("admit", slots.tolist(), most, least))

    def choose(self, slots: np.ndarray, context: int, ragged: bool, trees: bool, longest: int) -> Any:
        self.told.append(("choose", slots.tolist(), context))
        self.may_be.append((ragged, trees, longest))
        width = self.widths.pop(0)
        if width is None:
            return self.stretch
        decision = Decision(width, 48 if ragged else None)
        if isinstance(width, Kind):
            decision = Decision(BLOCK, None, width.nodes)
        self.stretch = SimpleNamespace(number=len(self.may_be), slots=slots, decision=decision)
        return self.stretch

    def verified(self, stretch: Any, accepted: list[int], *of_draft: Any) -> None:
        self.told.append(("verified", accepted, stretch.number))
        self.of_draft.append([None if of is None else of.tolist() for of in of_draft])

    def timed(self, stretch: Any, seconds: float, steps: int, waited: bool) -> None:
        self.told.append(("timed", stretch.number, seconds, steps, waited))

    def leave_out(self, why: str) -> None:
        self.told.append(("left out", why))


class Used(list):
    """The shapes that were put to use."""

    def use(self, shape: Shape) -> None:
        self.append(shape.width if shape.nodes is None else f"tree {shape.nodes}")

    def use_widest(self) -> None:
        self.append("widest")


class Clock:
    """Of a device: `ends` says when what is launched next will end."""

    ends = 100.0

    def mark(self) -> float:
        return self.ends

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def waited(self, done: bool) -> bool:
        return done


def adaptive(widths: list[Any]) -> tuple[Any, Policy, Clock]:
    policy, clock, used = Policy(widths), Clock(), Used()
    counts, causes = Counts(BLOCK, ragged=True, chooses=True), SimpleNamespace(context_tokens=0)
    observer: Any = Observer(counts, Alarm(BLOCK), causes, lambda: 1.5)
    made: Any = WidthController(policy, used, lambda slots, most: None, clock, observer)
    made.used, made.observer = used, observer
    return made, policy, clock


def decoding(*slots: int, context: int = 0) -> Any:
    rows = torch.tensor(slots, dtype=torch.int64)
    return SimpleNamespace(
        reqs=[SimpleNamespace(spec_num_cap_tokens=0, is_retracted=False, finished_reason=None) for _ in slots],
        req_pool_indices_cpu=rows,
        seq_lens_sum=None,  # where attention takes lengths from the GPU
        spec_info=SimpleNamespace(committed_sum=context),
    )


def prefilled(asked: dict[int, Any]) -> Any:
    """A batch that prefills the requests in these slots, with what each has in its custom_params."""
    reqs = [
        SimpleNamespace(to_finish=None, sampling_params=SimpleNamespace(custom_params=params))
        for params in asked.values()
    ]
    rows = torch.tensor([*asked], dtype=torch.int64)
    return SimpleNamespace(reqs=reqs, req_pool_indices_cpu=rows, decoding_reqs=None, extend_lens=[10] * len(asked))


def launch(
    widths: Any, batch: Any, *of_draft: Any, excluded: Excluded = NOTHING_EXCLUDED, ended: bool = False
) -> Any:
    """A step and its result. of_draft: logprobs, verified rows, masses of nodes and promises, lists or None.
    ended: it has, when the next one is launched."""
    widths.next(batch, excluded)
    drafted = Drafted(*(None if of is None else np.array(of) for of in of_draft))
    result = SimpleNamespace(drafted=lambda: drafted, num_correct_drafts_per_req_cpu=None, copy_done=ended)
    widths.returned(result)
    return result


def times(policy: Policy) -> dict[int, float]:
    """{number of a stretch of one step: seconds}"""
    return {told[1]: told[2] for told in policy.told if told[0] == "timed" and told[3] == 1}


def come_back(widths: Any, result: Any, accepted: list[int]) -> None:
    result.num_correct_drafts_per_req_cpu = accepted  # as SGLang does
    widths.verified(accepted)


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own_if_nothing_came_in_between() -> None:
    widths, policy, clock = adaptive([16, 8, 8, 4, 4, 4, 2])
    results = []
    for ends in (101.0, 103.0, 104.5):
        clock.ends = ends
        results.append(launch(widths, decoding(1, 2)))
    come_back(widths, results.pop(0), [3, 0])
    widths.prefill(prefilled({}))  # the host is busy with it when the steps before end
    for clock.ends in (110.0, 112.0):
        results.append(launch(widths, decoding(1, 2)))
        come_back(widths, results.pop(0), [1, 1])
    widths.admit(prefilled({3: {"dflash": {"max_width": 3}}}))  # which another server has prefilled
    clock.ends = 120.0
    results.append(launch(widths, decoding(1, 2, 3)))
    clock.ends = 121.0
    results.append(launch(widths, decoding(1, 2, 3)))
    widths.prefill(prefilled({}))
    for result in results:
        come_back(widths, result, [0] * (2 if result in results[:2] else 3))
    assert times(policy) == {2: 2.0, 3: 1.5, 5: 2.0, 7: 1.0}
    assert widths.used == [16, 8, 8, "widest", 4, 4, 4, 2, "widest"]
    assert [told for told in policy.told if told[0] in ("prefill", "admit")] == [
        ("prefill",), ("admit", [3], [3], [1]), ("prefill",)
    ]  # fmt: skip


def test_steps_of_a_stretch_are_timed_together_by_their_median_once_all_have_come_back() -> None:
    widths, policy, clock = adaptive([8, 16, None, None, None, 4, None])
    results = []
    for ends, ended in (
        (100.0, True),
        (102.0, True),
        (103.0, False),
        (109.0, True),
        (111.5, True),
        (115.0, False),
    ):
        clock.ends = ends
        results.append(launch(widths, decoding(1, 2), ended=ended))
        if len(results) > 2:
            come_back(widths, results.pop(0), [1, 1])
    assert widths.used == [8, 16, 4]
    assert [told for told in policy.told if told[0] == "timed"] == []
    come_back(widths, results.pop(0), [1, 1])
    # 2, 1, 6 and 2.5 seconds; when three of them were launched, the one before had ended
    assert policy.told[-1] == ("timed", 2, 2.25, 4, True)
    clock.ends = 118.0
    results.append(launch(widths, decoding(1, 2)))
    widths.prefill(prefilled({}))  # ends the last one, whose result is to come
    assert [told[0] for told in policy.told].count("timed") == 1
    for result in results:
        come_back(widths, result, [1, 1])
    assert policy.told[-1] == ("timed", 6, 3.25, 2, False), "of two, one step waited for the host"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mark_stands_where_the_device_was_whenever_the_host_asks_for_it(device: str) -> None:
    clock = StepClock(device)
    start = clock.mark()
    torch.cuda._sleep(40_000_000) if device == "cuda" else time.sleep(0.02)  # at 2 GHz as long
    end = clock.mark()
    time.sleep(0.3)
    assert 0.01 < clock.seconds(start, end) < 0.2
    assert 0.2 < clock.seconds(end, clock.mark()) < 2.0


def test_what_a_step_may_be_and_what_the_draft_thought_of_it_comes_with_its_result() -> None:
    widths, policy, _ = adaptive([8, Kind(BLOCK, nodes=32), 8, 4, 8])
    policy.chains, batch = True, decoding(1)
    logprobs, lens, mass, promised = [[-0.5, -1.0]], [2], [[0.0, -0.5, -1.0]], [0.5]
    results = []
    for excluded, chain, *of_draft in (
        (Excluded(copies=None), 64, logprobs, lens, None, None),
        (Excluded(trees="adjusted"), 0, logprobs, None, mass, None),
        (Excluded(ragged="reported", trees="reported"), 32, None, None, None, None),
        (Excluded(copies="sampled"), 64, logprobs, None, None, promised),
    ):
        batch.spec_info.chain = chain
        results.append(launch(widths, batch, *of_draft, excluded=excluded))
    for result in results:
        come_back(widths, result, [1])
    assert policy.may_be == [(True, True, 64), (True, False, 0), (False, False, 32), (True, True, 0)]
    assert widths.used == [8, "tree 32", 8, 4]
    assert policy.of_draft == [
        [logprobs, lens, None, None], [logprobs, None, mass, None], [None] * 4, [logprobs, None, None, promised]
    ]  # fmt: skip
    # Verified proposals of each step over those of a block: 1 of a ragged one, a tree's, and 7, 3, 7 of chains.
    assert batch.reqs[0].spec_num_cap_tokens == (1 - 15) + 0 + (7 - 15) + (3 - 15)
    totals = widths.observer.counts.totals()
    assert totals.accepted[0] == 4 and totals.accepted_drafts[0] == 3, "a copy is none of the draft's proposals"


def test_a_step_that_never_comes_back_does_not_shift_the_results_of_those_after_it() -> None:
    widths, policy, clock = adaptive([8, 4, 8, 4, 2])
    results = []
    for slots, ends in (((1, 2), 101.0), ((1, 2), 102.0), ((), 102.5), ((1, 2), 104.0)):
        clock.ends = ends
        results.append(launch(widths, decoding(*slots)) if slots else widths.next(decoding()))
    come_back(widths, results[0], [1, 1])
    come_back(widths, results[3], [3, 3])
    come_back(widths, results[1], [7, 7])  # no step waits for it any more
    widths.verified([3, 3])  # equal to what came, and of no step
    clock.ends = 107.0
    come_back(widths, launch(widths, decoding(1, 2)), [0, 0])
    widths.prefill(prefilled({}))
    told = [told for told in policy.told if told[0] not in ("choose", "prefill")]
    assert told == [  # a step of other ranks has no result
        ("verified", [1, 1], 1),
        ("left out", "a step came back before the one that was launched before it"),
        ("verified", [3, 3], 4),  # it follows a step without requests
        ("left out", "a result of 2 requests that no step waits for"),
        ("left out", "a result of 2 requests that no step waits for"),
        ("verified", [0, 0], 5),
        ("timed", 5, 3.0, 1, False),
    ]


def test_steps_that_never_come_back_are_forgotten_and_those_after_them_are_timed() -> None:
    widths, policy, clock = adaptive([8] * 3 * MOST_IN_FLIGHT)
    for step in range(3 * MOST_IN_FLIGHT):
        clock.ends = 100.0 + step
        result = launch(widths, decoding(1))
    lost = ("left out", f"{MOST_IN_FLIGHT} steps were launched and none came back")
    assert policy.told.count(lost) == 2 * MOST_IN_FLIGHT
    come_back(widths, result, [2])
    widths.prefill(prefilled({}))
    assert policy.told[-3:] == [
        ("verified", [2], 3 * MOST_IN_FLIGHT),
        ("prefill",),
        ("timed", 3 * MOST_IN_FLIGHT, 1.0, 1, False),
    ]
