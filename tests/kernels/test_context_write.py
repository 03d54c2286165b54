"""The write of all layers into fp8 pools (C6): the rows are those that the block's own path would store."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_sglang.kernels.context import context_write
from dflash_sglang.models.layers import DraftAttention
from dflash_sglang.sglang_names.scheduler import KVWriteLoc
from tests.support import sglang_layers as layers

POSITIONS, SLOTS = (0, 1, 70, 300, 4000), (9, 4, 31, 2, 17)
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def assert_same(got: Tensor, wanted: Tensor, twin: str, device: str) -> None:
    """fp8 tensors are equal: in every bit, but for what is known of the parts that do not run on a GPU."""
    if twin == "triton" and device == "cuda":
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    elif twin == "triton":
        # Triton's interpreter rounds ties otherwise, and loses the carry of a cast up to a power of two.
        bits = [tensor.cpu().view(torch.uint8).int() for tensor in (got, wanted)]
        apart = (bits[0] - bits[1]).abs()
        carry = 8 if got.dtype == torch.float8_e4m3fn else 4
        assert set(apart.unique().tolist()) <= {0, 1, carry}
        assert (apart > 0).float().mean() < 0.1
    else:
        # SGLang's norm in torch rounds elsewhere, and the rotation carries that to smaller elements.
        got, wanted = got.float(), wanted.float()
        step = torch.finfo(torch.bfloat16).eps * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0.26, atol=step)
        assert (got != wanted).float().mean() < 0.03


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rows_are_those_of_the_blocks_keys_through_set_kv_buffer(tmp_path, monkeypatch, twin, device, dtype):
    """`twin` writes all layers; layer by layer, the block's key path and the pool's own write come second."""
    if twin == "triton":
        monkeypatch.setattr(DraftAttention, "_uses_table_kernel", lambda self, x: self.no_table_kernel is None)
    model = layers.make_draft(tmp_path, torch.bfloat16, attention_bias=True)
    attentions = [layer.self_attn for layer in model.layers]
    positions, slots = (torch.tensor(numbers, device=layers.DEVICE) for numbers in (POSITIONS, SLOTS))
    generator = torch.Generator().manual_seed(5)
    kv = 3 * torch.randn(5, 2, 2 * attentions[0].kv_size, generator=generator).bfloat16().to(layers.DEVICE)
    pools = [layers.make_pool(model, slots=40, dtype=dtype) for _ in range(2)]
    rows = context_write.Fp8Rows(
        [pools[0].get_key_buffer(i) for i in (0, 1)], [pools[0].get_value_buffer(i) for i in (0, 1)]
    )
    norms = torch.stack([attention.k_norm.weight.data for attention in attentions])
    rope, eps = attentions[0].rotary_emb.cos_sin_cache, attentions[0].k_norm.variance_epsilon
    getattr(context_write, f"write_fp8_rows_{twin}")(kv, norms, rope, positions, slots, eps, rows)
    for layer, attention in enumerate(attentions):
        k, v = kv[:, layer].clone().chunk(2, dim=-1)
        with torch.no_grad():
            k = attention.finished_keys(k, positions)
        heads = (-1, attention.num_kv_heads, attention.head_dim)
        pools[1].set_kv_buffer(attention.attn, KVWriteLoc(slots), k.reshape(heads), v.reshape(heads))
        for got, wanted in zip(pools[0].get_kv_buffer(layer), pools[1].get_kv_buffer(layer), strict=True):
            untouched = torch.ones(41, dtype=torch.bool).index_fill(0, torch.tensor(SLOTS), False)
            assert (got.cpu().float()[untouched] == 7).all()
            assert_same(got[slots], wanted[slots], twin, device)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_exceeds_the_format_becomes_its_largest_value(twin, device, dtype):
    kv = torch.ones(1, 1, 2 * 16, dtype=torch.bfloat16, device=device)
    kv[..., 16:] = 1e6
    kv[..., 20] = -1e6
    key, value = (torch.zeros(4, 1, 16, device=device).to(dtype) for _ in range(2))
    norms = torch.full((1, 16), 1e6, dtype=torch.bfloat16, device=device)
    angles = torch.tensor([[1.0] * 8 + [0.0] * 8], device=device)
    first, slot = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([2], device=device)
    write = getattr(context_write, f"write_fp8_rows_{twin}")
    write(kv, norms, angles, first, slot, 1e-6, context_write.Fp8Rows([key], [value]))
    most = torch.finfo(dtype).max
    assert (key[2].float() == most).all()
    assert value[2].float().flatten().tolist() == [most] * 4 + [-most] + [most] * 11
    assert not key[3].float().any()
