"""Targets with gated delta nets, Mamba2 or short convolutions: output through our worker equals plain decoding's,
float32 on the CPU, while every step has another width.

The target's states remember hundreds of tokens (`tests.zoo.recurrent`): a state of a rejected row, or one that the
prefix cache keeps at the wrong place, shows in what follows. The reference keeps no prefixes at all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_sampled_serving import assert_sampled_from, distribution
from tests.support import scheduler_hooks
from tests.support.engines import RETRACTING, accepted_proposals, ask_at_once, serve
from tests.zoo import ZOO, recurrent
from tests.zoo.member import BLOCK, pair

TARGET = "Qwen3.5"
WIDTHS = (1, 2, 3, 5, 8)
GRID = 64  # tokens between the states that the prefix cache keeps
LENGTHS = (1, 7, 64, 65, 130, 300)
NEW_TOKENS = 100
KEPT: dict[str, Any] = dict(linear_attn_verify_backend="flashinfer")  # on a CPU: SGLang's verify without replay
SAMPLED_PROMPT = [40, 41, 42, 43]
# By kind, schedule, pages, chunks, retraction, and where states are kept: pairs of them, not every one with each.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "overlap": dict(),
    "kept_states_lazy_pages_of_16_chunked": dict(
        **KEPT, page_size=16, chunked_prefill_size=128, mamba_radix_cache_strategy="extra_buffer_lazy"
    ),
    "synchronous_pages_of_64_retracting": dict(disable_overlap_schedule=True, page_size=64, env=RETRACTING),
    "nemotron_h_chunked_retracting": dict(target="Nemotron-H", chunked_prefill_size=128, env=RETRACTING),
    # Without buffers, as SGLang serves short convolutions, the prefix cache keeps a state wherever a prefix ends.
    "lfm2_chunked_retracting": dict(target="LFM2", chunked_prefill_size=128, env=RETRACTING),
}

Answered = tuple[dict[str, Any], list[int]]

pytestmark = pytest.mark.slow


def request(ids: list[int], **sampling: Any) -> dict[str, Any]:
    defaults = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return dict(input_ids=ids, sampling_params={**defaults, **sampling})


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(5, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def first_turns() -> list[dict[str, Any]]:
    return [request(random_ids(length, seed=length)) for length in LENGTHS]


def stopped_turns(answered: list[Answered]) -> list[dict[str, Any]]:
    """The first turns, ended inside of a block by a token of their output."""
    stops = [output[NEW_TOKENS // 2 + i] for i, (_, output) in enumerate(answered)]
    return [
        request(turn["input_ids"], stop_token_ids=[stop], ignore_eos=False)
        for (turn, _), stop in zip(answered, stops, strict=True)
    ]


def next_turns(answered: list[Answered]) -> list[dict[str, Any]]:
    """What follows the first turns: a question after the whole output, and another one after a part of it."""
    turns = []
    for i, (turn, output) in enumerate(answered):
        turns.append(request(turn["input_ids"] + output + random_ids(9, seed=i)))
        turns.append(request(turn["input_ids"] + output[: NEW_TOKENS * 3 // 4] + random_ids(5, seed=100 + i)))
    return turns


@functools.cache
def plain_answers(target: str) -> list[Answered]:
    """Every request with the ids that plain decoding gives: first turns that stop, that do not, next turns."""
    with serve(pair(target)[0], disable_radix_cache=True, **ZOO[target].arguments) as server:

        def answers(turns: list[dict[str, Any]]) -> list[Answered]:
            return [(turn, one["output_ids"]) for turn, one in zip(turns, ask_at_once(server, turns), strict=True)]

        answered = answers(first_turns())
        return answers(stopped_turns(answered)) + answered + answers(next_turns(answered))


def recorded(directory: Path, plain: list[Answered]) -> Path:
    """The directory, with what the oracle proposes: whole outputs of plain decoding."""
    for asked, output in plain:
        if "stop_token_ids" not in asked["sampling_params"]:
            scheduler_hooks.record(directory, asked["input_ids"], output)
    return directory


class Ours(NamedTuple):
    server: Server
    records: Path  # of the hooks
    plain: list[Answered]


def target_of(name: str) -> str:
    return CONFIGURATIONS[name].get("target", TARGET)


def rows(*names: str) -> list[ParameterSet]:
    """Servers of these configurations, marked as rows of the support matrix; the first one is of `make test`."""
    return [
        pytest.param(
            name,
            id=name,
            marks=[
                *([pytest.mark.full] if name != "overlap" else []),
                pytest.mark.matrix(
                    target=CONFIGURATIONS[name].get("target", TARGET),
                    draft="z-lab",
                    kv="model dtype",
                    outcome="works",
                ),
            ],
        )
        for name in names
    ]


@pytest.fixture(scope="module", params=rows(*CONFIGURATIONS))
def ours(request, tmp_path_factory) -> Iterator[Ours]:
    """Our server of one configuration, with an oracle that accepts anything from none to the whole block."""
    arguments = dict(CONFIGURATIONS[request.param])
    target = arguments.pop("target", TARGET)
    plain = plain_answers(target)
    records = recorded(tmp_path_factory.mktemp("records"), plain)
    config = {CONFIG_ENV: json.dumps({"width": {"widths": WIDTHS}})}
    environment = scheduler_hooks.hooked(records, "oracle,widths,states", **config, **arguments.pop("env", {}))
    arguments = {"mamba_track_interval": GRID, **ZOO[target].arguments, **arguments}
    with serve(*pair(target), environment=environment, **arguments) as server:
        yield Ours(server, records, plain)
        print(server.log_tail(40))  # shown with a failure
        if request.param.endswith("retracting"):
            assert "Testing retraction" in server.log_text()
        replays = "linear_attn_verify_backend" not in arguments and target == TARGET
        assert ("accepted rows are replayed" in server.log_text()) is replays
        (state,) = server.get("/server_info")["internal_states"]
        steps = {int(width): count for width, count in state["dflash_width"]["steps"].items()}
        assert set(steps) == set(WIDTHS) and all(steps.values()), steps


def ask_turns(server: Server, plain: list[Answered]) -> list[dict[str, Any]]:
    """First turns that stop one by one, then whole ones and after these the next turns, some at a time."""
    asked = [turn for turn, _ in plain]
    answers = [server.generate(**turn) for turn in asked[: len(LENGTHS)]]
    for turns in (asked[len(LENGTHS) : 2 * len(LENGTHS)], asked[2 * len(LENGTHS) :]):
        answers += ask_at_once(server, turns, len(LENGTHS))
    return answers


def assert_equal(answers: list[dict[str, Any]], plain: list[Answered]) -> None:
    for answer, (asked, output) in zip(answers, plain, strict=True):
        about = (len(asked["input_ids"]), asked["sampling_params"], answer["meta_info"]["cached_tokens"])
        assert answer["output_ids"] == output, about


def assert_every_number_was_accepted(answers: list[dict[str, Any]]) -> None:
    """Steps accepted none of their proposals, one, ..., all of a block."""
    assert set(accepted := accepted_proposals(answers)) >= set(range(BLOCK)), accepted


def test_turns_of_a_conversation_equal_plain_decoding_cold_and_on_states_that_verify_wrote(ours, request):
    server, _, plain = ours
    server.post("/flush_cache?timeout=60")
    answers = ask_turns(server, plain)
    assert_equal(answers, plain)
    assert all(len(output) < NEW_TOKENS for _, output in plain[: len(LENGTHS)])
    assert_every_number_was_accepted(answers)
    # The next turn goes on from a state that a verify wrote.
    name = request.node.callspec.id
    grid = ZOO[target_of(name)].prefix_grid
    for length, answer in zip(LENGTHS, answers[2 * len(LENGTHS) :: 2], strict=True):
        cached = answer["meta_info"]["cached_tokens"]
        assert cached >= (length + NEW_TOKENS - 1) // grid * grid


@pytest.mark.parametrize(
    "ours", rows("overlap", "nemotron_h_chunked_retracting", "lfm2_chunked_retracting"), indirect=True
)
def test_outputs_equal_plain_decoding_in_a_batch_with_sampled_and_aborted_neighbours(ours):
    """A sampled neighbour sends the whole batch through rejection sampling."""
    server, _, plain = ours
    server.post("/flush_cache?timeout=60")
    sampled = [request(random_ids(40, seed=i), temperature=1.0) for i in range(3)]
    for _ in ("cold", "warm"):
        with ThreadPoolExecutor(1) as pool:
            aborted = pool.submit(abort_when_it_runs, server)
            answers = ask_at_once(server, [asked for asked, _ in plain] + sampled)
            assert aborted.result() == "abort"
        assert_equal(answers[: len(plain)], plain)


def abort_when_it_runs(server: Server) -> str:
    """Why the request ended."""
    events = server.stream(**request(random_ids(70, seed=70), max_new_tokens=3500), rid="aborted")
    event = next(events)
    server.post("/abort_request", rid="aborted")
    for later in events:  # none, where the abort came into the first one
        event = later
    return event["meta_info"]["finish_reason"]["type"]


@pytest.mark.parametrize("ours", rows("overlap", "kept_states_lazy_pages_of_16_chunked"), indirect=True)
def test_committed_states_equal_those_of_plain_decoding(ours):
    """A prefill on a CPU moves states on token by token, as plain decoding does; its states are those of the same
    tokens."""
    server, records, plain = ours
    server.post("/flush_cache?timeout=60")
    first = plain[len(LENGTHS) : 2 * len(LENGTHS)]
    asked = [dict(turn, rid=f"states-{i}") for i, (turn, _) in enumerate(first)]
    assert_equal(ask_at_once(server, asked), first)
    for i, (turn, output) in enumerate(first):
        committed = scheduler_hooks.states_of(records, f"states-{i}")
        tokens = turn["input_ids"] + output
        lengths = sorted(length for length in committed if len(turn["input_ids"]) < length < len(tokens))
        assert len(lengths) > NEW_TOKENS // BLOCK
        for length in lengths[::10]:
            server.post("/flush_cache?timeout=60")
            server.generate(**request(tokens[:length], max_new_tokens=1), rid=f"states-{i}-{length}")
            prefilled = scheduler_hooks.states_of(records, f"states-{i}-{length}")[length]
            for got, expected in zip(committed[length], prefilled, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        far = (committed[lengths[0]][-1] - committed[lengths[1]][-1]).abs().max()
        assert far > 1e-2, "one state is like another"


@pytest.mark.full
@pytest.mark.parametrize("ours", rows("overlap"), indirect=True)
def test_sampled_tokens_follow_the_targets_distribution(ours):
    """Of four tokens the first follows a prefill, the fourth a state that a step of one row commits or of more.
    The distribution is that of prefills, which do not speculate."""
    server, records, _ = ours
    expected = distribution(server, SAMPLED_PROMPT, 4)
    scheduler_hooks.record(records, SAMPLED_PROMPT, list(max(expected, key=expected.__getitem__)))
    assert_sampled_from(server, SAMPLED_PROMPT, expected)


@pytest.mark.parametrize("ours", rows("overlap"), indirect=True)
def test_turns_of_sessions_equal_plain_decoding_also_where_a_turn_goes_back(ours):
    """Three turns each: the second goes on after the first's output, the third after a part of it."""
    server, _, plain = ours
    server.post("/flush_cache?timeout=60")
    first, following = plain[len(LENGTHS) : 2 * len(LENGTHS)], plain[2 * len(LENGTHS) :]
    sessions = list(zip(first, following[::2], following[1::2], strict=True))
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(lambda turns: converse(server, *turns), sessions))


