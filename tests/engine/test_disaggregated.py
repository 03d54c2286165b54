"""Prefill and decode on different servers, float32 on the CPU: output and verify steps are those of one server."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_request_fields as fields
from tests.engine.test_dflash2_serving import config_and_tensors as dflash2_config_and_tensors
from tests.engine.test_parallel import RANKS
from tests.engine.test_recurrent_serving import random_ids
from tests.gpu.test_lora import adapter
from tests.gpu.test_seeds import requests as seeded_requests
from tests.support import scheduler_hooks
from tests.support.disaggregated import Apart, Refused, answer_of, prefill_beside, serve_apart
from tests.support.engines import BUILT_IN_WORKER, RETRACTING, greedy_params, serve
from tests.support.kits import without_the_last_layer
from tests.support.rows import in_full_but
from tests.support.tiny import write_checkpoint
from tests.support.transfer.mooncake.engine import FAULT_ENV, UNREGISTERED, TransferEngine
from tests.zoo import ZOO, pair

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
NEW_TOKENS = 64


def prompts(count: int = 8) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text) for text in held_out_prompts()[:count]]


def asked(**sampling: Any) -> list[dict[str, Any]]:
    params = greedy_params(NEW_TOKENS, **sampling)
    return [dict(input_ids=prompt, sampling_params=params) for prompt in prompts()]


@pytest.fixture
def engines() -> tuple[TransferEngine, str, TransferEngine]:
    """A sender, the address of a receiver, the receiver."""
    sender, receiver = TransferEngine(), TransferEngine()
    for engine in (sender, receiver):
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return sender, f"127.0.0.1:{receiver.get_rpc_port()}", receiver


@pytest.mark.parametrize(
    ("fault", "status", "arrived"),
    [
        ("", 0, b"abcdefgh"),
        ("fail", -1, bytes(8)),
        ("break", -1, b"abcd" + bytes(4)),
        ("slow 0.01", 0, b"abcdefgh"),
    ],
)
def test_the_stand_in_writes_memory_of_its_receiver(engines, tmp_path, monkeypatch, fault, status, arrived):
    sender, address, receiver = engines
    (tmp_path / "fault").write_text(fault)
    monkeypatch.setenv(FAULT_ENV, str(tmp_path / "fault"))
    source, destination = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    at, to = ctypes.addressof(source), ctypes.addressof(destination)
    receiver.batch_register_memory([to], [8])
    assert sender.batch_transfer_sync_write(address, [at, at + 4], [to, to + 4], [4, 4]) == status
    deadline = time.monotonic() + 5  # a sender that breaks off does not wait for its receiver
    while destination.raw != arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    assert destination.raw == arrived


def test_the_stand_in_refuses_memory_that_is_not_registered(engines, capfd):
    sender, address, receiver = engines
    source, destination = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
    at, to = ctypes.addressof(source), ctypes.addressof(destination)
    receiver.batch_register_memory([to], [6])
    assert sender.batch_transfer_sync_write(address, [at, at + 4], [to, to + 4], [4, 4]) == -1
    assert destination.raw == bytes(8)
    assert f"{UNREGISTERED}: 1 of 2 blocks" in capfd.readouterr().err
    assert sender.transfer_sync_write(address, at, to, 6) == 0
    assert destination.raw == b"abcdef" + bytes(2)


@pytest.mark.slow
@pytest.mark.full
def test_a_target_without_speculation_decodes_the_same(tmp_path):
    with serve(TARGET) as server, serve_apart(TARGET, None, tmp_path) as apart:
        expected = [server.generate(**request)["output_ids"] for request in asked()]
        assert [answer["output_ids"] for answer in apart.ask_all(asked())] == expected
        assert not apart.wrote_elsewhere()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def environment(records: Path) -> dict[str, str]:
    return scheduler_hooks.hooked(records, "seeds,context")


TEXT: dict[str, Any] = dict(skip_tokenizer_init=None, enable_custom_logit_processor=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "overlap": dict(),
    "synchronous_pages_of_16_in_chunks_of_64": dict(
        disable_overlap_schedule=True, page_size=16, chunked_prefill_size=64
    ),
    "pages_of_64_with_a_warm_up": dict(page_size=64, skip_server_warmup=False),
}


@pytest.fixture(scope="module")
def one(environment: dict[str, str]) -> Iterator[Server]:
    """A server that prefills and decodes."""
    with serve(TARGET, DRAFT, environment=environment, **TEXT) as server:
        yield server


LAYOUT_ROWS = in_full_but(LAYOUTS, "overlap", release=["pages_of_64_with_a_warm_up"])


@pytest.fixture(scope="module", params=LAYOUT_ROWS)
def apart(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path_factory: Any) -> Iterator[Apart]:
    directory = tmp_path_factory.mktemp("apart")
    with serve_apart(TARGET, DRAFT, directory, environment=environment, **TEXT, **LAYOUTS[request.param]) as both:
        yield both


@pytest.fixture(scope="module")
def of_one(one: Server) -> Callable[[str], list[Any]]:
    """The answers of one server to the requests of a field."""
    requests = {**fields.table(), **fields.without_tokens()}
    return functools.cache(lambda name: [one.generate(**request) for request in requests[name]])


@pytest.fixture(scope="module")
def expected(one: Server) -> list[tuple[list[int], int]]:
    """Output and verify steps of one server's answers to `asked()`."""
    return [output_and_steps(one.generate(**request)) for request in asked()]


