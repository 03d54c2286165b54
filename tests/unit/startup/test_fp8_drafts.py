"""Which dense drafts are read in fp8, and what the launch is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.startup import fp8_drafts
from dflash_sglang.startup.fp8_drafts import LEAST_WEIGHTS, obstacle
from tests.support.tiny import draft_config

LARGE: dict[str, Any] = dict(  # Qwen3-8B's
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)
HOPPER = (9, 0)


def matrices(dtype: str = "BF16") -> dict[str, TensorFacts]:
    return {"norm.weight": TensorFacts("F32", (4096,)), "fc.weight": TensorFacts(dtype, (4096, 20480))}


def reason(ranks: int = 1, dtype: str = "auto", capability: tuple[int, int] = HOPPER, **config: Any) -> str | None:
    tensors = config.pop("tensors", matrices())
    spec = DraftSpec.from_config(draft_config(**{**LARGE, **config}))
    return obstacle(spec, tensors, ranks, dtype, capability)


def test_large_dense_drafts_are_read_in_fp8():
    assert reason() is None and reason(ranks=2, dtype="bfloat16") is None
    assert reason(capability=(8, 9)) is None and reason(capability=(12, 0), tensors=matrices("F16")) is None


# q, k, v: 4096 x 6144; o: 4096 x 4096; gate, up and down: 3 x 4096 x 12288
MEAN = (4096 * (6144 + 4096) + 3 * 4096 * 12288) / 4


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (dict(capability=(8, 0)), "a GPU of compute capability 8.0 has no fp8 GEMM"),
        (dict(dtype="float32"), "--dtype float32"),
        (dict(tensors=matrices("F32")), "matrices are F32, not bfloat16 or float16"),
        (dict(tensors=matrices("F8_E4M3")), "matrices are F8_E4M3, not"),
        (dict(tensors={}), "unknown before they are loaded"),
        (dict(quantization_config={"quant_method": "awq"}), "the checkpoint is quantised (awq)"),
        (dict(ranks=4), f"have {MEAN / 4 / 2**20:.1f} Mi weights on a rank on average, less than 16"),
        (dict(hidden_size=2048, intermediate_size=6144), "less than 16"),
    ],
    ids=str,
)
def test_others_stay_as_they_are_and_the_reason_is_told(facts, says):
    found = reason(**facts)
    assert found is not None and says in found


def test_the_bound_is_of_a_ranks_average():
    assert MEAN / 2 >= LEAST_WEIGHTS > MEAN / 4


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Server arguments of a large draft on a Hopper GPU -> (what is declared of them, what is logged)."""
    declared: dict[str, Any] = {}
    monkeypatch.setattr(fp8_drafts, "resolving_view", lambda args: args)
    monkeypatch.setattr(fp8_drafts, "draft_config", lambda path, revision: draft_config(**LARGE))
    monkeypatch.setattr(fp8_drafts, "weights_directory", lambda path, revision, download_dir: path)
    monkeypatch.setattr(fp8_drafts, "tensor_facts", lambda directory: matrices())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(fp8_drafts, "declare_resolution", lambda args, source, **fields: declared.update(fields))

    def launched(**overrides: Any) -> tuple[dict[str, Any], str]:
        values = dict(
            device="cuda",
            dtype="auto",
            speculative_draft_model_path="draft",
            speculative_draft_model_revision="main",
            download_dir=None,
            speculative_draft_model_quantization=None,
            _speculative_draft_quantization_explicitly_set=False,
            speculative_dflash_block_size=None,
            speculative_num_draft_tokens=None,
            speculative_draft_window_size=None,
            tp_size=1,
            attn_dp_size=1,
            attn_cp_size=1,
        )
        with caplog.at_level(logging.INFO, logger="dflash_sglang"):
            fp8_drafts.quantise_where_shorter(SimpleNamespace(**{**values, **overrides}))
        return declared, caplog.text

    return launched


def test_fp8_is_asked_for_as_by_the_flag(launch):
    declared, log = launch()
    assert declared == dict(
        speculative_draft_model_quantization="fp8", _speculative_draft_quantization_explicitly_set=True
    )
    assert "in fp8; --speculative-draft-model-quantization unquant keeps them as they are" in log


@pytest.mark.parametrize(
    "overrides",
    [
        dict(_speculative_draft_quantization_explicitly_set=True),  # unquant
        dict(speculative_draft_model_quantization="awq", _speculative_draft_quantization_explicitly_set=True),
        dict(speculative_draft_model_quantization="fp8"),  # --quantization fp8
        dict(device="cpu"),
    ],
    ids=str,
)
def test_whatever_was_asked_for_stands(launch, overrides):
    assert launch(**overrides) == ({}, "")


def test_a_draft_that_is_shared_by_many_ranks_stays_as_it_is(launch):
    declared, log = launch(tp_size=8, attn_dp_size=2)
    assert declared == {} and "as they are, not in fp8: its linear layers have" in log
