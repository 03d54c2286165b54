"""Prefill and decode on different servers, float32 on the CPU: output and verify steps are those of one server."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_request_fields as fields
from tests.engine.test_parallel import RANKS
from tests.engine.test_recurrent_serving import random_ids
from tests.gpu.test_lora import adapter
from tests.support import scheduler_hooks
from tests.support.disaggregated import Apart, Refused, answer_of, prefill_beside, serve_apart
from tests.support.engines import BUILT_IN_WORKER, RETRACTING, ask_at_once, greedy_params, kept, serve
from tests.support.family_drafts import dflash2_draft
from tests.support.kits import without_the_last_layer
from tests.zoo import ZOO, pair
from training.pair import held_out_prompts, pair_directories

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
NEW_TOKENS = 64
TEXT: dict[str, Any] = dict(skip_tokenizer_init=None, enable_custom_logit_processor=True)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def prompts(count: int = 8) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text) for text in held_out_prompts()[:count]]


def asked(**sampling: Any) -> list[dict[str, Any]]:
    params = greedy_params(NEW_TOKENS, **sampling)
    return [dict(input_ids=prompt, sampling_params=params) for prompt in prompts()]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def environment(records: Path) -> dict[str, str]:
    return scheduler_hooks.hooked(records, "seeds,context")


@pytest.fixture(scope="module")
def one(environment: dict[str, str]) -> Iterator[Server]:
    """A server that prefills and decodes."""
    with serve(TARGET, DRAFT, environment=environment, **TEXT) as server:
        yield server


@pytest.fixture(scope="module")
def apart(environment: dict[str, str], records: Path) -> Iterator[Apart]:
    with serve_apart(TARGET, DRAFT, records, environment=environment, **TEXT) as both:
        yield both


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], int]]:
    """Output and verify steps of one server's answers to `asked()`."""
    with kept(TARGET, DRAFT, environment={"DFLASH_SGLANG_REQUIRE": "1"}) as server:
        return [output_and_steps(server.generate(**request)) for request in asked()]


def output_and_steps(answer: dict[str, Any]) -> tuple[list[int], int]:
    return answer["output_ids"], answer["meta_info"]["spec_verify_ct"]


def test_output_and_verify_steps_are_those_of_one_server_and_the_prefill_server_only_prefills(
    expected, one, apart
):
    """Its log: no head for drafting, no tables of verification, no step; and no prefill on the decode server."""
    assert [output_and_steps(apart.ask(**request)) for request in asked()] == expected
    assert [output_and_steps(answer) for answer in apart.ask_all(asked())] == expected  # from the prefix cache
    assert not apart.wrote_elsewhere()
    prefill, decode = apart.prefill.log_text(), apart.decode.log_text()
    assert "  role: prefill" in prefill and "  role: decode" in decode and "  role:" not in one.log_text()
    for of_drafting in ("  head:", "  draft_attention:", " tables "):
        assert of_drafting not in prefill and of_drafting in decode
    assert "Prefill batch" in prefill and "Prefill batch" not in decode
    for server in (apart.prefill, apart.decode):
        assert server.get("/server_info")["internal_states"][0]["dflash_worker"].startswith("dflash_sglang ")


def test_every_row_of_the_drafts_context_arrives(one, apart, records):
    for server in (one, apart.prefill):  # rows are computed in the same forwards
        server.post("/flush_cache?timeout=60")
    for number, request in enumerate(asked()):
        one.generate(**request, rid=(here := f"context-one-{number}"))
        apart.ask(**request, rid=(there := f"context-{number}"))
        rows, arrived = (scheduler_hooks.context_of(records, rid) for rid in (here, there))
        assert rows.shape[:2] == (6, len(request["input_ids"]))
        torch.testing.assert_close(arrived, rows, rtol=0.0, atol=0.0)


FIELDS = (  # those that keep most between steps
    "min_new_tokens with stop_token_ids",
    "json_schema",
    "sampling_seed and penalties",
    "logprobs and penalties",
)
REFUSED: tuple[tuple[str, Any], ...] = (
    ("n", 2), ("bootstrap_room", -1), ("bootstrap_room", 0), ("bootstrap_room", [5]), ("bootstrap_host", []),
)  # fmt: skip