def output_and_steps(answer: dict[str, Any]) -> tuple[list[int], int]:
    return answer["output_ids"], answer["meta_info"]["spec_verify_ct"]


def test_output_and_verify_steps_are_those_of_one_server(expected, apart):
    assert [output_and_steps(apart.ask(**request)) for request in asked()] == expected
    assert [output_and_steps(answer) for answer in apart.ask_all(asked())] == expected  # from the prefix cache
    assert not apart.wrote_elsewhere()


def test_every_row_of_the_drafts_context_arrives(one, apart, records):
    for server in (one, apart.prefill):  # rows are computed in the same forwards
        server.post("/flush_cache?timeout=60")
    for number, request in enumerate(asked()):
        one.generate(**request, rid=(here := f"context-one-{number}"))
        apart.ask(**request, rid=(there := f"context-{number}"))
        expected, arrived = (scheduler_hooks.context_of(records, rid) for rid in (here, there))
        assert expected.shape[:2] == (6, len(request["input_ids"]))
        # Chunks and pages of another size round otherwise.
        largest = 0.0 if apart.shared.keys() <= TEXT.keys() else 1e-4
        torch.testing.assert_close(arrived, expected, rtol=0.0, atol=largest)


def of_outputs(answer: dict[str, Any]) -> list[float]:
    """Numbers of the logprobs that SGLang has on a decode server, where it has none of the prompt, and none of the
    first token for tokens that a client names."""
    kept = ("output_token_logprobs", "output_top_logprobs")
    return fields.numbers(dict(meta_info={key: answer["meta_info"].get(key) for key in kept}))


# A decode server has the logprob of a first token that was not asked for.
OTHERWISE = ("n", "no token and its logprob", "no token and all logprobs")
FIELDS = [name for name in {**fields.table(), **fields.without_tokens()} if name not in OTHERWISE]
CORE = (
    "min_new_tokens with stop_token_ids",
    "json_schema",
    "sampling_seed and penalties",
    "logprobs and penalties",
)


# Every field on one layout, on the others those that keep most between steps.
FIELD_ROWS = [
    pytest.param(row.id, name, marks=row.marks if name in CORE else pytest.mark.release)
    for row in LAYOUT_ROWS
    for name in (FIELDS if row.id == "overlap" else CORE)
]


@pytest.mark.parametrize(("apart", "name"), FIELD_ROWS, indirect=["apart"])
def test_every_field_of_a_request_acts_as_on_one_server(of_one, apart, name):
    answers = apart.ask_all({**fields.table(), **fields.without_tokens()}[name])
    assert not fields.differences({name: of_one(name)}, {name: answers})
    for got, wanted in zip(answers, of_one(name), strict=True):
        assert of_outputs(got) == pytest.approx(of_outputs(wanted), abs=1e-3)


def test_a_request_that_limits_its_width_commits_no_more(one, apart):
    limits = dict(custom_params={"dflash": {"max_width": 3}})
    for request in asked(**limits)[:3]:
        answer = apart.ask(**request)
        assert output_and_steps(answer) == output_and_steps(one.generate(**request))
        assert len(answer["meta_info"]["spec_correct_drafts_histogram"]) <= 3


