"""Output through our worker equals plain decoding, token for token, in float32 on the CPU: C15, C18 and C19.

Every request of `requests()` goes to a server without speculation once, and then to each configuration of ours,
one by one, all at once, on a warm prefix cache, and with oracle proposals that drive accept lengths through
their whole range. Instruments of `scheduler_hooks` watch the pools meanwhile. Recorded graphs (C7) are captured
steps: `recorded_graphs`.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_width_serving import assert_all_shapes_are_drawn
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import RETRACTING, accepted_proposals, ask_at_once, serve
from tests.support.rows import in_full_but

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 64, 127, 300, 700)
NEW_TOKENS = 60
BLOCK = 16
TREES = '{"copy": "off", "width": {"trees": [8, 16, 32, 64]}}'
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "overlap": dict(),
    "lengths_on_the_host": dict(hooks="host_lengths"),
    "recorded_graphs_of_random_widths": dict(graphs=True, hooks="widths", env={CONFIG_ENV: '{"width": {}}'}),
    "synchronous_pages_of_16_of_random_shapes": dict(
        page_size=16,
        disable_overlap_schedule=True,
        max_total_tokens=6400,
        hooks="widths,shares,trees,sentinels",
        env={CONFIG_ENV: TREES},
    ),
    "recorded_graphs_of_random_shapes": dict(graphs=True, hooks="widths,shares,trees", env={CONFIG_ENV: TREES}),
    "recorded_graphs": dict(graphs=True, max_total_tokens=6400, hooks="sentinels"),
    "synchronous_pages_of_16_chunked": dict(
        page_size=16, disable_overlap_schedule=True, chunked_prefill_size=64, hooks="poison"
    ),
    "pages_of_64_mixed_chunks": dict(
        page_size=64,
        chunked_prefill_size=128,
        enable_mixed_chunk=True,
        max_total_tokens=6400,
        hooks="sentinels",
    ),
    "retracting": dict(hooks="poison", env=RETRACTING),
}
CORE = (
    "overlap",
    "recorded_graphs_of_random_widths",
    "recorded_graphs_of_random_shapes",
    "synchronous_pages_of_16_chunked",
)
RELEASE = ("lengths_on_the_host", "recorded_graphs")


def prompts() -> list[list[int]]:
    """Prompts of 1 to 700 tokens, cut from held-out text."""
    directory = pair_directories()["target"]
    text = "\n".join(held_out_prompts())
    ids = AutoTokenizer.from_pretrained(directory, model_max_length=1_000_000).encode(
        text, add_special_tokens=False
    )
    return [ids[1000 * i : 1000 * i + length] for i, length in enumerate(LENGTHS)]


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    defaults = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return dict(input_ids=prompt, sampling_params={**defaults, **sampling})


def requests(continuation: dict[int, list[int]]) -> list[dict[str, Any]]:
    """What is asked of every server. `continuation`: plain greedy output after a prompt, by its length.

    Lengths, a limit of 1 to 3 tokens, a stop token at every offset of a block, stop strings, EOS, grammars,
    logit bias, logprobs and penalties.
    """
    by_length = {len(prompt): prompt for prompt in prompts()}
    asked = [request(prompt) for prompt in by_length.values()]
    asked += [request(by_length[64], max_new_tokens=n) for n in (1, 2, 3)]
    following = continuation[64]
    first_seen = [k for k in range(2 * BLOCK) if following.index(following[k]) == k]
    asked += [request(by_length[64], stop_token_ids=[following[k]]) for k in first_seen]
    text = bytes(i for i in continuation[300] if i < 256).decode(errors="replace")
    asked += [request(by_length[300], stop=[text[k : k + 2]]) for k in (3, 9, 16, 20)]
    asked.append(request(by_length[127], ignore_eos=False, max_new_tokens=200))
    asked.append(request(by_length[33], regex="(ab|cd){4,9}!", ignore_eos=False))
    asked.append(
        request(
            by_length[33],
            json_schema='{"type":"object","properties":{"a":{"type":"integer"}}}',
            ignore_eos=False,
        )
    )
    asked.append(request(by_length[64], logit_bias={str(following[0]): -100, str(following[5]): -3}))
    asked.append(dict(request(by_length[64]), return_logprob=True, top_logprobs_num=3))
    asked.append(request(by_length[17], frequency_penalty=0.6, presence_penalty=0.3))
    asked.append(request(by_length[127], repetition_penalty=1.3, min_new_tokens=30))
    return asked


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """What a user sees of an answer; logprobs apart."""
    meta = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "text": answer["text"],
        "finish": meta["finish_reason"],
        "completion_tokens": meta["completion_tokens"],
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The requests and their answers without speculation (nor overlap: there, penalties lag one token)."""
    arguments = dict(skip_tokenizer_init=None, disable_overlap_schedule=True)
    with serve(Path(pair_directories()["target"]), **arguments) as server:
        whole = ask_at_once(server, [request(prompt) for prompt in prompts()])
        asked = requests({length: answer["output_ids"] for length, answer in zip(LENGTHS, whole, strict=True)})
        return {"asked": asked, "answers": ask_at_once(server, asked)}


