"""fp8 KV of target and draft, apart and together: output is plain decoding's, and the draft is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.pair import held_out_prompts

TEXT = list("\n".join(held_out_prompts()).encode())
PROMPTS = [TEXT[1000 * i : 1000 * i + n] for i, n in enumerate((33, 300, 700))]
NEW_TOKENS = 60


def outputs_and_steps(**arguments: Any) -> tuple[list[list[int]], int]:
    environment = {"DFLASH_SGLANG_REQUIRE": "1"} if "draft" in arguments else {}
    environment |= arguments.pop("environment", {})
    with serve(TARGET, environment=environment, **arguments) as server:
        answers = server.generate(input_ids=PROMPTS, sampling_params=greedy_params(NEW_TOKENS))
        steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
        return [answer["output_ids"] for answer in answers], steps


@pytest.fixture(scope="module")
def plain() -> Any:
    """Output without speculation, by the target's KV format; made when it is first asked for."""
    known: dict[str, list[list[int]]] = {}

    def of(kv: str) -> list[list[int]]:
        if kv not in known:
            known[kv], _ = outputs_and_steps(kv_cache_dtype=kv)
        return known[kv]

    return of


def kinds(target: str, draft: str) -> Any:
    kv = f"target {target}, draft {draft}"
    return pytest.param(
        target,
        draft,
        id=kv,
        marks=pytest.mark.matrix(target="Qwen3", draft="z-lab", kv=kv, outcome="works"),
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("target_kv", "draft_kv"),
    [
        kinds("fp8_e4m3", "as the target"),
        kinds("fp8_e4m3", "bf16"),
        kinds("auto", "fp8_e4m3"),
        kinds("auto", "fp8_e5m2"),
    ],
)
def test_output_is_plain_decodings_with_the_same_target_kv_and_the_draft_still_accepts(plain, target_kv, draft_kv):
    draft_kv = None if draft_kv == "as the target" else draft_kv
    outputs, steps = outputs_and_steps(
        draft=DRAFT, kv_cache_dtype=target_kv, speculative_draft_kv_cache_dtype=draft_kv
    )
    assert outputs == plain(target_kv)
    assert len(PROMPTS) * (NEW_TOKENS - 1) >= 4 * steps


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "draft_kv"),
    [
        pytest.param(
            backend,
            kv,
            marks=pytest.mark.matrix(target="Qwen3", draft=f"z-lab, {backend}", kv=f"draft {kv}", outcome="works"),
        )
        for backend, kv in (
            ("fa3", "fp8_e4m3"),
            ("flashinfer", "fp8_e4m3"),
            ("flashinfer", "fp8_e5m2"),
            ("triton", "fp8_e4m3"),
            ("triton", "fp8_e5m2"),
        )
    ],
)
def test_attention_backends_read_fp8_keys_from_a_block_that_is_not_causal(backend, draft_kv):
    """A draft that misread its keys would have nothing accepted; its last layer is full and not causal."""
    _, steps = outputs_and_steps(
        draft=DRAFT,
        environment=DEVICE_ENVIRONMENT,
        speculative_draft_attention_backend=backend,
        speculative_draft_kv_cache_dtype=draft_kv,
        cuda_graph_max_bs_decode=4,
        max_total_tokens=20000,
        **ON_DEVICE,
    )
    assert len(PROMPTS) * (NEW_TOKENS - 1) >= 4 * steps
