"""The trained pair through our worker: the reference loop's accept length (C25), metrics, entry points."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support.engines import BUILT_IN_WORKER, greedy_params, run_engine, serve
from tests.support.tiny import make_pair
from training import pair

pytestmark = pytest.mark.slow

TARGET, DRAFT = (Path(pair.pair_directories()[name]) for name in ("target", "draft"))
RECORD = json.loads((Path(pair.__file__).parent / "record.json").read_text())["evaluation"]
NEW_TOKENS = RECORD["new_tokens"]
REQUIRE = {"DFLASH_SGLANG_REQUIRE": "1"}
WITHOUT_COPIES = {**REQUIRE, CONFIG_ENV: '{"copy": "off"}'}  # as the reference loop
# Nothing new to the target, and no matter of the draft's.
OVERRIDES = '{"architectures": ["Qwen3ForCausalLM"], "block_size": 4}'


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text) for text in pair.held_out_prompts()]


def batch(server: Server) -> list[dict[str, Any]]:
    """The answers to the held-out prompts, sent as one batch."""
    answers = server.generate(input_ids=prompts(), sampling_params=greedy_params(NEW_TOKENS))
    server.post("/flush_cache?timeout=60")
    return answers


def tokens_per_step(answers: list[dict[str, Any]]) -> float:
    """As the record counts it: tokens after the first, over verify steps."""
    tokens = sum(len(answer["output_ids"]) - 1 for answer in answers)
    return tokens / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """Answers, log and metrics of our server, and answers of one without speculation."""
    more = dict(enable_metrics=True, json_model_override_args=OVERRIDES)
    with serve(TARGET, DRAFT, environment=WITHOUT_COPIES, **more) as server, serve(TARGET) as plain:
        ours = dict(answers=batch(server), log=server.log_text(), metrics=server.text("/metrics"))
        return {"ours": ours, "plain": dict(answers=batch(plain))}


def test_greedy_output_over_http_equals_plain_decoding_on_every_held_out_prompt(served):
    ours, plain = ([answer["output_ids"] for answer in served[which]["answers"]] for which in ("ours", "plain"))
    assert len(ours) >= 50
    assert ours == plain


def test_the_accept_length_is_the_reference_loops_at_block_16(served):
    measured = tokens_per_step(served["ours"]["answers"])
    assert measured == pytest.approx(RECORD["block_16"]["new_tokens_after_the_first_per_step"], rel=0.02)
    assert measured >= 4.0


def test_the_log_names_the_worker_and_its_decisions_in_one_block(served):
    _, block = served["ours"]["log"].split("worker active:\n")
    lines = list(itertools.takewhile(lambda line: line.startswith("  "), block.splitlines()))
    for decision in (
        "draft: DFlashDraftModel (3 layers)",
        "layers: 0-1 sliding(128) causal, 2 full not causal",
        "rope: theta 10000, 64 of 64 dimensions",
        "block: 16 (trained 16)",
        "target_layers: [0, 2, 4]",
        "draft_attention: torch_native",
        "context_kv: stacked (no qkv_proj is quantised)",
        "head: as_is (a CPU has no fp8 GEMM)",
        "draft_kv: whole (layer 2 of the draft sees the whole context)",
        'copy: off (copy is "off")',
    ):
        assert f"  {decision}" in lines


def test_answers_and_prometheus_carry_acceptance(served):
    for answer in served["ours"]["answers"]:
        meta = answer["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        assert sum(i * count for i, count in enumerate(histogram)) == meta["spec_num_correct_drafts"]
        assert meta["spec_accept_length"] == pytest.approx(len(answer["output_ids"]) / meta["spec_verify_ct"])
    gauge = re.search(r"^sglang:spec_accept_length\{.*\} ([\d.]+)$", served["ours"]["metrics"], re.MULTILINE)
    assert gauge and 1.0 < float(gauge[1]) <= 16.0


@pytest.mark.full
def test_the_engine_api_serves_a_narrower_block_with_the_reference_loops_accept_length():
    batch = dict(input_ids=prompts(), sampling_params=greedy_params(NEW_TOKENS))
    (answers,) = run_engine(TARGET, DRAFT, [batch], environment=REQUIRE, speculative_num_draft_tokens=8)
    expected = RECORD["block_8"]["new_tokens_after_the_first_per_step"]
    assert tokens_per_step(answers) == pytest.approx(expected, rel=0.02)


def test_sampled_and_greedy_requests_share_a_batch(served):
    """Greedy rows stay plain greedy while others sample; a seeded sampler is not asked for here."""
    asked = prompts()[:8]
    params = [
        greedy_params(NEW_TOKENS)
        if i % 2 == 0
        else greedy_params(NEW_TOKENS, temperature=0.8, top_p=0.9, top_k=20)
        for i in range(len(asked))
    ]
    batch = dict(input_ids=asked, sampling_params=params)
    (answers,) = run_engine(TARGET, DRAFT, [batch], environment=REQUIRE)
    for i, answer in enumerate(answers):
        greedy = served["plain"]["answers"][i]["output_ids"]
        assert (answer["output_ids"] == greedy) == (i % 2 == 0)


@pytest.mark.full
def test_without_the_plugin_the_built_in_worker_runs(tmp_path):
    # The built-in draft reads transformers' fields and cannot capture the last layer.
    target, draft = make_pair(
        tmp_path, draft={"use_sliding_window": True, "dflash_config": {"target_layer_ids": [0, 1, 3]}}
    )
    with serve(target, draft, environment=BUILT_IN_WORKER) as server:
        assert "Initialized DFLASH draft runner" in server.log_text()
        assert "worker active" not in server.log_text()