@pytest.fixture(scope="module", params=in_full_but(CONFIGURATIONS, *CORE, release=RELEASE))
def ours(request, plain, tmp_path_factory) -> Any:
    """(server, directory of the oracle's records) of one configuration; the oracle is silent at first."""
    arguments = dict(CONFIGURATIONS[request.param])
    records, captured = tmp_path_factory.mktemp("records"), arguments.pop("graphs", False)
    hooked = recorded_graphs.recording if captured else scheduler_hooks.hooked
    hooks = f"oracle,{arguments.pop('hooks', '')}"
    environment = hooked(records, hooks, **arguments.pop("env", {}))
    pair = pair_directories()
    with serve(
        Path(pair["target"]),
        Path(pair["draft"]),
        environment=environment,
        skip_tokenizer_init=None,
        **arguments,
    ) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure
        if request.param == "retracting":
            assert "Testing retraction" in server.log_text()
        if captured:
            assert_replayed(recorded_graphs.replays(records), in_parts=request.param != "recorded_graphs")


def assert_replayed(replays: list[recorded_graphs.Replay], in_parts: bool) -> None:
    """Every decode step ran in graphs, with and without padding rows; those of blocks that are verified in part
    are the target's, for a number of tokens."""
    for role in ("draft", "target"):
        own = [replay for replay in replays if replay.role == role]
        sizes, tokens = set(recorded_graphs.SIZES), {2 * BLOCK, 4 * BLOCK, 8 * BLOCK}
        captured = {replay.captured for replay in own}
        if in_parts and role == "target":
            assert len(own) > 100 and captured >= sizes | tokens
        else:
            assert len(own) > 100 and captured == sizes
        assert {replay.captured > replay.requests for replay in own} == {True, False}


@pytest.fixture
def fixed_width(request) -> bool:
    return not request.node.callspec.params["ours"].endswith(("random_widths", "random_shapes"))


@pytest.fixture
def mixes_prefill_and_decode(request) -> bool:
    return "enable_mixed_chunk" in CONFIGURATIONS[request.node.callspec.params["ours"]]


@pytest.fixture
def thorough(request) -> bool:
    """Whether requests of every kind are asked one by one too, where a step takes no longer than it has to."""
    return request.node.callspec.params["ours"] in ("overlap", "synchronous_pages_of_16_chunked")


def assert_equal(answers: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for asked, got, expected in zip(plain["asked"], answers, plain["answers"], strict=True):
        assert essence(got) == essence(expected), asked["sampling_params"]
        for field in ("output_token_logprobs", "output_top_logprobs"):
            if field in expected["meta_info"]:
                assert logprob_values(got, field) == pytest.approx(logprob_values(expected, field), abs=1e-3)


def logprob_values(answer: dict[str, Any], field: str) -> list[float]:
    """(logprob, id, ...) triples, or lists of them, as one list of numbers."""
    values = answer["meta_info"][field]
    triples = [t for entry in values for t in (entry if isinstance(entry[0], list) else [entry])]
    return [number for triple in triples for number in triple[:2]]


def test_outputs_equal_plain_decoding_one_by_one_cold_and_warm(ours, plain, fixed_width, thorough):
    server, _ = ours
    server.post("/flush_cache?timeout=60")
    asked = every_third(plain) if thorough else plain_part(plain, len(LENGTHS), 3)
    cold = [server.generate(**one) for one in asked["asked"]]
    assert_equal(cold, asked)
    if thorough:
        assert_equal([server.generate(**one) for one in asked["asked"]], asked)
    # Proposals are the draft's: a row of NaN among the keys that it reads would leave none accepted.
    whole = cold[: len(LENGTHS)]
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in whole)
    assert sum(len(answer["output_ids"]) - 1 for answer in whole) >= (3 if fixed_width else 2) * steps