@pytest.mark.parametrize("number", [2, 3])
def test_several_samples_of_a_prompt_are_refused_by_both_servers(apart, number):
    for refused in apart.ask_both(**asked(n=number)[0]):
        assert isinstance(refused, Refused) and refused.status == 400
        assert f"n={number}: expected 1 with prefill and decode on different servers" in str(refused)


@pytest.mark.full
@pytest.mark.parametrize(
    ("field", "value"),
    [("bootstrap_room", -1), ("bootstrap_room", 0), ("bootstrap_room", [5]), ("bootstrap_host", [])],
)
def test_a_meeting_place_that_would_end_a_server_or_an_answer_is_refused_by_both(apart, field, value):
    sent = {**asked()[0], **apart.room(), field: value}
    for server in (apart.prefill, apart.decode):
        refused = answer_of(server, **sent)
        assert isinstance(refused, Refused) and refused.status == 400
        assert f"{field}={value}: expected " in str(refused)


# A prefill server that differs, what requests are answered that it shares with the decode server.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "no speculation": (
        dict(draft=None, environment={"DFLASH_SGLANG_REQUIRE": "0"}),
        "a prefill server without dflash_sglang: expected one that sends context KV of this server's draft. ",
    ),
    "another type of context KV": (
        dict(speculative_draft_kv_cache_dtype="bfloat16"),
        "dtype=bfloat16 on the prefill server, float32 on the decode server: expected the same draft on both. ",
    ),
    "a draft with other weights": (
        dict(draft="other"),
        " on the decode server: expected the same draft on both. ",
    ),
    "the built-in worker": (
        dict(draft="without the last layer", environment=BUILT_IN_WORKER),
        "a prefill server without dflash_sglang: expected one that sends context KV of this server's draft. ",
    ),
}


@pytest.mark.parametrize("other", in_full_but(OTHERS, "no speculation"))
def test_a_decode_server_refuses_another_draft_by_name_and_stays_up(expected, apart, tmp_path, environment, other):
    arguments, message = OTHERS[other]
    if arguments.get("draft") == "other":
        weights = load_file(DRAFT / "model.safetensors")
        weights["fc.weight"][0, 0] += 1.0
        save_file(weights, shutil.copytree(DRAFT, tmp_path / "draft") / "model.safetensors")
        arguments = dict(draft=tmp_path / "draft")
    if arguments.get("draft") == "without the last layer":
        arguments = {**arguments, "draft": without_the_last_layer(tmp_path / "draft")}
    prefill = {**TEXT, **arguments, "environment": {**environment, **arguments.get("environment", {})}}
    with prefill_beside(apart, TARGET, prefill.pop("draft", DRAFT), **prefill) as mismatched:
        for request in asked()[:2]:
            sent = {**request, **mismatched.room()}
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(answer_of, mismatched.prefill, **sent)
                time.sleep(2)  # until the prefill server has it
                refused = answer_of(mismatched.decode, **sent)
                assert isinstance(refused, Refused) and refused.status == 500 and message in str(refused)
                ended = waiting.result(60)  # SGLang's time-out is 300 s
            assert isinstance(ended, Refused) and ended.status == 500
        mismatched.assert_idle()
    assert output_and_steps(apart.ask(**asked()[0])) == expected[0]


@pytest.mark.full
def test_a_decode_server_that_takes_any_prefill_server_is_right_in_more_steps(expected, tmp_path, environment):
    variables = {**environment, scheduler_hooks.HOOKS_ENV: ""}
    settings = {CONFIG_ENV: '{"prefill": "any"}'}
    prefill, decode = dict(draft=None, environment={"DFLASH_SGLANG_REQUIRE": "0"}), dict(environment=settings)
    with serve_apart(TARGET, DRAFT, tmp_path, environment=variables, prefill=prefill, decode=decode) as apart:
        answers = [output_and_steps(answer) for answer in apart.ask_all(asked())]
    assert [ids for ids, _ in answers] == [ids for ids, _ in expected]
    assert sum(steps for _, steps in answers) > 1.1 * sum(steps for _, steps in expected)


