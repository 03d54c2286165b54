"""What the worker tells the width policy, and what of it a launch can have: times, slots, limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from dflash_sglang.observe.alarm import Alarm
from dflash_sglang.observe.counts import Counts
from dflash_sglang.observe.observer import Observer
from dflash_sglang.patches.request_checks import validate_dflash_request
from dflash_sglang.requests.checks import request_error
from dflash_sglang.requests.errors import LONGEST, RequestError, shown
from dflash_sglang.requests.limits import width_bounds
from dflash_sglang.settings.schema import PluginConfigError
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.verify.rows import Excluded, Shape
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.group import Group
from dflash_sglang.width.kinds import Kind
from dflash_sglang.width.requests import Requests

BLOCK = 16
ALONE = Group()


class Policy:
    """Records what it is told; chooses the widths that it is given."""

    def __init__(self, widths: list[int]) -> None:
        self.widths, self.told, self.may_be = widths, [], []
        self.prefills, self.of_draft, self.longest = [], [], []
        self.requests, self.budgets, self.chains, self.most_trees = Requests(BLOCK, 16), [16, 48], False, 1
        self.metrics = SimpleNamespace(changes=0, last_change="load", over_width_1=1.5, over_block=2.0)

    def prefill(self, tokens: int) -> None:
        self.prefills.append(tokens)

    def admit(self, slots: np.ndarray, most: list[int], least: list[int]) -> None:
        self.told.append(("admit", slots.tolist(), most, least))

    def choose(self, slots: np.ndarray, context: int, ragged: bool, trees: bool, longest: int) -> Any:
        self.longest.append(longest)
        self.told.append(("choose", slots.tolist(), context))
        self.may_be.append((ragged, trees))
        number, budget = len(self.may_be), 48 if ragged else None
        width = self.widths.pop(0)
        decision = Decision(width, budget) if isinstance(width, int) else Decision(BLOCK, None, width.nodes)
        return SimpleNamespace(number=number, slots=slots, decision=decision)

    def verified(self, step: Any, accepted: list[int], seconds: float | None = None, *of_draft: Any) -> None:
        self.told.append(("verified", accepted, seconds, step.number))
        self.of_draft.append([None if of is None else of.tolist() for of in of_draft])

    def leave_out(self, why: str) -> None:
        self.told.append(("left out", why))


class Widths(list):
    """The widths that were put to use."""

    def __init__(self) -> None:
        self.ragged: list[bool] = []

    def use(self, shape: Shape) -> None:
        if shape.nodes is not None:
            self.append(f"tree {shape.nodes}")
            return
        self.append(shape.width)
        self.ragged.append(shape.budget is not None)

    def use_widest(self) -> None:
        self.append("widest")


class Clock:
    """Of a device: `ends` says when what is launched next will end."""

    ends = 100.0

    def mark(self) -> float:
        return self.ends

    def seconds(self, start: float, end: float) -> float:
        return end - start


def adaptive(widths: list[Any], limits: list[Any] | None = None) -> tuple[Any, Policy, Clock]:
    from dflash_sglang.width.controller import WidthController

    policy, clock, used = Policy(widths), Clock(), Widths()
    limits = [] if limits is None else limits

    def limit(slots: np.ndarray, most: np.ndarray) -> None:
        limits.append((slots.tolist(), most.tolist()))

    counts, causes = Counts(BLOCK, ragged=True, chooses=True), SimpleNamespace(context_tokens=0)
    observer: Any = Observer(counts, Alarm(BLOCK), causes, lambda: 1.5)
    made = WidthController(policy, used, limit, clock, observer)
    made.used, made.observer = used, observer
    return made, policy, clock


class Req:
    """What SGLang's has of proposals, and of a request that it counts no step of."""

    def __init__(self, retracted: bool = False, ended: bool = False) -> None:
        self.spec_num_cap_tokens, self.is_retracted = 0, retracted
        self.finished_reason = "length" if ended else None


def decoding(*slots: int, context: int = 0) -> Any:
    rows = torch.tensor(slots, dtype=torch.int64)
    return SimpleNamespace(
        reqs=[Req() for _ in slots],
        req_pool_indices_cpu=rows,
        seq_lens_sum=None,  # where attention takes lengths from the GPU
        spec_info=SimpleNamespace(committed_sum=context),
    )


