"""Drafts with rows in rings, and drafts with walks, on a GPU.

Outputs are held to the target's likeliest tokens, as in `test_width_gpu`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV
from tests.engine.test_draft_rings import FIRST, FURTHER
from tests.engine.test_width_serving import DRAFT, MANY, TARGET, ask, prompts, request
from tests.gpu.test_width_gpu import FLAGS, NEW_TOKENS, assert_plain_decodings
from tests.support import scheduler_hooks
from tests.support.engines import serve
from tests.support.family_drafts import BLOCK, ROWS, domino_draft, dspark_draft
from tests.support.kits import DEVICE_ENVIRONMENT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WINDOW = 64
WALKS = ("DSpark vanilla", "DSpark gated", "DSpark rnn", "Domino shifted", "Domino in place")
BACKENDS = {"fa3": 1, "flashinfer": 1, "triton": 16}  # and the size of pages


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve(TARGET, environment=DEVICE_ENVIRONMENT, **FLAGS) as server:
        yield server


def steps_of_everything(plain: Server, draft_kv: str, backend: str) -> int:
    """Verify steps of requests that run at once, and of the turns of a conversation; their output is checked."""
    environment = {**DEVICE_ENVIRONMENT, REQUIRE_ENV: "1", CONFIG_ENV: json.dumps({"draft_kv": draft_kv})}
    flags: dict[str, Any] = dict(
        attention_backend=backend, page_size=BACKENDS[backend], speculative_draft_window_size=WINDOW, **FLAGS
    )
    with serve(TARGET, DRAFT, environment=environment, **flags) as server:
        assert f"draft_kv: {'rings of' if draft_kv == 'auto' else 'whole'}" in server.log_text()
        asked = [request(prompt, NEW_TOKENS) for prompt in prompts()]
        answers, text = ask(server, asked), FIRST
        for _ in range(4):
            asked.append(request(text, 60))
            answers.append(server.generate(**asked[-1]))
            text = text + answers[-1]["output_ids"] + FURTHER
    assert_plain_decodings(plain, asked, answers)
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rings_are_plain_decoding_in_as_many_steps_as_the_whole_pool(plain, backend):
    rings, whole = (steps_of_everything(plain, draft_kv, backend) for draft_kv in ("auto", "whole"))
    print(f"{backend}: {rings} steps with rings, {whole} with the whole pool")
    assert rings <= 1.05 * whole


@pytest.mark.parametrize("kind", WALKS)
def test_walks_are_plain_decoding_at_random_widths_and_are_accepted(plain, tmp_path: Path, kind):
    family, _, form = kind.partition(" ")
    if family == "DSpark":
        draft, block = dspark_draft(tmp_path / "draft", form), ROWS + 1
    else:
        draft, block = domino_draft(tmp_path / "draft", shifted=form == "shifted"), BLOCK
    variables = {**DEVICE_ENVIRONMENT, CONFIG_ENV: '{"width": {}}'}
    environment = scheduler_hooks.hooked(tmp_path, "widths", **variables)
    with serve(TARGET, draft, environment=environment, **FLAGS) as server:
        assert f"block: {block} " in server.log_text()
        asked = [request(prompt, NEW_TOKENS) for prompt in prompts()[:MANY]]
        answers = [*ask(server, asked), server.generate(**asked[0])]
        sampled = ask(server, [with_temperature(one, 0.8) for one in asked])
    assert_plain_decodings(plain, [*asked, asked[0]], answers)
    of_step = {name: tokens_of_a_step(of) for name, of in (("greedy", answers), ("sampled", sampled))}
    print(f"{kind}: tokens of a step {of_step}")
    # The first proposals of shifted rows are those of rows that were trained for another place.
    assert min(of_step.values()) > (1.0 if kind == "Domino shifted" else 1.2)


def with_temperature(asked: dict[str, Any], temperature: float) -> dict[str, Any]:
    return {**asked, "sampling_params": {**asked["sampling_params"], "temperature": temperature}}


def tokens_of_a_step(answers: list[dict[str, Any]]) -> float:
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    return tokens / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