@pytest.mark.full
def test_a_decode_server_that_takes_any_prefill_server_decodes_with_context_of_the_built_in_worker(tmp_path):
    draft = without_the_last_layer(tmp_path / "draft")
    settings = {CONFIG_ENV: '{"prefill": "any"}', "DFLASH_SGLANG_REQUIRE": "1"}
    servers = dict(prefill=dict(environment=BUILT_IN_WORKER), decode=dict(environment=settings))
    with serve_apart(TARGET, draft, tmp_path, **servers) as apart:
        answers = [output_and_steps(answer) for answer in apart.ask_all(asked())]
        assert not apart.wrote_elsewhere()
    with serve(TARGET, draft, environment=settings) as one:
        assert answers == [output_and_steps(one.generate(**request)) for request in asked()]


@pytest.mark.full
def test_a_prefill_server_refuses_a_decode_server_without_the_draft_by_name_and_stays_up(tmp_path):
    decode = dict(draft=None, environment={"DFLASH_SGLANG_REQUIRE": "0"})
    with serve_apart(TARGET, DRAFT, tmp_path, decode=decode) as apart:
        for request in asked()[:2]:
            refused, of_decode = apart.ask_both(**request)
            assert isinstance(refused, Refused) and refused.status == of_decode.status == 500
            assert "DFLASH: 10 KV buffers on the decode server, 16 on the prefill server" in str(refused)


def test_a_prefill_server_only_prefills(one, apart):
    """Its log: no head for drafting, no tables of verification, no step; and no prefill on the decode server."""
    prefill, decode = apart.prefill.log_text(), apart.decode.log_text()
    assert "  role: prefill" in prefill and "  role: decode" in decode and "  role:" not in one.log_text()
    for of_drafting in ("  head:", "  draft_attention:", " tables "):
        assert of_drafting not in prefill and of_drafting in decode
    assert "Prefill batch" in prefill and "Prefill batch" not in decode
    for server in (apart.prefill, apart.decode):
        assert server.get("/server_info")["internal_states"][0]["dflash_worker"].startswith("dflash_sglang ")


@pytest.mark.full
def test_retracted_requests_keep_their_context(expected, tmp_path, environment):
    """The pool begins as NaN, and rows of a retracted request are others' before it goes on."""
    decode = dict(environment=RETRACTING)
    with serve_apart(TARGET, DRAFT, tmp_path, environment=environment, decode=decode, **TEXT) as apart:
        assert [output_and_steps(answer) for answer in apart.ask_all(asked())] == expected
        assert "Testing retraction" in apart.decode.log_text()


@pytest.mark.full
def test_adapters_of_requests_act_as_on_one_server(one, tmp_path, environment):
    paths = [f"{name}={adapter(tmp_path / name, seed, 0.1)}" for seed, name in enumerate(("first", "second"))]
    flags: dict[str, Any] = dict(environment=environment, enable_lora=True, lora_paths=paths, **TEXT)
    names = (None, "first", "second", "first")
    requests = [dict(request, lora_path=name) for request, name in zip(asked(), 2 * names, strict=True)]
    with serve(TARGET, DRAFT, **flags) as adapted:
        expected = [output_and_steps(adapted.generate(**request)) for request in requests]
    changed = [
        ids != one.generate(**request)["output_ids"] for request, (ids, _) in zip(asked(), expected, strict=True)
    ]
    assert changed == [name is not None for name in 2 * names]
    with serve_apart(TARGET, DRAFT, tmp_path, **flags) as apart:
        assert [output_and_steps(apart.ask(**request)) for request in requests] == expected
        assert [output_and_steps(answer) for answer in apart.ask_all(requests)] == expected
        assert not apart.wrote_elsewhere()


@pytest.mark.full
def test_seeded_requests_of_deterministic_inference_draw_as_on_one_server(tmp_path):
    flags: dict[str, Any] = dict(
        environment={"DFLASH_SGLANG_REQUIRE": "1"},
        enable_deterministic_inference=True,
        attention_backend="torch_native",  # SGLang looks before the platform names its own
    )
    requests = seeded_requests()
    with serve(TARGET, DRAFT, **flags) as one:
        expected = [output_and_steps(one.generate(**request)) for request in requests]
    with serve_apart(TARGET, DRAFT, tmp_path, **flags) as apart:
        assert [output_and_steps(apart.ask(**request)) for request in requests] == expected
        reseeded = [apart.ask(**with_another_seed(request))["output_ids"] for request in requests]
    assert all(ids != drawn for ids, (drawn, _) in zip(reseeded, expected, strict=True))