def prefilled(asked: dict[int, Any], decoded: tuple[int, ...] = ()) -> Any:
    """A batch that prefills the requests in these slots, with what each has in its custom_params, and decodes
    others."""
    reqs = [
        SimpleNamespace(to_finish=None, sampling_params=SimpleNamespace(custom_params=params))
        for params in (*asked.values(), *[None] * len(decoded))
    ]
    rows = torch.tensor([*asked, *decoded], dtype=torch.int64)
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices_cpu=rows,
        decoding_reqs=reqs[len(asked) :] or None,
        extend_lens=[10] * len(asked) + [1] * len(decoded),
    )


def launched(logprobs: Any = None, lens: Any = None, mass: Any = None, promised: Any = None) -> Any:
    of_draft = dict(logprobs=logprobs, verified_lens=lens, mass=mass, promised=promised)
    return SimpleNamespace(**of_draft, num_correct_drafts_per_req_cpu=None)


def launch(widths: Any, batch: Any, *of_draft: Any) -> Any:
    widths.next(batch)
    result = launched(*of_draft)
    widths.returned(result)
    return result


def come_back(widths: Any, result: Any, accepted: list[int]) -> None:
    result.num_correct_drafts_per_req_cpu = accepted  # as SGLang does
    widths.verified(accepted)


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own_if_a_request_of_that_waited() -> None:
    widths, policy, clock = adaptive([16, 8, 8, 4, 4, 4, 2])
    results = []
    for ends in (101.0, 103.0, 104.5):
        clock.ends = ends
        results.append(launch(widths, decoding(1, 2)))
    come_back(widths, results.pop(0), [3, 0])
    widths.prefill(prefilled({}))  # the host is busy with it when the steps before end
    clock.ends = 110.0
    for _ in range(2):
        results.append(launch(widths, decoding(1, 2)))
        come_back(widths, results.pop(0), [1, 1])
        clock.ends += 2.0
    widths.prefill(prefilled({2: None, 3: None}))
    clock.ends = 120.0
    results.append(launch(widths, decoding(1, 2, 3)))  # 1 has waited
    widths.prefill(prefilled({5: None}))
    clock.ends = 300.0  # the others have ended, the server had nothing to do
    results.append(launch(widths, decoding(5)))
    for result in results:
        come_back(widths, result, [0] * (2 if result in results[:2] else 3 if result is results[2] else 1))
    assert [told[2] for told in policy.told if told[0] == "verified"] == [None, 2.0, 1.5, 5.5, 2.0, 8.0, None]
    assert widths.used == [16, 8, 8, "widest", 4, 4, "widest", 4, "widest", 2]
    assert policy.prefills == [0, 20, 10]


def test_requests_are_told_of_the_proposals_that_were_verified() -> None:
    widths, policy, _ = adaptive([1, 8, 8, Kind(BLOCK, nodes=32)])
    slots = (1, 2, 3, 4)
    policy.requests.admit(np.array(slots), 0, [BLOCK, BLOCK, BLOCK, 3])
    batch = decoding(*slots)
    batch.reqs = reqs = [Req(), Req(retracted=True), Req(ended=True), Req()]
    told = []
    for lens in (None, None, [5, 2, 2, 5], None):
        result = launch(widths, batch, None, None if lens is None else torch.tensor(lens))
        batch.reqs = [*reqs]  # SGLang makes new lists, too
        come_back(widths, result, [0] * 4)
        told.append([req.spec_num_cap_tokens for req in reqs])
    assert told == [[-15, 0, 0, -15], [-23, 0, 0, -28], [-34, 0, 0, -41], [-34, 0, 0, -54]]


