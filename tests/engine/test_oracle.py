"""Output equals plain decoding, token for token, in float32 on the CPU, whatever steps verify: C15, C18 and C19.

A server without speculation answers every request of `plain` once, then each set-up of ours: one by one, all at
once, on a warm prefix cache, beside an aborted request, and with an oracle that drives accept lengths through
their whole range. Two set-ups draw the shape of each step: blocks of any width, ragged rows, trees, copied text
and chains of up to 64 rows. Hooks watch the pools meanwhile. Recorded graphs (C7) are those of `recorded_graphs`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_width_serving import DRAFT, TARGET, WIDTHS, told
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import RETRACTING, accepted_proposals, ask_at_once, serve
from training.pair import held_out_prompts

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 127, 300, 700)
NEW_TOKENS, LONG = 60, 150
BLOCK, CONTEXT = 16, 1024
TO_END = 2000  # cut by the context
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SHAPES: dict[str, Any] = {"copy": 64, "width": {"trees": [8, 16, 32, 64], "highest_min_width": 16}}
DRAWN = "widths,shares,trees,copies,chains"


class SetUp(NamedTuple):
    hooks: str = ""
    settings: dict[str, Any] = {}
    graphs: bool = False
    environment: dict[str, str] = {}
    flags: dict[str, Any] = {}


SET_UPS = {
    "overlap": SetUp(),
    "random_shapes_in_graphs": SetUp(
        f"{DRAWN},shapes,sentinels", SHAPES, graphs=True, flags=dict(max_total_tokens=6400)
    ),
    "random_shapes_synchronous_chunked_retracting": SetUp(
        f"{DRAWN},poison",
        SHAPES,
        environment=RETRACTING,
        flags=dict(page_size=16, disable_overlap_schedule=True, chunked_prefill_size=64),
    ),
    "pages_of_64_mixed_chunks_lengths_on_the_host": SetUp(
        "host_lengths,sentinels",
        flags=dict(page_size=64, chunked_prefill_size=128, enable_mixed_chunk=True, max_total_tokens=6400),
    ),
    "long_chains_wherever_they_can": SetUp(
        "always chains,sentinels", {"copy": 64, "width": {}}, flags=dict(max_total_tokens=6400)
    ),
}
OVERLAP, IN_GRAPHS, RETRACTED, MIXED, CHAINS = SET_UPS
CORE = (OVERLAP, IN_GRAPHS)


class Plain(NamedTuple):
    asked: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    outputs: dict[int, list[int]]  # greedy ones of `LONG` tokens, or to the context's end, by the prompt's length

    def part(self, *part: slice) -> Plain:
        """The first requests, one of each length, or others."""
        asked, answers = ([one for of in part for one in every[of]] for every in (self.asked, self.answers))
        return Plain(asked, answers, self.outputs)


class Ours(NamedTuple):
    server: Server
    records: Path
    name: str

    @property
    def fixed(self) -> bool:
        """Whether each step has the block's width."""
        return "width" not in SET_UPS[self.name].settings

    def acceptance(self) -> dict[str, Any]:
        (state,) = self.server.get("/server_info")["internal_states"]
        return state["dflash_acceptance"]

    def chains(self) -> int:
        return sum(self.acceptance()["shapes"].get("copy", {}).values())

    @contextmanager
    def oracle(self, known: Iterable[tuple[list[int] | str, list[int]]]) -> Iterator[None]:
        """It proposes these outputs after their prompts, or of their rids, and nothing afterwards."""
        for of, output in known:
            scheduler_hooks.record(self.records, of, output)
        yield
        scheduler_hooks.forget(self.records)


def rows(*names: str) -> Any:
    """Parameters of `ours`: these set-ups, of which `make test` runs those of the core."""
    marks = {name: () if name in CORE else (pytest.mark.full,) for name in names}
    return [pytest.param(name, id=name, marks=of) for name, of in marks.items()]


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ours", rows(*names), indirect=True)


def prompts() -> dict[int, list[int]]:
    """Prompts of 1 to 700 tokens, cut from held-out text, by their lengths."""
    text = "\n".join(held_out_prompts())
    ids = AutoTokenizer.from_pretrained(TARGET, model_max_length=1_000_000).encode(text, add_special_tokens=False)
    return {length: ids[1000 * i : 1000 * i + length] for i, length in enumerate(LENGTHS)}