def with_another_seed(request: Mapping[str, Any]) -> dict[str, Any]:
    return {**request, "sampling_params": {**request["sampling_params"], "sampling_seed": 7}}


@dataclass(frozen=True)
class Kind:
    """Checkpoints and flags of both servers, and of one of them."""

    checkpoints: Callable[[Path], tuple[Path, Path]] = lambda directory: (TARGET, DRAFT)
    flags: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[Path], Mapping[str, Any]] = lambda directory: {}


def dflash2(directory: Path) -> tuple[Path, Path]:
    return TARGET, write_checkpoint(directory / "draft", *dflash2_config_and_tensors())


def token_map(directory: Path) -> dict[str, str]:
    torch.save(list(range(250)), directory / "map.pt")
    return dict(speculative_token_map=str(directory / "map.pt"))


RECURRENT = dict(max_mamba_cache_size=64)
KINDS: dict[str, Kind] = {
    "gated delta nets": Kind(lambda _: pair("Qwen3.5"), RECURRENT),
    "gated delta nets, synchronous": Kind(
        lambda _: pair("Qwen3.5"), dict(**RECURRENT, disable_overlap_schedule=True, chunked_prefill_size=64)
    ),
    "short convolutions": Kind(lambda _: pair("LFM2"), RECURRENT),
    "two KV pools": Kind(
        lambda _: pair("gpt-oss"), dict(ZOO["gpt-oss"].arguments, page_size=16, swa_full_tokens_ratio=0.4)
    ),
    "hierarchical cache": Kind(
        flags=dict(page_size=16), prefill=dict(enable_hierarchical_cache=True, hicache_ratio=4)
    ),
    "a window": Kind(flags=dict(speculative_draft_window_size=64)),
    "a token map of the decode server": Kind(decode=token_map),
    "DFlash2": Kind(dflash2),
}
KINDS_OF_RELEASE = (
    "gated delta nets, synchronous",
    "short convolutions",
    "a window",
    "a token map of the decode server",
)


def blocks(directory: Path, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    """(prefix length, proposals) of every block of requests that were asked one by one, but for those that overlap
    scheduling launches of a request that has ended."""
    found, lines = [], scheduler_hooks.noted(directory, "proposals.jsonl")
    for request in requests:
        prefix = len(request["input_ids"])
        end = prefix + request["sampling_params"]["max_new_tokens"] - 1
        while lines[0][0] != prefix:
            del lines[0]
        while lines and prefix <= lines[0][0] < end:
            prefix = lines[0][0] + 1
            found.append(lines.pop(0))
    return found


# Flags of the decode server, and what its log says.
RETRACTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "every 9 steps": (dict(environment=RETRACTING), "Testing retraction"),
    "where slots run out": (dict(max_total_tokens=520, num_reserved_decode_tokens=1), "KV cache pool is full"),
}


@pytest.mark.full
@pytest.mark.parametrize("when", in_full_but(RETRACTIONS, release=["where slots run out"]))
def test_retracted_requests_of_a_recurrent_target_keep_states_and_context(tmp_path, when):
    """The pool begins as NaN. A random draft has nothing accepted, so its proposals are compared."""
    target, draft = pair("Qwen3.5")
    requests = [
        dict(input_ids=random_ids(length, length), sampling_params=greedy_params(60)) for length in (3, 100, 300)
    ]
    proposed, answers = [], []
    retracting, says = RETRACTIONS[when]
    for number, decode in enumerate(({}, retracting)):
        records = tmp_path / str(number)
        records.mkdir()
        environment = scheduler_hooks.hooked(records, "proposals,context")
        with serve_apart(target, draft, records, environment=environment, decode=decode, **RECURRENT) as apart:
            answers.append([answer["output_ids"] for answer in apart.ask_all(requests)])
            assert (says in apart.decode.log_text()) == bool(decode)
        lines = (records / "proposals.jsonl").read_text().splitlines()
        of_requests = {len(request["input_ids"]) + step for request in requests for step in range(59)}
        proposed.append({line for line in lines if json.loads(line)[0] in of_requests})
    assert answers[0] == answers[1]
    assert len(proposed[0]) > 120 and proposed[0] == proposed[1]


