"""Context KV: every form gives the same rows (C6), in the given slots only, with live weights (C22)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_sglang.models.context_kv import projection
from dflash_sglang.models.context_kv.projection import ContextKV
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config, draft_tensors
from training.reference import ReferenceDraft

VARIANTS = {
    "plain": {},
    "biases": {"attention_bias": True},
    "value scale": {"dflash_config": {"attention_value_scale": 0.612}},
    "half of each head rotated, with biases": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "interleaved rotation": {"rope_is_neox_style": False},
}
POSITIONS = torch.tensor([0, 1, 2, 70, 300])
SLOTS = torch.tensor([9, 4, 31, 2, 17])


@pytest.fixture
def features() -> Tensor:
    return torch.randn(5, 192, generator=torch.Generator().manual_seed(11)).to(layers.DEVICE)


def written(model, form: str, features: Tensor, pool_dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """K and V of each layer at SLOTS after a write into a pool of 7s, none of whose other rows changed."""
    pool = layers.make_pool(model, slots=40, dtype=pool_dtype)
    context = ContextKV(model, form)
    context.bind(pool)
    context.write(features, POSITIONS.to(layers.DEVICE), SLOTS.to(layers.DEVICE))
    untouched = torch.ones(41, dtype=torch.bool).index_fill(0, SLOTS, False)
    for layer in range(len(model.layers)):
        key, value = (buffer.float().cpu() for buffer in pool.get_kv_buffer(layer))
        assert bool((key[untouched] == 7).all()) and bool((value[untouched] == 7).all())
        yield key[SLOTS], value[SLOTS]


@layers.cpu_only
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_both_forms_write_the_references_rows_into_the_given_slots_only(tmp_path, features, overrides):
    config = draft_config(**overrides)
    model = layers.make_draft(tmp_path, **overrides)
    reference = ReferenceDraft.from_weights(config, draft_tensors(config))
    expected = reference.context_kv(features.cpu(), POSITIONS)
    for form in ("stacked", "per_layer"):
        for (k, v), (wanted_k, wanted_v) in zip(
            written(model, form, features, torch.float32), expected, strict=True
        ):
            torch.testing.assert_close(k, wanted_k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(v, wanted_v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16 pool", "fp8 pool"])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_stacked_equals_per_layer_in_bfloat16(tmp_path, features, overrides, pool_dtype):
    model = layers.make_draft(tmp_path, torch.bfloat16, **overrides)
    # One rounding where the order of a sum shows; rotation carries it from a large element to a small one.
    step = torch.finfo(pool_dtype).eps
    forms = [written(model, form, features, pool_dtype) for form in ("stacked", "per_layer")]
    for (k, v), (wanted_k, wanted_v) in zip(*forms, strict=True):
        torch.testing.assert_close(k, wanted_k, rtol=step, atol=step * float(wanted_k.abs().max()))
        torch.testing.assert_close(v, wanted_v, rtol=step, atol=step / 8)


@layers.cpu_only
def test_a_long_prefill_is_written_in_parts_that_add_up(tmp_path, features, monkeypatch):
    model = layers.make_draft(tmp_path)
    whole = list(written(model, "auto", features, model.norm.weight.dtype))
    monkeypatch.setattr(projection, "WRITE_ROWS", 2)
    in_parts = list(written(model, "auto", features, model.norm.weight.dtype))
    for expected, got in zip(whole, in_parts, strict=True):
        torch.testing.assert_close(got, expected)


def test_features_of_another_width_than_fc_takes_are_refused_with_both(tmp_path: Path) -> None:
    context = ContextKV(layers.make_draft(tmp_path))
    with pytest.raises(
        ValueError, match="features of the target are 128 wide: expected 192, which the draft's fc takes"
    ):
        context.project(torch.zeros(5, 128, device=layers.DEVICE))