def converse(server: Server, first: Answered, after_all: Answered, after_part: Answered) -> None:
    """Each of the later turns is asked by what it adds to the first one's tokens."""
    length = len(first[0]["input_ids"]) + NEW_TOKENS
    name = f"session-{length}"
    server.post("/open_session", capacity_of_str_len=4096, session_id=name)
    answers = [server.generate(**first[0], session_params=dict(id=name))]
    for (turn, _), kept in ((after_all, length), (after_part, length - NEW_TOKENS // 4)):
        added = dict(turn, input_ids=turn["input_ids"][kept:])
        back = dict(id=name, rid=answers[0]["meta_info"]["id"], offset=kept if kept < length else 0)
        answers.append(server.generate(**added, session_params=back))
    server.post("/close_session", session_id=name)
    assert_equal(answers, [first, after_all, after_part])


@pytest.mark.full
def test_a_kernel_whose_states_lie_at_another_distance_is_found_and_its_widths_left_out(tmp_path):
    target, draft = pair(TARGET)
    config = {CONFIG_ENV: json.dumps({"width": {"widths": [2, 4, BLOCK]}})}
    environment = scheduler_hooks.hooked(tmp_path, "misplaced", **config)
    with serve(target, draft, environment=environment, **KEPT) as server:
        log = server.log_text()
        assert "left out [1, 4]: at these, TritonGDNKernel does not keep the states of verified rows" in log
        turn, output = plain_answers(TARGET)[-1]
        assert [answer["output_ids"] for answer in ask_at_once(server, [turn] * 4)] == [output] * 4
        (state,) = server.get("/server_info")["internal_states"]
        assert set(state["dflash_width"]["steps"]) == {str(BLOCK)}


def test_the_states_of_the_zoo_remember():
    """What the tests above rest on: one other token long ago changes the output."""
    from tests.zoo.member import reference

    model = reference(TARGET)
    ids = torch.tensor([random_ids(200, seed=0)])
    other = ids.clone()
    other[0, 20] += 1
    with torch.no_grad():
        change = (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max()
    assert change > 1e-3
    assert recurrent.DELTA_NET["linear_conv_kernel_dim"] == 4
