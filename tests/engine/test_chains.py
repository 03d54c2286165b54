"""Steps that verify up to 64 rows of a request, a block and more of its copy: output equals plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.copies import Texts
from dflash_sglang.demo.server import Server
from tests.engine import test_lossless as lossless
from tests.engine.test_copies import TARGET, copying
from tests.support import scheduler_hooks
from tests.support.engines import RETRACTING, ask_at_once, serve
from tests.support.rows import in_full_but

pytestmark = pytest.mark.slow

CONTEXT = 512
NEW_TOKENS = 150
TO_END = 1000  # cut by the context
LENGTHS = (64, 127, 300)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "wherever_they_can": dict(hooks="oracle,always chains,sentinels"),
    "recorded_graphs_of_random_shapes": dict(
        graphs=True, hooks="oracle,widths,shares,trees,chains", settings={"width": {"trees": [8, 32]}}
    ),
    "synchronous_pages_of_16_chunked_retracting": dict(
        page_size=16,
        disable_overlap_schedule=True,
        chunked_prefill_size=64,
        hooks="oracle,chains,poison",
        environment=RETRACTING,
    ),
}
CORE = "synchronous_pages_of_16_chunked_retracting"


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Prompts with their greedy outputs, one of them to the end of the context."""
    prompts = [prompt for prompt in lossless.prompts() if len(prompt) in LENGTHS]
    with serve(TARGET, disable_overlap_schedule=True, context_length=CONTEXT, allow_auto_truncate=True) as server:
        outputs = [server.generate(**lossless.request(prompt, max_new_tokens=NEW_TOKENS)) for prompt in prompts]
        at_end = server.generate(**lossless.request(prompts[-1], max_new_tokens=TO_END))
    return dict(prompts=prompts, outputs=[one["output_ids"] for one in outputs], at_end=at_end)