def test_requests_that_another_server_has_prefilled_are_no_interruption() -> None:
    """What a step takes after they arrive is known, unless the server had nothing to do before."""
    widths, policy, clock = adaptive([16, 8, 8, 4])
    results = []
    for ends, slots in ((101.0, (1,)), (103.0, (1, 2)), (300.0, (5,))):
        clock.ends = ends
        widths.admit(prefilled({slots[-1]: {"dflash": {"max_width": 3}}}))
        results.append((launch(widths, decoding(*slots)), len(slots)))
    for result, requests in results:
        come_back(widths, result, [0] * requests)
    assert [told[2] for told in policy.told if told[0] == "verified"] == [None, 2.0, None]
    assert policy.prefills == [] and widths.used == [16, 8, 8]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mark_stands_where_the_device_was_whenever_the_host_asks_for_it(device: str) -> None:
    from dflash_sglang.verify.step_clock import StepClock

    clock = StepClock(device)
    start = clock.mark()
    torch.cuda._sleep(40_000_000) if device == "cuda" else time.sleep(0.02)  # at 2 GHz as long
    end = clock.mark()
    time.sleep(0.3)
    assert 0.01 < clock.seconds(start, end) < 0.2
    assert 0.2 < clock.seconds(end, clock.mark()) < 2.0


def test_blocks_are_verified_in_part_where_the_policy_says_so_and_the_batch_lets_it() -> None:
    widths, policy, _ = adaptive([8, 8, 4])
    excluded = Excluded(), Excluded(ragged="reported", trees="reported"), Excluded(trees="adjusted")
    decisions = [widths.next(decoding(1), of) for of in excluded]
    assert policy.may_be == [(True, True), (False, False), (True, False)]
    assert [decision.verify_budget for decision in decisions] == [48, None, 48]
    assert widths.used.ragged == [True, False, True]


def test_a_tree_is_put_to_use_and_what_its_nodes_weigh_comes_with_its_result() -> None:
    widths, policy, _ = adaptive([Kind(BLOCK, nodes=32), 8])
    mass = torch.tensor([[0.0, -0.5, -1.0]])
    results = [launch(widths, decoding(1), torch.tensor([[-0.5]]), None, mass), launch(widths, decoding(1))]
    assert widths.used == ["tree 32", 8]
    for result in results:
        come_back(widths, result, [1])
    assert policy.of_draft == [[[[-0.5]], None, [[0.0, -0.5, -1.0]], None], [None] * 4]


def test_a_step_may_verify_long_chains_where_all_are_greedy_and_none_needs_blocks_and_tells_what_they_promised():
    widths, policy, _ = adaptive([8] * 4)
    policy.chains = True
    batch = decoding(1)
    for copies, chain in ((None, 64), (None, 0), ("sampled", 64)):
        batch.spec_info.chain = chain
        widths.next(batch, Excluded(copies=copies))
    assert policy.longest == [64, 0, 0]
    come_back(widths, launch(widths, batch, None, None, None, torch.tensor([0.5])), [1])
    assert policy.of_draft[-1][-1] == [0.5]
    totals = widths.observer.counts.totals()
    assert totals.accepted[0] == 1 and not totals.accepted_drafts.any(), "a copy is none of the draft's proposals"


def test_what_the_draft_thought_of_its_proposals_comes_with_the_result_of_their_step() -> None:
    widths, policy, _ = adaptive([8, 8, 4, 4])
    of_draft = [([[-0.5, -1.0]], [2]), ([[-0.25, 0.0]], None), (None, None)]
    tensors = [[None if of is None else torch.tensor(of) for of in both] for both in of_draft]
    results = [launch(widths, decoding(1), *both) for both in tensors]
    for result in results:
        come_back(widths, result, [1])
    assert policy.of_draft == [[*of, None, None] for of in of_draft]


def test_the_observer_is_told_of_each_step_with_what_its_requests_could_commit() -> None:
    """Requests' slots are given away before the result comes back."""
    widths, policy, _ = adaptive([8, 4, 8, 1])
    policy.requests.admit(np.array([1, 2]), 0, max_widths=[BLOCK, 3])
    results = [launch(widths, decoding(1, 2, context=70))]
    for slots, excluded in (((1, 2), Excluded("reported", "reported")), ((2,), Excluded(trees="pool_full"))):
        widths.next(decoding(*slots, context=80), excluded)
        widths.returned(launched())
        results.append(widths._launched[-1].result)
    results.append(launch(widths, decoding(2, context=9)))
    policy.requests.admit(np.array([1, 2]), 3)
    for result, accepted in zip(results, ([6, 2], [0, 1], [0], [0]), strict=True):
        come_back(widths, result, accepted)
    told = widths.observer.snapshot()
    assert told["verified"] == [5, 5, 2] + [1] * 4 + [0] * 8  # 3 rows of the request that allows no more
    assert told["accepted"] == [3, 2] + [1] * 4 + [0] * 9
    whole = {"chosen": 1, "reported": 1, "pool_full": 1}
    assert told["shapes"] == {"whole": whole, "plain": {"chosen": 1}}
    assert widths.observer._causes.context_tokens == 239


