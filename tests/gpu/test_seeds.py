"""Seeded requests under `--enable-deterministic-inference`, whose kernels need a GPU; CPU part:
`test_request_fields`, and `test_disaggregated` with this flag."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SAMPLING = (
    dict(temperature=1.0),
    dict(temperature=0.8, top_p=0.9, top_k=40),
    dict(temperature=1.0, top_p=0.95, frequency_penalty=0.3),
)


def requests() -> list[dict[str, Any]]:
    prompts = [list(text.encode()) for text in held_out_prompts()[:8]]
    return [
        dict(
            input_ids=prompt,
            sampling_params=dict(max_new_tokens=64, ignore_eos=True, sampling_seed=100 + i, **SAMPLING[i % 3]),
        )
        for i, prompt in enumerate(prompts)
    ]


def outputs(server: Server, at_once: int) -> list[list[int]]:
    with ThreadPoolExecutor(at_once) as pool:
        return [answer["output_ids"] for answer in pool.map(lambda one: server.generate(**one), requests())]


def test_a_seed_gives_plain_decodings_output_alone_again_and_in_any_batch():
    """But for penalties, which lag one token behind in plain decoding with overlap scheduling."""
    flags = dict(enable_deterministic_inference=True, cuda_graph_max_bs_decode=8, **ON_DEVICE)
    with serve(TARGET, DRAFT, environment={**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}, **flags) as server:
        alone = outputs(server, 1)
        again = outputs(server, 1)
        at_once = outputs(server, len(requests()))
        print(server.log_tail(30))
    unpenalised = [i for i, one in enumerate(requests()) if "frequency_penalty" not in one["sampling_params"]]
    with serve(TARGET, environment=DEVICE_ENVIRONMENT, **flags) as plain:
        plainly = outputs(plain, 1)
    assert [alone[i] for i in unpenalised] == [plainly[i] for i in unpenalised]
    assert alone == again
    # SGLang seeds a batch without any filter differently from a filtered one.
    filtered = [i for i, one in enumerate(requests()) if "top_p" in one["sampling_params"]]
    assert [at_once[i] for i in filtered] == [alone[i] for i in filtered]
    assert len(set(map(tuple, alone))) == len(alone)
