"""The kernels that finish keys on a GPU (C6): those of the block, of one layer and of all layers agree."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.models.context_kv import projection, writers
from dflash_sglang.models.layers import DraftAttention
from tests.support import sglang_layers as layers


@pytest.fixture(scope="module", autouse=True)
def rank(triton_runs) -> None:
    layers.start_rank()


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """The interpreter's tensors are on the CPU, where the model would take its plain modules."""
    monkeypatch.setattr(DraftAttention, "_uses_table_kernel", lambda self, x: self.no_table_kernel is None)


@pytest.mark.parametrize("scale", [None, 0.612])
def test_block_and_context_keys_have_the_same_bits_whichever_kernel_makes_them(
    tmp_path, kernels_everywhere, scale
):
    overrides = {"attention_bias": True, "dflash_config": {"attention_value_scale": scale}}
    model = layers.make_draft(tmp_path, torch.bfloat16, **overrides)
    attentions = [layer.self_attn for layer in model.layers]
    rows = torch.randn(5, 64, device=layers.DEVICE).bfloat16()
    positions = torch.tensor([0, 1, 70, 300, 4000], device=layers.DEVICE)
    slots = torch.tensor([9, 4, 31, 2, 17], device=layers.DEVICE)
    pool = layers.make_pool(model, slots=40, dtype=torch.bfloat16)
    with torch.no_grad():
        stack = projection._Stack(attentions)
        k_norms = projection._shared([attention.k_norm.weight for attention in attentions])
        buffers = [writers._buffers(pool, attention) for attention in attentions]
        projected = stack.project(rows)
        if layers.DEVICE == "cpu":
            # Squares add up to the same in any order: numpy, in the interpreter, has one of its own per kernel.
            projected = (8 * projected).round() / 8
        writers.AllLayerWriter(attentions, k_norms, buffers).write(projected.clone(), positions, slots)
        for layer, attention in enumerate(attentions):
            k, v = projected[:, layer].clone().chunk(2, dim=-1)
            # The block's rows: queries before the keys, one launch for both.
            block = torch.cat((torch.randn_like(rows[:, : attention.q_size]), k, v), dim=1)
            attention._norm_rope_in_place(block, positions, attention.num_heads)
            block_keys = block[:, attention.q_size : attention.q_size + attention.kv_size]
            assert torch.equal(block[:, -attention.kv_size :], v)
            assert torch.equal(attention.finished_keys(k, positions), block_keys)
            key, value = pool.get_kv_buffer(layer)
            assert torch.equal(key[slots].flatten(1), block_keys)
            assert torch.equal(value[slots].flatten(1), attention.scaled_values(v))
            untouched = torch.ones(41, dtype=torch.bool, device=layers.DEVICE).index_fill(0, slots, False)
            assert bool((key[untouched] == 7).all()) and bool((value[untouched] == 7).all())


def test_the_kernels_norm_and_rotate_as_the_modules_do(tmp_path, kernels_everywhere):
    model = layers.make_draft(tmp_path, torch.bfloat16)
    attention = model.layers[0].self_attn
    k = torch.randn(5, attention.kv_size, device=layers.DEVICE).bfloat16()
    positions = torch.tensor([0, 1, 70, 300, 4000], device=layers.DEVICE)
    with torch.no_grad():
        normed = attention.k_norm.forward_native(k.view(-1, 16)).view(k.shape)
        _, wanted = attention.rotary_emb.forward_native(positions, normed, normed)
        # Two roundings of values below 4; the interpreter truncates where a GPU rounds.
        torch.testing.assert_close(attention.finished_keys(k, positions), wanted, rtol=0, atol=2**-4)