@pytest.mark.full
@pytest.mark.parametrize("kind", in_full_but(KINDS, release=KINDS_OF_RELEASE))
def test_every_kind_of_target_and_draft_proposes_what_it_does_on_one_server(tmp_path, kind):
    """Token by token, before every step."""
    of = KINDS[kind]
    target, draft = of.checkpoints(tmp_path)
    decode = dict(of.decode(tmp_path))
    variables: dict[str, dict[str, str]] = {}
    for who in ("one", "apart"):
        (tmp_path / who).mkdir()
        variables[who] = scheduler_hooks.hooked(tmp_path / who, "proposals")
    # As the two servers: a prefix hit finds less in rings.
    variables["one"][CONFIG_ENV] = json.dumps({"draft_kv": "whole"})
    requests = (
        asked()
        if target == TARGET
        else [
            dict(input_ids=random_ids(length, length), sampling_params=greedy_params(40))
            for length in (3, 70, 200)
        ]
    )
    requests += requests[:2]  # from the prefix cache
    with serve(target, draft, environment=variables["one"], **of.flags, **decode) as one:
        expected = [output_and_steps(one.generate(**request)) for request in requests]
    flags: dict[str, Any] = dict(environment=variables["apart"], prefill=of.prefill, decode=decode, **of.flags)
    with serve_apart(target, draft, tmp_path, **flags) as apart:
        assert [output_and_steps(apart.ask(**request)) for request in requests] == expected
        assert not apart.wrote_elsewhere()
    proposed, proposed_apart = (blocks(tmp_path / who, requests) for who in variables)
    assert len(proposed) > 20
    assert proposed_apart == proposed


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefilling", "decoding"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.release), pytest.param(2, 2, marks=pytest.mark.release)],
)
def test_ranks_of_both_servers_share_heads_as_many_or_in_other_numbers(expected, tmp_path, prefilling, decoding):
    environment = {"DFLASH_SGLANG_REQUIRE": "1"}
    sizes = dict(prefill=dict(tp_size=prefilling), decode=dict(tp_size=decoding))
    with serve_apart(TARGET, DRAFT, tmp_path, environment=environment, **sizes, **RANKS) as apart:
        answers = [output_and_steps(answer) for answer in apart.ask_all(asked())]
        assert not apart.wrote_elsewhere()
    assert answers == expected


DATA_PARALLEL = dict(tp_size=2, dp_size=2, enable_dp_attention=True)
DATA_PARALLEL_SERVERS: dict[str, dict[str, Any]] = {
    "both": dict(**DATA_PARALLEL),
    "decode, retracting": dict(decode=dict(**DATA_PARALLEL, enable_dp_lm_head=True, environment=RETRACTING)),
    "both, chosen widths": dict(**DATA_PARALLEL, decode=dict(environment={CONFIG_ENV: '{"width": {}}'})),
}


@pytest.mark.full
@pytest.mark.parametrize("servers", in_full_but(DATA_PARALLEL_SERVERS, release=["both", "decode, retracting"]))
def test_data_parallel_ranks_of_both_servers_answer_as_one_server(expected, tmp_path, servers):
    flags = {**RANKS, "decode_log_interval": 1, **DATA_PARALLEL_SERVERS[servers]}
    with serve_apart(TARGET, DRAFT, tmp_path, environment={"DFLASH_SGLANG_REQUIRE": "1"}, **flags) as apart:
        answers = [output_and_steps(answer) for answer in apart.ask_all(asked())]
        apart.assert_idle()
        assert not apart.wrote_elsewhere()
        log = apart.decode.log_text()
    if servers == "both, chosen widths":
        assert [ids for ids, _ in answers] == [ids for ids, _ in expected]
    else:
        assert answers == expected
    assert {rank for rank in ("DP0", "DP1") if re.search(rf"{rank} .*Decode batch", log)} == {"DP0", "DP1"}
    assert ("Testing retraction" in log) == ("retracting" in servers)