def test_a_step_of_other_ranks_has_no_result_to_wait_for() -> None:
    widths, policy, _ = adaptive([8, 8, 8])
    widths.next(decoding())
    result = launch(widths, decoding(5, context=70))
    widths.next(decoding())
    come_back(widths, result, [7])
    assert [told[:2] for told in policy.told] == [
        ("choose", []),
        ("verified", []),
        ("choose", [5]),
        ("choose", []),
        ("verified", []),
        ("verified", [7]),
    ]
    assert policy.told[2] == ("choose", [5], 70)


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
    assert [told for told in policy.told if told[0] != "choose"] == [
        ("verified", [], None, 3),
        ("verified", [1, 1], None, 1),
        ("left out", "a step came back before the one that was launched before it"),
        ("verified", [3, 3], None, 4),  # it follows a step without requests
        ("left out", "a result of 2 requests that no step waits for"),
        ("left out", "a result of 2 requests that no step waits for"),
        ("verified", [0, 0], 3.0, 5),
    ]


def test_steps_that_never_come_back_are_forgotten_and_those_after_them_are_timed() -> None:
    from dflash_sglang.width.controller import MOST_IN_FLIGHT

    widths, policy, clock = adaptive([8] * 3 * MOST_IN_FLIGHT)
    for step in range(3 * MOST_IN_FLIGHT):
        clock.ends = 100.0 + step
        result = launch(widths, decoding(1))
    lost = ("left out", f"{MOST_IN_FLIGHT} steps were launched and none came back")
    assert len(widths._launched) == MOST_IN_FLIGHT and policy.told.count(lost) == 2 * MOST_IN_FLIGHT
    come_back(widths, result, [2])
    assert policy.told[-1] == ("verified", [2], 1.0, 3 * MOST_IN_FLIGHT) and not widths._launched


def test_prefilled_requests_take_their_slots_with_what_they_ask_for_and_decoded_ones_keep_theirs() -> None:
    limits: list[Any] = []
    widths, policy, _ = adaptive([], limits=limits)
    wide, one = {"min_width": 2**70, "max_width": 2**70}, {"min_width": 2, "max_width": 3}
    batch = prefilled({4: None, 9: {"dflash": one}, 2: {"dflash": wide}, 7: {"other": 1}}, decoded=(1, 6))
    widths.prefill(batch)
    assert policy.told == [("admit", [4, 9, 2, 7], [BLOCK, 3, BLOCK, BLOCK], [1, 2, BLOCK, 1])]
    assert policy.prefills == [42]
    assert limits == [([4, 9, 2, 7], [BLOCK, 3, BLOCK, BLOCK])]
    batch.reqs[1].to_finish, batch.reqs[1].sampling_params.custom_params = "refused", {"dflash": 3}
    widths.prefill(batch)
    assert limits[1][1] == [BLOCK] * 4


def test_a_rank_without_requests_counts_the_prefills_of_others() -> None:
    widths, policy, _ = adaptive([16])
    widths.prefill(prefilled({}))
    assert policy.prefills == [0] and policy.told == []
    widths.next(decoding())
    assert policy.prefills == [0]


def test_changes_are_logged_once_in_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_sglang.width import controller as module

    caplog.set_level("INFO")
    widths, policy, _ = adaptive([16, 8, 4, 2])
    for now, changes in ((0.0, 0), (1.0, 1), (5.0, 2), (11.5, 3)):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda now=now: now))
        policy.metrics.changes = changes
        widths.next(decoding(1))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(";")[0] for line in lines] == [
        "dflash_sglang verify width: ragged 8 at 1 requests (load",
        "dflash_sglang verify width: ragged 2 at 1 requests (load",
    ]
    assert "2 changes since the last line" in lines[1] and "1.50 of those at width 1, 2.00 of" in lines[1]


