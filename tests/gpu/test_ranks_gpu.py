"""Tensor parallel over two GPUs: chains, ragged ones and trees, one shape on both ranks in every step.

Ranks that disagreed about a shape would wait for each other in collectives of other sizes, or write other rows.
Recurrent targets on two GPUs are in `test_recurrent_gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_rank_steps import FORMS, RANKS, SETTINGS, assert_same_rows
from tests.engine.test_width_serving import DRAFT, TARGET, ask, prompts, request
from tests.gpu.test_width_gpu import FLAGS, NEW_TOKENS, assert_plain_decodings
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ATTENTION = {"fa3": FORMS, "triton": FORMS[:1]}  # and the forms that it serves


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve(TARGET, environment=DEVICE_ENVIRONMENT, **FLAGS) as server:
        yield server


@pytest.mark.parametrize("attention", ATTENTION)
def test_both_ranks_verify_the_same_rows_and_output_is_plain_decodings(plain, attention, tmp_path):
    trees = "tree" in ATTENTION[attention]
    hooks, settings = ("widths,shares,trees", SETTINGS) if trees else ("widths", '{"width": {}}')
    environment = scheduler_hooks.hooked(
        tmp_path, f"{hooks},shapes", **{**DEVICE_ENVIRONMENT, CONFIG_ENV: settings}
    )
    asked = [request(prompt, NEW_TOKENS) for prompt in prompts()]
    with serve(
        TARGET, DRAFT, environment=environment, attention_backend=attention, tp_size=RANKS, **FLAGS
    ) as server:
        answers = [*ask(server, asked), *ask(server, asked[:3]), server.generate(**asked[0])]
        drawn = [dict(one, sampling_params=greedy_params(NEW_TOKENS, temperature=1.0)) for one in asked]
        assert all(len(answer["output_ids"]) == NEW_TOKENS for answer in ask(server, drawn))
    assert_plain_decodings(plain, [*asked, *asked[:3], asked[0]], answers)
    assert_same_rows(tmp_path, ATTENTION[attention], at_least=30)
