"""The served draft forward against the plain-PyTorch reference (C14), and what the draft borrows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config, draft_tensors
from training.reference import ReferenceDraft

BLOCK = 8
PREFIXES = (37, 5)  # committed tokens before the first step; the first is longer than the window of 16
ACCEPTS = ((1, 8), (4, 3), (8, 1))  # tokens that each request commits in each of three steps

VARIANTS = {
    "sliding causal, full non-causal": {},
    "every layer non-causal": {"is_causal": False},
    "every layer causal": {"dflash_config": {"causal": True}},
    "biases, value scale and a quarter of each head rotated": {
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
        "dflash_config": {"attention_value_scale": 0.612},
    },
    "unsorted target layers, interleaved rotation, base 1e6": {
        "rope_is_neox_style": False,
        "rope_theta": 1e6,
        "dflash_config": {"target_layer_ids": [4, 0, 2]},
    },
    "one key-value head and a wider head than hidden / heads": {"num_key_value_heads": 1, "head_dim": 32},
}


pytestmark = layers.cpu_only


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_draft_equals_the_reference_over_three_steps_of_different_accept_lengths(tmp_path, overrides):
    from dflash_sglang.models.context_kv.projection import ContextKV

    config = draft_config(**{**overrides})
    reference = ReferenceDraft.from_weights(config, draft_tensors(config))
    model = layers.make_draft(tmp_path, **overrides)
    pool = layers.make_pool(model)
    context = ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    width = 3 * config["hidden_size"]
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    features = torch.randn(2, 100, width, generator=generator)  # of the committed text
    lengths = list(PREFIXES)
    for request, length in enumerate(lengths):
        context.write(features[request, :length], torch.arange(length), table[request, :length])

    for accepts in ACCEPTS:
        embeds = torch.randn(2, BLOCK, config["hidden_size"], generator=generator)
        rows = [torch.arange(length, length + BLOCK) for length in lengths]
        attention = layers.PlainAttention(pool, list(zip(table, lengths, strict=True)), BLOCK)
        hidden = layers.run_draft(model, embeds.flatten(0, 1).clone(), torch.cat(rows), attention)
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], rows[request], known)
            torch.testing.assert_close(hidden.view(2, BLOCK, -1)[request], expected, rtol=1e-4, atol=1e-4)
        # The verify writes context KV of all rows: the committed ones, then those of rejected proposals.
        for request, accept in enumerate(accepts):
            new = features[request, rows[request]].clone()
            new[accept:] = 1e3
            context.write(new, rows[request], table[request, rows[request]])
            lengths[request] += accept


def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path):
    model = layers.make_draft(tmp_path)
    model.bind_target(Target())
    layers.assert_idle_batch_writes_nothing(model)


def test_the_runner_gets_the_keys_left_of_a_query_as_window(tmp_path):
    model = layers.make_draft(tmp_path / "sliding")
    assert model.get_attention_sliding_window_size() == 15
    assert [layer.self_attn.attn.sliding_window_size for layer in model.layers] == [15, -1]
    full = layers.make_draft(tmp_path / "full", layer_types=["full_attention"] * 2)
    assert full.get_attention_sliding_window_size() is None
    one = layers.make_draft(tmp_path / "one", sliding_window=1)
    assert one.layers[0].self_attn.attn.sliding_window_size == 0


class Target(nn.Module):
    """A target as SGLang nests it: embedding and head in a language model."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = nn.Module()
        self.language_model.model.embed_tokens = nn.Embedding(320, 64)
        self.language_model.lm_head = nn.Linear(64, 320, bias=False)
        if scale is not None:
            self.get_dflash_noise_embedding_scale = lambda: scale


def test_the_draft_embeds_with_the_targets_table_and_keeps_it_out_of_its_own_state(tmp_path):
    model = layers.make_draft(tmp_path)
    ids = torch.tensor([5, 3, 3])
    with pytest.raises(RuntimeError, match="bind_target"):
        model.forward_embed(ids)
    own = set(model.state_dict())
    target = Target(scale=8.0)
    model.bind_target(target)
    table = target.language_model.model.embed_tokens.weight
    torch.testing.assert_close(model.forward_embed(ids), table[ids] * 8.0)
    assert set(model.state_dict()) == own
    assert all(parameter is not table for parameter in model.parameters())
    hidden = torch.randn(4, 64)
    expected = (hidden @ target.language_model.lm_head.weight.T).argmax(-1)
    assert model.head.likeliest(hidden, 1).ids[:, 0].tolist() == expected.tolist()
