"""Drafts with rows in rings, and DSpark drafts, on a GPU.

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
from tests.engine.test_dspark_serving import ROWS, dspark_draft
from tests.engine.test_width_serving import DRAFT, MANY, TARGET, ask, prompts, request
from tests.gpu.test_width_gpu import FLAGS, NEW_TOKENS, assert_plain_decodings
from tests.support import scheduler_hooks
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WINDOW = 64
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


@pytest.mark.parametrize("gated", [False, True], ids=["vanilla", "gated"])
def test_dspark_is_plain_decoding_at_random_widths_and_walks_are_accepted(plain, tmp_path: Path, gated):
    draft = dspark_draft(tmp_path / "draft", gated)
    environment = {
        **DEVICE_ENVIRONMENT,
        REQUIRE_ENV: "1",
        CONFIG_ENV: '{"width": {}}',
        "PYTHONPATH": scheduler_hooks.install(tmp_path),
        scheduler_hooks.HOOKS_ENV: "widths",
    }
    with serve(TARGET, draft, environment=environment, **FLAGS) as server:
        assert f"block: {ROWS + 1} " in server.log_text()
        asked = [request(prompt, NEW_TOKENS) for prompt in prompts()[:MANY]]
        answers = [*ask(server, asked), server.generate(**asked[0])]
    assert_plain_decodings(plain, [*asked, asked[0]], answers)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    assert tokens > 1.2 * sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