def test_acceptance_after_a_prefix_hit_is_the_cold_runs(ours, fixed_width):
    """The next turn of a conversation: rows that verify wrote serve as well as rows that prefill writes."""
    server, _ = ours
    prompt = prompts()[LENGTHS.index(700)]
    server.post("/flush_cache?timeout=60")
    answer = server.generate(**request(prompt, max_new_tokens=200))
    turn = request(prompt + answer["output_ids"], max_new_tokens=100)
    after_hit = server.generate(**turn)
    server.post("/flush_cache?timeout=60")
    cold = server.generate(**turn)
    assert after_hit["meta_info"]["cached_tokens"] >= 832 > cold["meta_info"]["cached_tokens"]
    assert after_hit["output_ids"] == cold["output_ids"]
    if fixed_width:
        assert after_hit["meta_info"]["spec_verify_ct"] == cold["meta_info"]["spec_verify_ct"]


def test_outputs_equal_plain_decoding_in_a_batch(ours, plain):
    server, _ = ours
    assert_equal(ask_at_once(server, plain["asked"]), plain)


def test_outputs_equal_plain_decoding_at_every_accept_length(ours, plain, fixed_width):
    server, records = ours
    for asked, answer in zip(plain["asked"], plain["answers"], strict=True):
        if (
            asked["sampling_params"]["max_new_tokens"] == NEW_TOKENS
            and answer["meta_info"]["completion_tokens"] == NEW_TOKENS
        ):
            scheduler_hooks.record(records, asked["input_ids"], answer["output_ids"])
    accepted: Counter[int] = Counter()
    for _ in range(1 if fixed_width else 4):  # steps of random shapes take long paths less often
        answers = ask_at_once(server, plain["asked"])
        assert_equal(answers, plain)
        accepted += accepted_proposals(answers)
        if len(accepted) >= 12:
            break
    scheduler_hooks.forget(records)
    assert len(accepted) >= 12, accepted


def test_a_grammar_in_mixed_batches_knows_the_tokens_of_the_step_in_flight(ours, mixes_prefill_and_decode):
    """Each place of the text allows one token: a mask that is a step late allows another one."""
    if not mixes_prefill_and_decode:
        pytest.skip("prefills and decodes in turn")
    server, _ = ours
    draws = random.Random(0)
    text = "".join(draws.choices("0123456789abcdef", k=100))
    prefills = [request(draws.choices(range(32, 127), k=700), max_new_tokens=1) for _ in range(3)]
    events = server.stream(**request(prompts()[0], regex=text, ignore_eos=False, max_new_tokens=150))
    next(events)
    with ThreadPoolExecutor(1) as pool:
        others = pool.map(lambda one: server.generate(**one), prefills)
        *_, answer = events
        assert len(list(others)) == len(prefills)
    assert answer["text"] == text
    meta = answer["meta_info"]
    by_verifies = meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
    assert meta["completion_tokens"] - 1 > by_verifies, "no token came from a mixed batch"


def test_steps_have_every_shape_where_it_is_drawn(request, ours):
    server, _ = ours
    if not request.node.callspec.params["ours"].endswith("random_shapes"):
        pytest.skip("chains")
    assert_all_shapes_are_drawn(server, prompts())


def test_an_aborted_neighbour_leaves_the_others_unharmed(ours, plain):
    server, _ = ours
    neighbour = dict(request(prompts()[-1], max_new_tokens=2000), rid="neighbour")

    def abort_when_it_runs() -> list[dict[str, Any]]:
        events = server.stream(**neighbour)
        first = next(events)
        server.post("/abort_request", rid="neighbour")
        return [first, *events]

    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(abort_when_it_runs)
        assert_equal(ask_at_once(server, plain["asked"][:11]), plain_part(plain, 11))
        events = aborted.result()
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1]["meta_info"]["completion_tokens"] < 2000


def every_third(plain: dict[str, Any]) -> dict[str, Any]:
    """All lengths, and of the other requests every third."""
    n = len(LENGTHS)
    return {key: value[:n] + value[n::3] for key, value in plain.items()}


def plain_part(plain: dict[str, Any], count: int, every: int = 1) -> dict[str, Any]:
    return {key: value[:count:every] for key, value in plain.items()}