@pytest.mark.parametrize(
    "asked, message",
    [
        (3, r"dflash=3: expected \{\"min_width\": N, .*\"copy\": false\}, one or more of them, and nothing else"),
        ({"width": 3}, "expected"),
        ({}, r"dflash=\{\}: expected"),
        ({"min_width": 5, "max_width": 4}, r"min_width=5: expected at most max_width=4. Lower it, or raise"),
        ({"max_width": 3, "other": 1}, "and nothing else"),
        *(
            ({name: value}, rf"{name}=.*: expected a whole number from 1")
            for name in ("min_width", "max_width")
            for value in (0, "4", 2.5, None, True)
        ),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_what_was_expected(asked: Any, message: str) -> None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params={"dflash": asked}),
        token_indices_to_pool=None,
        return_sampling_mask=False,
    )
    with pytest.raises(RequestError, match=message):
        width_bounds(request.sampling_params.custom_params)
    assert "custom_params dflash" in validate_dflash_request(lambda *_: None, request, True)
    assert validate_dflash_request(lambda *_: "SGLang's", request, True) == "SGLang's"


@pytest.mark.parametrize(
    "settings, allowed, refused",
    [
        ({}, [(1, None), (None, 1), (1, 4), (None, 2**70)], [(2, None), (2**70, None), (4, 4)]),
        ({"highest_min_width": 8}, [(8, None), (8, 8), (None, 1)], [(9, None), (16, 16)]),
        ({"lowest_max_width": 8}, [(None, 8), (1, 9)], [(None, 7), (1, 1)]),
        ({"highest_min_width": 4, "lowest_max_width": 4}, [(4, 4)], [(3, 3), (5, 5)]),
    ],
)
def test_a_request_widens_or_narrows_steps_as_far_as_the_operator_allows(
    settings: dict[str, int], allowed: list[Any], refused: list[Any]
) -> None:
    def answer(least: int | None, most: int | None) -> str | None:
        bounds = {name: width for name, width in (("min_width", least), ("max_width", most)) if width is not None}
        request = SimpleNamespace(
            sampling_params=SimpleNamespace(custom_params={"dflash": bounds}),
            token_indices_to_pool=None,
            return_sampling_mask=False,
        )
        return request_error(request, WidthConfig.from_mapping(settings))

    assert [answer(*bounds) for bounds in allowed] == [None] * len(allowed)
    for bounds in refused:
        message = answer(*bounds)
        assert message is not None and "DFLASH_SGLANG_CONFIG" in message
        assert any(f'{setting} of "width"' in message for setting in ("highest_min_width", "lowest_max_width"))


def test_the_bounds_of_what_requests_ask_for_are_settings_that_are_checked() -> None:
    for key in ("highest_min_width", "lowest_max_width"):
        for value in (0, "4", 1.5, True, None):
            with pytest.raises(PluginConfigError, match=rf"width: {key}=.*: expected a whole number from 1 on"):
                WidthConfig.from_mapping({key: value})


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, [[["y" * 99] * 99] * 99] * 99, {str(n): {"z" * 99: n} for n in range(10**4)}, 10**4000],
    ids=["string", "lists", "objects", "number"],
)
def test_an_error_does_not_repeat_what_a_client_sent_at_any_length(value: Any) -> None:
    assert len(shown(value)) <= LONGEST
    for asked in (value, {"min_width": [value]}, {"x" * 10**6: 1}, {"min_width": 10**4000, "max_width": 3}):
        with pytest.raises(RequestError) as refused:
            width_bounds({"dflash": asked, "other": value})
        assert len(str(refused.value)) < 400 and "expected" in str(refused.value)


def test_a_request_that_sglang_would_answer_wrongly_is_refused_by_field() -> None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=None),
        token_indices_to_pool=[3],
        return_sampling_mask=True,
        session=SimpleNamespace(streaming=True),
    )
    refused = request_error(request, WidthConfig())
    assert refused is not None and refused.startswith("score_extraction_token: expected none with DFLASH")
    request.token_indices_to_pool = None
    refused = request_error(request, WidthConfig())
    assert refused is not None and refused.startswith("return_sampling_mask: expected no streaming session")
    request.session.streaming = False
    assert request_error(request, WidthConfig()) is None
    request.session = None
    assert request_error(request, WidthConfig()) is None