def test_fields_of_requests_act_as_on_one_server_and_both_refuse_what_would_end_one(one, apart):
    """Logprobs are compared where SGLang has them on a decode server: it has none of the prompt, and none of the
    first token for tokens that a client names."""

    def of_outputs(answer: dict[str, Any]) -> list[float]:
        reported = ("output_token_logprobs", "output_top_logprobs")
        return fields.numbers(dict(meta_info={key: answer["meta_info"].get(key) for key in reported}))

    for name in FIELDS:
        requests = fields.table()[name]
        alone, answers = [one.generate(**request) for request in requests], apart.ask_all(requests)
        assert not fields.differences({name: alone}, {name: answers})
        for got, wanted in zip(answers, alone, strict=True):
            assert of_outputs(got) == pytest.approx(of_outputs(wanted), abs=1e-3)
    narrow = asked(custom_params={"dflash": {"max_width": 3}})[0]
    answer = apart.ask(**narrow)
    assert output_and_steps(answer) == output_and_steps(one.generate(**narrow))
    assert len(answer["meta_info"]["spec_correct_drafts_histogram"]) <= 3
    for name, value in REFUSED:
        sent = {**asked()[0], **apart.room()}
        (sent["sampling_params"] if name == "n" else sent)[name] = value
        for server in (apart.prefill, apart.decode):
            refused = answer_of(server, **sent)
            assert isinstance(refused, Refused) and refused.status == 400
            assert f"{name}={value}: expected " in str(refused)


BARE: dict[str, Any] = dict(draft=None, environment={"DFLASH_SGLANG_REQUIRE": "0"})
ALIEN = "a prefill server without dflash_sglang: expected one that sends context KV of this server's draft. "
OTHER = " on the decode server: expected the same draft on both. "


@pytest.mark.parametrize("message", [ALIEN, OTHER], ids=["none", "weights"])
def test_a_decode_server_refuses_another_draft_by_name_and_stays_up(
    expected, apart, tmp_path, environment, message
):
    of_prefill = {**BARE, "environment": {**environment, **BARE["environment"]}}
    if message == OTHER:
        weights = load_file(DRAFT / "model.safetensors")
        weights["fc.weight"][0, 0] += 1.0
        save_file(weights, shutil.copytree(DRAFT, tmp_path / "draft") / "model.safetensors")
        of_prefill = dict(draft=tmp_path / "draft", environment=environment)
    with prefill_beside(apart, TARGET, **of_prefill) as mismatched:
        sent = {**asked()[0], **mismatched.room()}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(answer_of, mismatched.prefill, **sent)
            time.sleep(2)  # until the prefill server has it
            refused = answer_of(mismatched.decode, **sent)
            ended = waiting.result(60)  # SGLang's time-out is 300 s
        assert isinstance(refused, Refused) and refused.status == 500 and message in str(refused)
        assert isinstance(ended, Refused) and ended.status == 500
        mismatched.assert_idle()
    assert output_and_steps(apart.ask(**asked()[0])) == expected[0]


def test_a_prefill_server_refuses_a_decode_server_without_speculation_which_another_serves(expected, tmp_path):
    with serve_apart(TARGET, DRAFT, tmp_path, decode=BARE) as apart:
        refused, of_decode = apart.ask_both(**asked()[0])
        assert isinstance(refused, Refused) and refused.status == of_decode.status == 500
        assert "DFLASH: 10 KV buffers on the decode server, 16 on the prefill server" in str(refused)
        with prefill_beside(apart, TARGET, **BARE) as plain:
            assert [answer["output_ids"] for answer in plain.ask_all(asked())] == [ids for ids, _ in expected]
            assert not plain.wrote_elsewhere()


@pytest.mark.parametrize("prefill", [BARE, dict(environment=BUILT_IN_WORKER)], ids=["no draft", "built-in worker"])
def test_a_decode_server_that_takes_any_prefill_server_is_right_and_in_more_steps_without_context(
    tmp_path, prefill
):
    draft = DRAFT if prefill is BARE else without_the_last_layer(tmp_path / "draft")
    decode = dict(environment={CONFIG_ENV: '{"prefill": "any"}', "DFLASH_SGLANG_REQUIRE": "1"})
    with serve_apart(TARGET, draft, tmp_path, prefill=prefill, decode=decode) as apart:
        answers = [output_and_steps(answer) for answer in apart.ask_all(asked())]
        assert not apart.wrote_elsewhere()
    with serve(TARGET, draft, **decode) as one:
        alone = [output_and_steps(one.generate(**request)) for request in asked()]
    if prefill is BARE:
        assert [ids for ids, _ in answers] == [ids for ids, _ in alone]
        assert sum(steps for _, steps in answers) > 1.1 * sum(steps for _, steps in alone)
    else:
        assert answers == alone