def repeating() -> list[list[int]]:
    """Prompts that end with the beginning of a text that they have already."""
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[start : start + 250] + b"\n\n" + text[start : start + 60]) for start in range(0, 6000, 900)]


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    defaults = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return dict(input_ids=prompt, sampling_params={**defaults, **sampling})


def requests(outputs: dict[int, list[int]]) -> list[dict[str, Any]]:
    """What every server is asked; the first ones are a prompt of each length. `outputs`: as of `Plain`."""
    of = prompts()
    asked = [request(prompt) for prompt in of.values()]
    asked += [request(of[64], max_new_tokens=n) for n in (1, 2, 3)]
    following = outputs[64]
    first_seen = [k for k in range(2 * BLOCK) if following.index(following[k]) == k]
    asked += [request(of[64], stop_token_ids=[following[k]]) for k in first_seen]
    text = bytes(i for i in outputs[300] if i < 256).decode(errors="replace")
    asked += [request(of[300], stop=[text[k : k + 2]]) for k in (3, 9, 16, 20)]
    asked.append(request(of[127], ignore_eos=False, max_new_tokens=200))
    # With a stop string that never comes, and in the run of tokens that ends the grammar's text.
    stops: list[dict[str, Any]] = [{}, {"stop": ["zzz"]}, {"stop": ["wx"]}, {"stop": ["xy", "gh"]}]
    asked += [request(of[33], regex="(ab|cd){4,9}!", ignore_eos=False, **stop) for stop in stops[:2]]
    asked += [request(of[17], regex=ALPHABET, ignore_eos=False, **stop) for stop in stops]
    schema = '{"type":"object","properties":{"a":{"type":"integer"}}}'
    asked.append(request(of[33], json_schema=schema, ignore_eos=False))
    asked.append(request(of[64], logit_bias={str(following[0]): -100, str(following[5]): -3}))
    asked.append(dict(request(of[64]), return_logprob=True, top_logprobs_num=3))
    asked.append(request(of[17], frequency_penalty=0.6, presence_penalty=0.3))
    asked.append(request(of[127], repetition_penalty=1.3, min_new_tokens=30))
    asked += [request(text) for text in repeating()]
    asked += [request(text, frequency_penalty=2) for text in repeating()[:4]]
    return [dict(one, rid=f"asked {number}") for number, one in enumerate(asked)]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Without overlap: there, penalties lag one token."""
    flags = dict(skip_tokenizer_init=None, disable_overlap_schedule=True)
    with serve(TARGET, context_length=CONTEXT, allow_auto_truncate=True, **flags) as server:
        whole = [
            request(prompt, max_new_tokens=TO_END if length == 700 else LONG)
            for length, prompt in prompts().items()
        ]
        outputs = [answer["output_ids"] for answer in ask_at_once(server, whole)]
        of_length = dict(zip(LENGTHS, outputs, strict=True))
        asked = requests(of_length)
        return Plain(asked, ask_at_once(server, asked), of_length)


@pytest.fixture(scope="module", params=rows(*SET_UPS))
def ours(request, tmp_path_factory) -> Iterator[Ours]:
    """Our server of one set-up; the oracle is silent at first."""
    records, set_up = tmp_path_factory.mktemp("records"), SET_UPS[request.param]
    hooked = recorded_graphs.recording if set_up.graphs else scheduler_hooks.hooked
    config = {CONFIG_ENV: json.dumps(set_up.settings)}
    environment = hooked(records, f"oracle,{set_up.hooks}", **config, **set_up.environment)
    flags = dict(skip_tokenizer_init=None, context_length=CONTEXT, allow_auto_truncate=True, **set_up.flags)
    with serve(TARGET, DRAFT, environment=environment, **flags) as server:
        yield Ours(server, records, request.param)
        print(server.log_tail(60))  # shown with a failure
        if set_up.environment:
            assert "Testing retraction" in server.log_text()
        if set_up.graphs:
            assert_replayed(recorded_graphs.replays(records))


def assert_replayed(replays: list[recorded_graphs.Replay]) -> None:
    """Decode steps ran in graphs, with and without padding rows; those of ragged rows are the target's, for a
    number of tokens."""
    for role, more in (("draft", set[int]()), ("target", {2 * BLOCK, 4 * BLOCK, 8 * BLOCK})):
        own = [replay for replay in replays if replay.role == role]
        captured = {replay.captured for replay in own}
        assert len(own) > 100 and captured >= {*recorded_graphs.SIZES, *more}, (role, captured)
        assert {replay.captured > replay.requests for replay in own} == {True, False}


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """What a user sees of an answer; logprobs apart."""
    meta = answer["meta_info"]
    seen = {"ids": answer["output_ids"], "text": answer["text"]}
    return seen | {"finish": meta["finish_reason"], "completion_tokens": meta["completion_tokens"]}


def assert_equal(answers: list[dict[str, Any]], plain: Plain) -> None:
    for asked, got, expected in zip(plain.asked, answers, plain.answers, strict=True):
        assert essence(got) == essence(expected), asked["sampling_params"]
        for field in ("output_token_logprobs", "output_top_logprobs"):
            if field in expected["meta_info"]:
                assert logprob_values(got, field) == pytest.approx(logprob_values(expected, field), abs=1e-3)


def logprob_values(answer: dict[str, Any], field: str) -> list[float]:
    """(logprob, id, ...) triples, or lists of them, as one list of numbers."""
    values = answer["meta_info"][field]
    triples = [t for entry in values for t in (entry if isinstance(entry[0], list) else [entry])]
    return [number for triple in triples for number in triple[:2]]


def known(plain: Plain) -> list[tuple[str, list[int]]]:
    """(rid, what follows its prompt) of each request: of one that ends early, what another one goes on with."""
    found = []
    for asked, answer in zip(plain.asked, plain.answers, strict=True):
        output, of_prompt = answer["output_ids"], list[list[int]]()
        for other, of_other in zip(plain.asked, plain.answers, strict=True):
            if other["input_ids"] == asked["input_ids"] and of_other["output_ids"][: len(output)] == output:
                of_prompt.append(of_other["output_ids"])
        found.append((asked["rid"], max(of_prompt, key=len)))
    return found


def test_outputs_equal_plain_decoding_one_by_one_cold_and_warm(ours, plain):
    ours.server.post("/flush_cache?timeout=60")
    n = len(LENGTHS)
    thorough = ours.name in (OVERLAP, RETRACTED)
    some = plain.part(slice(n), slice(n, None, 5)) if thorough else plain.part(slice(0, n, 3))
    cold = [ours.server.generate(**one) for one in some.asked]
    assert_equal(cold, some)
    if thorough:
        assert_equal([ours.server.generate(**one) for one in some.asked], some)
    # Proposals are the draft's: a row of NaN among the keys that it reads would leave none accepted.
    whole = cold[:n] if thorough else cold
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in whole)
    assert sum(len(answer["output_ids"]) - 1 for answer in whole) >= (3 if ours.fixed else 1.4) * steps


@on(OVERLAP, MIXED)
def test_acceptance_after_a_prefix_hit_is_the_cold_runs(ours):
    """The next turn of a conversation: rows that verify wrote serve as well as rows that prefill writes."""
    prompt = prompts()[700]
    ours.server.post("/flush_cache?timeout=60")
    answer = ours.server.generate(**request(prompt, max_new_tokens=200))
    turn = request(prompt + answer["output_ids"], max_new_tokens=100)
    after_hit = ours.server.generate(**turn)
    ours.server.post("/flush_cache?timeout=60")
    cold = ours.server.generate(**turn)
    assert after_hit["meta_info"]["cached_tokens"] >= 832 > cold["meta_info"]["cached_tokens"]
    assert after_hit["output_ids"] == cold["output_ids"]
    assert after_hit["meta_info"]["spec_verify_ct"] == cold["meta_info"]["spec_verify_ct"]


def test_outputs_equal_plain_decoding_in_a_batch(ours, plain):
    assert_equal(ask_at_once(ours.server, plain.asked), plain)
    if "copies" in SET_UPS[ours.name].hooks:
        (state,) = ours.server.get("/server_info")["internal_states"]
        counts = state["dflash_copy"]
        assert counts["request_steps"] > 80 and counts["proposed"] > counts["accepted"] > 100, counts


def test_outputs_equal_plain_decoding_at_every_accept_length(ours, plain):
    accepted: Counter[int] = Counter()
    with ours.oracle(known(plain)):
        for _ in range(1 if ours.fixed else 4):  # steps of random shapes take long paths less often
            answers = ask_at_once(ours.server, plain.asked)
            assert_equal(answers, plain)
            accepted += accepted_proposals(answers)
            if len(accepted) >= 12:
                break
    assert len(accepted) >= 12, accepted


def test_an_aborted_neighbour_leaves_the_others_unharmed(ours, plain):
    neighbour = dict(request(prompts()[64], max_new_tokens=900), rid="neighbour")

    def abort_when_it_runs() -> list[dict[str, Any]]:
        events = ours.server.stream(**neighbour)
        first = next(events)
        ours.server.post("/abort_request", rid="neighbour")
        return [first, *events]

    of_each_length = plain.part(slice(len(LENGTHS)))
    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(abort_when_it_runs)
        assert_equal(ask_at_once(ours.server, of_each_length.asked), of_each_length)
        events = aborted.result()
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1]["meta_info"]["completion_tokens"] < 900


@on(IN_GRAPHS, RETRACTED)
def test_penalties_act_on_the_run_of_tokens_that_ragged_rows_accept(ours, plain):
    """Of two requests at once, with strong penalties on text that repeats itself."""
    before = ours.acceptance()["shapes"]
    penalised = plain.part(slice(-4, -2)), plain.part(slice(-2, None))
    for pair in 4 * penalised:
        with ours.oracle(known(pair)):
            answers = ask_at_once(ours.server, pair.asked)
        assert_equal(answers, pair)
        assert max(accepted_proposals(answers)) > 1
    assert sum(ours.acceptance()["shapes"]["ragged"].values()) > sum(before["ragged"].values()) + 10


@on(IN_GRAPHS)
def test_steps_have_every_form(ours):
    """Of six requests, so many at once; trees and chains are the wider the fewer they are. Which widths and sizes
    are drawn is up to chance."""
    before = told(ours.server)["shapes"]
    for at_once in (6, 4, 2):
        asked = [request(text, max_new_tokens=150) for text in repeating()[:6]]
        ask_at_once(ours.server, asked, at_once)
    forms: Counter[str] = Counter()
    for shape, count in told(ours.server)["shapes"].items():
        forms[shape.rpartition(" ")[0]] += count - before[shape]
    assert forms.keys() == {"", "ragged", "tree", "copy"} and min(forms.values()) > 5, forms


@on(IN_GRAPHS)
def test_requests_that_ask_for_a_width_get_blocks_of_it_in_every_step(ours, plain):
    asks = {(1, 1): {1}, (4, 4): {4}, (16, 16): {16}, (9, 16): {12, 16}, (2, 16): {*WIDTHS} - {1}}
    for (least, most), widths in asks.items():
        before = told(ours.server)["shapes"]
        limits = dict(custom_params={"dflash": {"min_width": least, "max_width": most}})
        asked = [request(prompt, **limits) for prompt in prompts().values()]
        answers = ask_at_once(ours.server, asked)
        assert_equal(answers, plain.part(slice(len(LENGTHS))))
        used = {shape for shape, count in told(ours.server)["shapes"].items() if count > before[shape]}
        assert used and used <= {str(width) for width in widths}, (least, most)


@on(IN_GRAPHS)
def test_ragged_steps_give_a_requests_limit_away_to_others(ours, plain):
    """A request has more rows than it allows only where all others have a whole block."""
    limits, free = {"limited 3": 3, "limited 15": 15}, ("free 1", "free 2")
    texts = dict(zip((*limits, *free), (33, 64, 127, 300), strict=True))
    asked = [dict(request(prompts()[length], max_new_tokens=LONG), rid=rid) for rid, length in texts.items()]
    for one in asked[:2]:
        one["sampling_params"]["custom_params"] = {"dflash": {"max_width": limits[one["rid"]]}}
    together: list[tuple[int, dict[str, int]]] = []
    with ours.oracle((rid, plain.outputs[length]) for rid, length in texts.items()):
        for _ in range(40):  # which steps are ragged is up to chance
            for one, answer in zip(asked, ask_at_once(ours.server, asked), strict=True):
                assert answer["output_ids"] == plain.outputs[texts[one["rid"]]]
            steps = [step for step in scheduler_hooks.noted(ours.records, "shapes.0.jsonl") if step[0] == "ragged"]
            together = [
                (block, lens) for *_, block, lens in steps if lens.keys() & limits and lens.keys() & {*free}
            ]
            if len(together) > 5:
                break
    assert len(together) > 5
    for block, lens in together:
        beyond = [rid for rid in lens.keys() & limits if lens[rid] > limits[rid]]
        assert not beyond or {lens[rid] for rid in lens.keys() & {*free}} == {block}, lens


@on(MIXED)
def test_a_grammar_in_mixed_batches_knows_the_tokens_of_the_step_in_flight(ours):
    """Each place of the text allows one token: a mask that is a step late allows another one."""
    draws = random.Random(0)
    text = "".join(draws.choices("0123456789abcdef", k=100))
    prefills = [request(draws.choices(range(32, 127), k=700), max_new_tokens=1) for _ in range(3)]
    events = ours.server.stream(**request(prompts()[1], regex=text, ignore_eos=False, max_new_tokens=150))
    next(events)
    with ThreadPoolExecutor(1) as pool:
        others = pool.map(lambda one: ours.server.generate(**one), prefills)
        *_, answer = events
        assert len(list(others)) == len(prefills)
    assert answer["text"] == text
    meta = answer["meta_info"]
    by_verifies = meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
    assert meta["completion_tokens"] - 1 > by_verifies, "no token came from a mixed batch"


def ends(plain: Plain) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests, and what they get: whole outputs, limits and stop tokens at every offset of two chains."""
    of, outputs = prompts(), plain.outputs
    found = [(request(of[n], max_new_tokens=LONG), outputs[n]) for n in (64, 127, 300)]
    output = outputs[64]
    found += [(request(of[64], max_new_tokens=n), output[:n]) for n in range(15, 132, 3)]
    for k in range(130):
        if output.index(output[k]) == k:
            stop = dict(max_new_tokens=LONG, stop_token_ids=[output[k]], ignore_eos=False)
            found.append((request(of[64], **stop), output[: k + 1]))
    return found + [(request(of[700], max_new_tokens=TO_END), outputs[700])] * 2