def asked(plain: dict[str, Any]) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests, and what they should get: whole outputs, limits and stop tokens at every offset of two chains."""
    out: list[tuple[dict[str, Any], list[int]]] = []
    for prompt, output in zip(plain["prompts"], plain["outputs"], strict=True):
        out.append((lossless.request(prompt, max_new_tokens=NEW_TOKENS), output))
    prompt, output = plain["prompts"][0], plain["outputs"][0]
    out += [(lossless.request(prompt, max_new_tokens=n), output[:n]) for n in range(15, 132, 3)]
    for k in range(130):
        if output.index(output[k]) == k:
            sampling = dict(max_new_tokens=NEW_TOKENS, stop_token_ids=[output[k]], ignore_eos=False)
            out.append((lossless.request(prompt, **sampling), output[: k + 1]))
    at_end = plain["at_end"]["output_ids"]
    out += [(lossless.request(plain["prompts"][-1], max_new_tokens=TO_END), at_end)] * 2
    return out


def state(server: Server) -> dict[str, Any]:
    (found,) = server.get("/server_info")["internal_states"]
    return found


def chains_of(server: Server) -> int:
    return sum(state(server)["dflash_acceptance"]["shapes"].get("copy", {}).values())


@pytest.fixture(
    scope="module",
    params=in_full_but(CONFIGURATIONS, CORE, release=CONFIGURATIONS.keys() - {CORE}),
)
def ours(request, plain, tmp_path_factory) -> Iterator[tuple[Server, str]]:
    directory, flags = tmp_path_factory.mktemp(request.param), dict(CONFIGURATIONS[request.param])
    outputs = [*plain["outputs"][:-1], plain["at_end"]["output_ids"]]
    for prompt, output in zip(plain["prompts"], outputs, strict=True):
        scheduler_hooks.record(directory, prompt, output)
    flags["settings"] = {"copy": 64, "width": {}, **flags.get("settings", {})}
    flags |= dict(context_length=CONTEXT, allow_auto_truncate=True, max_total_tokens=6400)
    with copying(directory, **flags) as server:
        yield server, request.param


def test_outputs_equal_plain_decoding_wherever_a_long_chain_ends(ours, plain):
    server, name = ours
    requests, expected = zip(*asked(plain), strict=True)
    for at_once in (1, 2, 4, 7):
        answers = ask_at_once(server, requests, at_once)
        for one, answer, output in zip(requests, answers, expected, strict=True):
            assert answer["output_ids"] == output, one["sampling_params"]
    found = state(server)
    assert chains_of(server) > 60, found["dflash_acceptance"]["shapes"]
    accepted = found["dflash_acceptance"]["accepted"]
    assert len(accepted) == 63 and accepted[-1] > 20, accepted
    if "retracting" in name:
        assert "Testing retraction" in server.log_text()


def test_only_greedy_requests_whose_logits_are_as_they_are_and_that_allow_it_get_long_chains(ours, plain):
    server, name = ours
    prompt, output = plain["prompts"][0], plain["outputs"][0]
    before = chains_of(server)
    for sampling in (
        dict(temperature=0.9),
        dict(frequency_penalty=0.1),
        dict(logit_bias={"7": -1}),
        dict(custom_params={"dflash": {"max_width": 16}}),
    ):
        server.generate(**lossless.request(prompt, max_new_tokens=60, **sampling))
    server.generate(**lossless.request(prompt, max_new_tokens=60), return_logprob=True)
    assert chains_of(server) == before
    for most in (33, 64):
        limit = dict(custom_params={"dflash": {"max_width": most}})
        asked = [lossless.request(prompt, max_new_tokens=NEW_TOKENS, **limit)] * 3
        answers = ask_at_once(server, asked, 3)  # in threes chains of 32 rows
        assert [answer["output_ids"] for answer in answers] == [output] * 3
        assert all(len(output) <= most * (answer["meta_info"]["spec_verify_ct"] + 1) for answer in answers)
    assert chains_of(server) > before


def test_what_is_copied_beyond_blocks_is_counted_and_comes_true_in_the_texts_of_the_bench(tmp_path):
    """The gate is the server's own."""
    texts = Texts(("rewrite",), 300, NEW_TOKENS + 80, range(40, 250))
    texts.write(tmp_path / "texts.npz", "alike")
    settings = {"copy": 64, "width": {}}
    forced = {"DFLASH_SGLANG_FORCED": json.dumps({"texts": str(tmp_path / "texts.npz")})}
    reported = dict(enable_metrics=True, decode_log_interval=1)
    with copying(tmp_path, graphs=True, settings=settings, environment=forced, **reported) as server:
        prompts = texts.prompts["rewrite"][:12]
        for prompt in prompts:
            sampling = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            answer = server.generate(input_ids=prompt, sampling_params=sampling)
            text = texts.tokens[prompt[0]][len(prompt) :]
            assert answer["output_ids"][1:] == text[1:NEW_TOKENS]  # the first is the target's own
        found = state(server)
        copies, acceptance = found["dflash_copy"], found["dflash_acceptance"]
        assert copies["proposed"] > copies["beyond_block"] > 300, copies
        assert acceptance["shapes"]["copy"]["chosen"] > 10, acceptance["shapes"]
        assert acceptance["accepted"][31] > 3, acceptance["accepted"]
        assert found["dflash_width"]["shapes"]["copy 64"] >= acceptance["shapes"]["copy"]["chosen"]
        metrics = server.text("/metrics")
        assert 'form="copy"' in metrics and 'position="63"' in metrics
        assert "copy: 64" in server.log_text()
        assert "copies beyond blocks: 64 rows up to 2 requests, 32 rows up to 4 requests" in server.log_text()


@pytest.mark.full
def test_two_ranks_verify_the_same_chains(plain, tmp_path):
    for prompt, output in zip(plain["prompts"], plain["outputs"], strict=True):
        scheduler_hooks.record(tmp_path, prompt, output)
    flags = dict(tp_size=2, mem_fraction_static=0.2, max_total_tokens=6000, settings={"copy": 64, "width": {}})
    with copying(tmp_path, hooks="oracle,copies,chains", **flags) as server:
        for prompt, output in zip(plain["prompts"], plain["outputs"], strict=True):
            for n in (NEW_TOKENS, 70):
                answer = server.generate(**lossless.request(prompt, max_new_tokens=n))
                assert answer["output_ids"] == output[:n]
        assert chains_of(server) > 10
    first, second = ((tmp_path / f"copies.{rank}.jsonl").read_text() for rank in range(2))
    assert first.count("\n") > 20 and first == second