@pytest.mark.parametrize(
    "what",
    [
        "attention",
        "loads",
        "nodes",
        "positions",
        "experts",
        "padding",
        "xqa",
        "recurrent",
        "pair",
        None,
        "memory",
        "fixed",
    ],
)
def test_one_width_for_all_requests_where_another_each_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str | None
) -> None:
    from dflash_sglang.width import startup

    caplog.set_level("INFO")
    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    runner = SimpleNamespace(
        attn_backend=SimpleNamespace(
            supports_ragged_verify_graph=what not in ("attention", "pair"), is_xqa_impl=what == "xqa"
        ),
        model_config=SimpleNamespace(model_is_mrope=what == "positions"),
        server_args=SimpleNamespace(
            enable_return_routed_experts=what == "experts",
            disable_cuda_graph_padding=what == "padding",
            enable_return_indexer_topk=False,
            nnodes=2 if what == "nodes" else 1,
        ),
    )
    if what == "recurrent":
        runner.attn_backend.linear_attn_backend = object()
    if what == "pair":  # SGLang's, of which one verifies
        parts = SimpleNamespace(supports_ragged_verify_graph=True)
        runner.attn_backend._select_backend = lambda mode: parts if mode.is_target_verify() else None
    group = Group(gather=(lambda row: row) if what == "loads" else None)
    config, added = WidthConfig(fixed=8 if what == "fixed" else None), []
    parts = startup.can_be_ragged(config, runner, group)
    assert parts == (what in (None, "memory", "pair"))
    widths = SimpleNamespace(
        add_while_free=lambda *_: {1: 1.5}, add_ragged=lambda: added.append("parts"), add=added.append
    )
    free = 3.4 if what == "memory" else 3.6
    startup.add_widths(config, widths, BLOCK, lambda: free, parts)
    assert added == {None: ["parts"], "pair": ["parts"], "fixed": [8]}.get(what, [])
    said = "not ragged: " in caplog.text
    assert said == (what not in (None, "pair", "fixed"))
    of_rows = "SimpleNamespace verifies as many rows of each request; fa3 does not have to"
    assert (of_rows in caplog.text) == (what in ("attention", "xqa", "recurrent"))


def test_sglangs_triton_attention_has_as_many_rows_of_each_request() -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from dflash_sglang.attention.verifying import verifies_parts

    assert not verifies_parts(object.__new__(TritonAttnBackend))


def test_what_is_left_out_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_sglang.width import startup

    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=1))

    def served(took: list[int]) -> Any:
        widths = SimpleNamespace(add_while_free=lambda *_: dict.fromkeys(took, 0.5))
        return startup.add_widths(WidthConfig(memory_reserve=1.0), widths, BLOCK, lambda: 0.0)

    assert served([1, 4]) == WidthConfig(widths=(1, 4, 16), memory_reserve=1.0)
    assert served([1]).states(BLOCK) == (1, 16)


class FlashInferKernel:
    pass


def left_of(
    config: WidthConfig, monkeypatch: pytest.MonkeyPatch, wrong: Sequence[int], group: Group = ALONE, rank: int = 0
) -> tuple[WidthConfig, list[tuple[int, ...]], list[int]]:
    """What is served on a rank whose kernel misplaces states at the widths `wrong`; which steps it rehearsed, as
    (requests, context, width); and which widths it dropped."""
    from dflash_sglang.warmup.dummy_batches import Rehearsal
    from dflash_sglang.width import startup

    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=rank))
    monkeypatch.setattr(startup, "mambaish_config", lambda config: config)
    monkeypatch.setattr(startup, "keeps_apart", lambda width, requests, step: step() or width not in wrong)
    rehearsed: list[tuple[int, ...]] = []
    dropped: list[int] = []
    states: Any = SimpleNamespace(recurrent=lambda width: width, drop=dropped.extend)
    linear = SimpleNamespace(kernel_dispatcher=SimpleNamespace(verify_kernel=FlashInferKernel()))
    runner: Any = SimpleNamespace(
        model_config="gated delta nets",
        req_to_token_pool=SimpleNamespace(size=48),
        attn_backend=SimpleNamespace(linear_attn_backend=linear),
    )
    rehearsal = create_autospec(Rehearsal, instance=True)
    rehearsal.seconds.side_effect = lambda n, context, shape: rehearsed.append((n, context, shape.width))
    served = startup.without_misplaced_states(config, states, runner, rehearsal, group, BLOCK)
    return served, rehearsed, dropped