@on(IN_GRAPHS, RETRACTED, CHAINS)
def test_outputs_equal_plain_decoding_wherever_a_long_chain_ends(ours, plain):
    before = ours.chains()
    with ours.oracle((prompts()[n], plain.outputs[n]) for n in (64, 127, 300, 700)):
        for at_once in (1, 2, 4, 7):
            some = ends(plain)[at_once % 4 :: 4] + ends(plain)[-2:]
            answers = ask_at_once(ours.server, [one for one, _ in some], at_once)
            for (one, output), answer in zip(some, answers, strict=True):
                assert answer["output_ids"] == output, one["sampling_params"]
    acceptance = ours.acceptance()
    assert ours.chains() > before + 20, acceptance["shapes"]
    assert len(acceptance["accepted"]) == 63 and acceptance["accepted"][-1] > 5, acceptance["accepted"]
    if ours.name != CHAINS:
        assert acceptance["shapes"]["whole"]["context_end"] > 0, acceptance["shapes"]


@on(CHAINS)
def test_only_greedy_requests_whose_logits_are_as_they_are_and_that_allow_it_get_long_chains(ours, plain):
    prompt, output = prompts()[64], plain.outputs[64]
    before = ours.chains()
    for sampling in (
        dict(temperature=0.9),
        dict(frequency_penalty=0.1),
        dict(logit_bias={"7": -1}),
        dict(custom_params={"dflash": {"max_width": 16}}),
    ):
        ours.server.generate(**request(prompt, **sampling))
    ours.server.generate(**request(prompt), return_logprob=True)
    assert ours.chains() == before
    for most in (33, 64):
        limit = dict(custom_params={"dflash": {"max_width": most}})
        asked = [request(prompt, max_new_tokens=LONG, **limit)] * 3
        answers = ask_at_once(ours.server, asked, 3)  # in threes chains of 32 rows
        assert [answer["output_ids"] for answer in answers] == [output] * 3
        assert all(len(output) <= most * (answer["meta_info"]["spec_verify_ct"] + 1) for answer in answers)
    assert ours.chains() > before