def test_retracted_requests_and_their_adapters_act_as_on_one_server(expected, tmp_path, environment):
    """In another layout than above. The pool begins as NaN, and rows of a retracted request are others' before it
    goes on."""
    paths = [f"{name}={adapter(tmp_path / name, seed, 0.1)}" for seed, name in enumerate(("first", "second"))]
    flags: dict[str, Any] = dict(environment=environment, enable_lora=True, lora_paths=paths, **TEXT)
    flags |= dict(disable_overlap_schedule=True, page_size=16, chunked_prefill_size=64)
    names = (None, "first", "second", "first")
    requests = [dict(request, lora_path=name) for request, name in zip(asked(), 2 * names, strict=True)]
    with serve(TARGET, DRAFT, **flags) as adapted:
        outputs = [output_and_steps(adapted.generate(**request)) for request in requests]
    changed = [ids != plain for (ids, _), (plain, _) in zip(outputs, expected, strict=True)]
    assert changed == [name is not None for name in 2 * names]
    with serve_apart(TARGET, DRAFT, tmp_path, decode=dict(environment=RETRACTING), **flags) as apart:
        assert [output_and_steps(apart.ask(**request)) for request in requests] == outputs
        assert [output_and_steps(answer) for answer in apart.ask_all(requests)] == outputs
        assert "Testing retraction" in apart.decode.log_text()
        assert not apart.wrote_elsewhere()


# Targets and drafts, and flags of both servers, of the prefill and of the decode server.
Pairs = Callable[[Path], tuple[Path, Path]]
KINDS: dict[str, tuple[Pairs, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # The pool begins as NaN.
    "gated delta nets, retracted": (
        lambda _: pair("Qwen3.5"), dict(max_mamba_cache_size=64), {}, dict(environment=RETRACTING)
    ),
    "two KV pools": (
        lambda _: pair("gpt-oss"), dict(ZOO["gpt-oss"].arguments, page_size=16, swa_full_tokens_ratio=0.4), {}, {}
    ),
    "DFlash2, hierarchical cache": (
        lambda directory: (TARGET, dflash2_draft(directory / "draft")),
        dict(page_size=16), dict(enable_hierarchical_cache=True, hicache_ratio=4), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_and_draft_proposes_what_it_does_on_one_server(tmp_path, kind):
    """A random draft has nothing accepted, so its proposals are compared, token by token."""
    checkpoints, flags, prefill, decode = KINDS[kind]
    target, draft = checkpoints(tmp_path)
    text = list("\n".join(held_out_prompts()).encode())
    requests = []
    for length in (3, 100, 300):
        ids = text[1000 + length :][:length] if target == TARGET else random_ids(length, length)
        requests.append(dict(input_ids=ids, sampling_params=greedy_params(60)))
    variables: dict[str, dict[str, str]] = {}
    for who in ("one", "apart"):
        (tmp_path / who).mkdir()
        variables[who] = scheduler_hooks.hooked(tmp_path / who, "proposals,context")
    # As the two servers: a prefix hit finds less in rings.
    variables["one"][CONFIG_ENV] = json.dumps({"draft_kv": "whole"})
    with serve(target, draft, environment=variables["one"], **flags) as one:
        outputs = [output_and_steps(answer) for answer in ask_at_once(one, requests)]
    roles: dict[str, Any] = dict(prefill=prefill, decode=decode)
    with serve_apart(target, draft, tmp_path, environment=variables["apart"], **roles, **flags) as apart:
        for _ in ("cold", "from the prefix cache"):
            assert [output_and_steps(answer) for answer in apart.ask_all(requests)] == outputs
        assert not apart.wrote_elsewhere()
        assert ("Testing retraction" in apart.decode.log_text()) == ("retracted" in kind)
    of_requests = {len(request["input_ids"]) + step for request in requests for step in range(59)}
    proposed, proposed_apart = (
        {str(line) for line in scheduler_hooks.noted(tmp_path / who, "proposals.jsonl") if line[0] in of_requests}
        for who in variables
    )
    assert len(proposed) > 20 and proposed_apart == proposed


def test_data_parallel_ranks_of_both_servers_output_what_one_server_does(expected, tmp_path):
    decode = dict(environment={CONFIG_ENV: '{"width": {}}'})
    flags = {**RANKS, "decode_log_interval": 1, **dict(tp_size=2, dp_size=2, enable_dp_attention=True)}
    environment = {"DFLASH_SGLANG_REQUIRE": "1"}
    with serve_apart(TARGET, DRAFT, tmp_path, environment=environment, decode=decode, **flags) as apart:
        answers = apart.ask_all(asked())
        apart.assert_idle()
        assert not apart.wrote_elsewhere()
        log = apart.decode.log_text()
    assert [answer["output_ids"] for answer in answers] == [ids for ids, _ in expected]
    assert {rank for rank in ("DP0", "DP1") if re.search(rf"{rank} .*Decode batch", log)} == {"DP0", "DP1"}
