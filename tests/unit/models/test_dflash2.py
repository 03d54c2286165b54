"""DFlash2 drafts: the served model against the reference in loops, and its loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import sglang_layers as layers
from tests.support.int8_quant import dequantised, int8_config, quantised
from tests.support.reference_dflash2 import ReferenceDFlash2, dflash2_config, dflash2_tensors

pytestmark = layers.cpu_only

PREFIXES = (37, 5)  # committed tokens before the first step; the first is longer than the window of 16
works = pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def make_draft(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, quant_config: Any = None
) -> Any:
    """The served model of a DFlash2 config."""
    tensors = dflash2_tensors(config) if tensors is None else tensors
    return layers.load_draft(directory, config, tensors, quant_config)


class Target(nn.Module):
    """A target with an embedding and a head."""

    def __init__(self, vocab: int = 320, hidden: int = 64, scale: float | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(21)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for module in (self.model.embed_tokens, self.lm_head):
            module.weight.data = torch.randn(vocab, hidden, generator=generator)
        if scale is not None:
            self.get_dflash_noise_embedding_scale = lambda: scale


# ---- The model ---------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "as published": ({}, 8),
    "served narrower than trained": ({}, 5),
    "a block of 16, three taps in groups of 4": (
        {"dflash_config": {"block_size": 16, "conv_kernel_size": 3, "conv_group_size": 4}},
        16,
    ),
    "biases, value scale, causal": (
        {"attention_bias": True, "is_causal": True, "dflash_config": {"attention_value_scale": 0.612}},
        8,
    ),
    "no convolution, capped and multiplied logits": (
        {
            "dflash_config": {
                "conv_kernel_size": None,
                "conv_group_size": None,
                "output_multiplier": 0.4,
                "final_logit_softcapping": 5.0,
            }
        },
        8,
    ),
}


@works
@pytest.mark.parametrize(("overrides", "block"), VARIANTS.values(), ids=VARIANTS.keys())
def test_rows_and_proposals_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, overrides, block
):
    config = dflash2_config(**{**overrides})
    model = make_draft(tmp_path, config)
    model.serve_blocks_of(block)
    served = dict(config, dflash_config={**config["dflash_config"], "block_size": block})
    reference = ReferenceDFlash2.from_weights(served, dflash2_tensors(config))
    assert_steps_equal(model, reference, block)


def assert_steps_equal(model: Any, reference: Any, block: int) -> None:
    """Rows and proposals over three steps of two requests. As verify does, steps write context KV of all rows of a
    block, accepted or not."""
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.models.context_kv.projection import ContextKV

    target = Target()
    model.bind_target(target)
    reader = RowReader(model.head, model.edges, 2, block - 1, drawn=False, device="cpu")
    pool, context = layers.make_pool(model), ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    features = torch.randn(2, 100, model.fc.input_size, generator=generator)  # of the committed text
    lengths = list(PREFIXES)
    for request, length in enumerate(lengths):
        context.write(features[request, :length], torch.arange(length), table[request, :length])

    for accepts in ((1, block), (4, 3), (block, 1)):
        tokens = torch.randint(0, 320, (2, block), generator=generator)
        embeds = model.forward_embed(tokens)
        rows = [torch.arange(length, length + block) for length in lengths]
        attention = layers.PlainAttention(pool, list(zip(table, lengths, strict=True)), block)
        hidden = layers.run_draft(model, embeds.flatten(0, 1).clone(), torch.cat(rows), attention)
        hidden = hidden.view(2, block, -1)
        reader.write(hidden[:, 1:], tokens)
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], rows[request], known)
            torch.testing.assert_close(hidden[request], expected, rtol=1e-4, atol=1e-4)
            anchor = int(tokens[request, 0])
            assert tokens[request, 1:].tolist() == reference.propose(expected, target.lm_head, anchor)
        for request, accept in enumerate(accepts):
            new = features[request, rows[request]].clone()
            new[accept:] = 1e3
            context.write(new, rows[request], table[request, rows[request]])
            lengths[request] += accept


@works
def test_rows_and_edge_scores_equal_those_of_sglangs_own_model(tmp_path):
    """An independent witness: the built-in model on the same checkpoint, not compiled."""
    from sglang.srt.models.dflash import DFlash2DraftModel
    from transformers import PretrainedConfig

    from dflash_sglang.kernels.head.selector_walk import Lattice, selector_walk

    config = dflash2_config(layer_types=["sliding_attention"] * 2)
    model = make_draft(tmp_path, config)
    block, bs = 8, 2
    with torch.compiler.set_stance("force_eager"):
        with layers.defaults(torch.float32):
            built_in = DFlash2DraftModel(PretrainedConfig.from_dict(config))
            built_in.load_weights(dflash2_tensors(config).items())
        embeds = torch.randn(bs * block, 64, generator=torch.Generator().manual_seed(2))
        slots = torch.arange(1, 1 + 2 * 40).view(2, 40)
        positions = torch.cat([torch.arange(20, 28), torch.arange(3, 11)])
        hidden = []
        for one in (model, built_in):
            pool = layers.make_pool(model)
            attention = layers.PlainAttention(pool, [(slots[0], 20), (slots[1], 3)], block)
            hidden.append(layers.run_draft(one, embeds.clone(), positions, attention))
        ours, theirs = hidden
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

        rows = ours.view(bs, block, -1)[:, 1:]
        logits, candidates = torch.randn(bs, 7, 320, generator=torch.Generator().manual_seed(5)).topk(5)
        anchors = torch.tensor([4, 9])
        scores = built_in.candidate_selector.build_lattice(
            candidate_ids=candidates, unary_logits=logits, hidden_states=rows, anchor_token_ids=anchors
        )
        tokens, _ = built_in.candidate_selector.sample_path(
            candidate_ids=candidates,
            scores=scores,
            uniforms=torch.rand(bs, 7),
            temperatures=torch.ones(bs),
            greedy_mask=torch.ones(bs, dtype=torch.bool),
        )
        walked, logprobs = torch.cat([anchors[:, None], torch.zeros_like(tokens)], dim=1), torch.zeros(bs, 7)
        selector_walk(
            model.edges.codebooks, Lattice(candidates, logits, model.edges.project(rows)), walked, logprobs
        )
        assert walked[:, 1:].tolist() == tokens.tolist() and walked[:, 0].tolist() == anchors.tolist()
        assert tokens.tolist() != candidates[..., 0].tolist(), "edges decide, not the logits alone"


def test_convolutions_span_the_rows_of_a_block_whichever_row_proposes_first(tmp_path):
    for first, rows in ((False, 5), (True, 4)):
        config = dflash2_config(sample_from_anchor=first)
        model = layers.load_draft(tmp_path / str(first), config, dflash2_tensors(config))
        assert model.layers[1].mlp_conv.block_size == 8
        model.serve_blocks_of(5)
        assert model.layers[1].mlp_conv.block_size == model.layers[0].attention_conv.block_size == rows


def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path):
    model = make_draft(tmp_path, dflash2_config())
    model.bind_target(Target())
    layers.assert_idle_batch_writes_nothing(model)


def test_the_blocks_embeddings_are_scaled_by_the_draft_or_by_the_target_and_not_by_both(tmp_path):
    model = make_draft(tmp_path, dflash2_config(dflash_config={"input_embedding_scale": 3.0}))
    target = Target()
    model.bind_target(target)
    ids = torch.tensor([5, 3, 3])
    torch.testing.assert_close(model.forward_embed(ids), 3.0 * target.model.embed_tokens.weight[ids])
    message = r"dflash_config.input_embedding_scale=3.0: expected 1.0 or none beside Target.*by 8.0 itself. Remove"
    with pytest.raises(ValueError, match=message):
        model.bind_target(Target(scale=8.0))


# ---- Loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight",
     "layers.1.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_an_error_that_names_it_alone(tmp_path, name):
    config = dflash2_config()
    tensors = dflash2_tensors(config)
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        make_draft(tmp_path, config, tensors)


def test_tensors_of_a_convolution_that_the_config_does_not_have_are_an_error(tmp_path):
    config = dflash2_config(dflash_config={"conv_kernel_size": None, "conv_group_size": None})
    tensors = dflash2_tensors(dflash2_config())
    with pytest.raises(ValueError, match="unexpected tensors .*layers.0.attention_conv.base_kernel"):
        make_draft(tmp_path, config, tensors)


def test_kernels_of_another_size_than_the_configs_are_an_error_that_names_them(tmp_path):
    tensors = dflash2_tensors(dflash2_config())
    config = dflash2_config(dflash_config={"conv_kernel_size": 3})
    with pytest.raises(ValueError, match=r"'layers.0.attention_conv.base_kernel' of shape \(2, 2, 64\)"):
        make_draft(tmp_path, config, tensors)


def test_small_projections_are_quantised_where_the_checkpoint_is_and_not_while_loading(tmp_path):
    small = ("kernel_projection", "hidden_projection")
    config = dflash2_config()
    tensors = dflash2_tensors(config)
    by_loader = make_draft(
        tmp_path / "loader",
        config,
        {k: v for name, tensor in tensors.items() for k, v in _int8(name, tensor, small).items()},
        int8_config(),
    )
    quantised_file = dict(config, quantization_config={"quant_method": "int8"})
    by_file = make_draft(
        tmp_path / "file",
        quantised_file,
        {k: v for name, tensor in tensors.items() for k, v in _int8(name, tensor, ()).items()},
        int8_config(),
    )
    for model, dtype in ((by_loader, torch.float32), (by_file, torch.int8)):
        assert model.layers[0].attention_conv.kernel_projection.weight.dtype == dtype
        assert model.candidate_selector.hidden_projection.weight.dtype == dtype
        assert model.layers[0].mlp.down_proj.weight.dtype == torch.int8
    name = "layers.0.attention_conv.kernel_projection.weight"
    projection = by_file.layers[0].attention_conv.kernel_projection
    rounded = dequantised(projection.weight, projection.weight_scale)
    torch.testing.assert_close(rounded, tensors[name], rtol=0, atol=float(tensors[name].abs().max()) / 120)


def _int8(name: str, tensor: Tensor, kept: tuple[str, ...]) -> dict[str, Tensor]:
    linear = name.endswith("_proj.weight") or name == "fc.weight" or "projection" in name
    if not linear or any(part in name for part in kept):
        return {name: tensor}
    return quantised({name: tensor})