@pytest.mark.parametrize(
    "wrong, served", [((), (1, 4, 8, 16)), ((4, 8), (1, 16)), ((1, 4, 8), (16,)), ((16,), None), ((8, 16), None)]
)
def test_widths_whose_recurrent_states_lie_elsewhere_are_left_out_with_the_kernels_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Any, served: Any
) -> None:
    from dflash_sglang.startup.facts import StartupError

    config = WidthConfig(widths=(4, 8, 16))
    if served is None:
        with pytest.raises(StartupError, match="linear-attention kernel='FlashInferKernel': .* at widths "):
            left_of(config, monkeypatch, wrong)
        return
    left, rehearsed, dropped = left_of(config, monkeypatch, wrong)
    assert left.states(BLOCK) == served
    assert rehearsed == [(2, 1, width) for width in (1, 4, 8, 16)]
    assert dropped == list(wrong)
    if wrong:
        assert f"left out {list(wrong)}: at these, FlashInferKernel does not keep the states" in caplog.text
        with pytest.raises(StartupError, match="FlashInferKernel"):
            left_of(WidthConfig(fixed=wrong[0]), monkeypatch, wrong)
    block = WidthConfig(fixed="block")
    assert left_of(block, monkeypatch, wrong) == (block, [], [])


@pytest.mark.parametrize("found", [[(), (4, 8)], [(4, 8), ()], [(8,), (4, 16)]])
def test_ranks_leave_out_the_widths_at_which_rank_0_finds_recurrent_states_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: list[tuple[int, ...]]
) -> None:
    told: list[np.ndarray] = []

    def broadcast(row: np.ndarray) -> np.ndarray:
        told.append(row)
        return told[0]

    for rank, wrong in enumerate(found):
        group = Group(rank == 0, broadcast)
        left, rehearsed, dropped = left_of(WidthConfig(widths=(4, 8, 16)), monkeypatch, wrong, group, rank)
        assert left.states(BLOCK) == tuple(width for width in (1, 4, 8, 16) if width not in found[0])
        assert len(rehearsed) == 4 and dropped == list(found[0])
    assert len(told) == len(found)
    assert caplog.text.count("left out") == bool(found[0])


@pytest.mark.parametrize("what", ["recurrent", "adapters", "deterministic", "padding", "hooks"])
def test_a_launch_that_has_one_width_is_served_at_the_blocks_and_refuses_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    from dflash_sglang.startup.facts import StartupError
    from dflash_sglang.width import startup

    caplog.set_level("INFO")
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=what == "deterministic"))
    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(startup, "mambaish_config", lambda config: config)
    monkeypatch.setattr(startup, "get_exec", lambda: exec_)
    observed = SimpleNamespace(forward_hooks=[{}] if what == "hooks" else None)
    monkeypatch.setattr(startup, "get_observability", lambda: observed)
    runner = SimpleNamespace(
        model_config="KDA" if what == "recurrent" else None,
        attn_backend=SimpleNamespace(linear_attn_backend=SimpleNamespace(accept_lens_pool="handed on")),
        lora_manager="adapters" if what == "adapters" else None,
        server_args=SimpleNamespace(disable_cuda_graph_padding=what == "padding"),
    )
    assert startup.servable(WidthConfig(), runner, BLOCK).states(BLOCK) == (BLOCK,)
    assert "always the block's, 16: " in caplog.text
    for same in (WidthConfig(fixed="block"), WidthConfig(fixed=BLOCK)):
        assert startup.servable(same, runner, BLOCK) is same
    for other in (WidthConfig(fixed=8), WidthConfig(widths=(4, 8))):
        if what == "padding":  # they have graphs of all batches, or were asked for
            assert startup.servable(other, runner, BLOCK) is other
            continue
        with pytest.raises(StartupError, match="DFLASH_SGLANG_CONFIG width=.*expected 'block' alone"):
            startup.servable(other, runner, BLOCK)
    runner.model_config = runner.lora_manager = exec_.deterministic.enable_deterministic_inference = None
    runner.server_args.disable_cuda_graph_padding = observed.forward_hooks = None
    assert startup.servable(WidthConfig(), runner, BLOCK) == WidthConfig()
