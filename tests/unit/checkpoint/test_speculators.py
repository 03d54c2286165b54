"""Drafts in the speculators format against the speculators package: what its classes compute, ours propose.

Random drafts are made, saved and run by the package itself; `training` there is one forward over every anchor of a
text. Without the package the comparisons are skipped (`pip install 'dflash_sglang[test]'` brings it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_sglang.checkpoint import DraftSpec, read_config
from tests.engine.test_formats import Target, loaded
from tests.support import sglang_layers as layers
from tests.support.draft_formats import FORMATS, KEPT, speculators_config, vocabulary_tensors
from tests.support.tiny import draft_config

BLOCK, LENGTH = 8, 193
ANCHORS = range(1, LENGTH - BLOCK)  # 184 of them, with 7 proposals each


# ---- The config ------------------------------------------------------------------------------------------------


def test_layers_ascend_as_training_feeds_their_features() -> None:
    spec = DraftSpec.from_config(speculators_config(draft_config(), aux_hidden_state_layer_ids=[5, 2, 4]))
    assert spec.target_layer_ids == (1, 3, 4)
    assert spec.named_layer_ids((1, 3, 4)) == ("aux_hidden_state_layer_ids", [2, 4, 5])
    assert DraftSpec.from_config(draft_config(dflash_config={"target_layer_ids": [4, 1, 3]})).target_layer_ids == (
        4, 1, 3,
    )  # fmt: skip


# ---- The target's embedding ------------------------------------------------------------------------------------


@layers.cpu_only
def test_rows_of_a_target_that_scales_them_are_taken_as_they_are_stored(tmp_path: Path) -> None:
    from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding

    layers.start_rank()
    target = Target()
    target.embed_tokens = Gemma3TextScaledWordEmbedding(320, 64, 0, embed_scale=8.0)
    ids = torch.tensor([41, 3, 3])
    stored = target.embed_tokens.weight[ids]
    formats = {"speculators with nothing of its own": stored, "z-lab with its own head": 8.0 * stored}
    for name, expected in formats.items():
        model = loaded(FORMATS[name](tmp_path / name), target)
        torch.testing.assert_close(model.forward_embed(ids), expected)


# ---- Every proposal --------------------------------------------------------------------------------------------

FULL = ["full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DFLASH2_NAMES = dict(speculators_model_type="dflash2", architectures=["DFlash2DraftModel"])
SIZES = dict(conv_kernel_size=3, conv_group_size=4, selector_rank=12, selector_top_k=5)
DFLASH2: dict[str, Any] = {**DFLASH2_NAMES, **SIZES}
DSPARK = dict(speculators_model_type="dspark", architectures=["DSparkSpeculator"], markov_rank=12)
SLIDING = dict(
    layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=LENGTH + BLOCK
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
BY_TYPE = dict(
    sliding_attention={"rope_type": "default", "rope_theta": 100.0},
    full_attention={"rope_type": "default", "rope_theta": 1e6},
)
PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
UNREAD = dict(is_causal=True, dflash_config={"causal": True, "final_logit_softcapping": 0.1, "block_size": 4})

# name: fields of the config, fields of its decoder (None removes), modules of the draft's own
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "DFlash, a reduced vocabulary": (dict(draft_vocab_size=len(KEPT)), {}, "embed_tokens lm_head"),
    "DFlash, biases": ({}, dict(attention_bias=True), ""),
    "DFlash, sliding layers causal": ({}, SLIDING, "embed_tokens lm_head"),
    "DFlash, sliding layers not causal": (dict(sliding_window_non_causal=True), SLIDING, ""),
    "DFlash, fields that the package does not read": (UNREAD, dict(SLIDING, is_causal=False), ""),
    "DFlash, YaRN": ({}, dict(rope_parameters=YARN), ""),
    "DFlash, a rope by layer type": ({}, dict(SLIDING, rope_parameters=BY_TYPE), ""),
    "DFlash, partial rope parameters": ({}, dict(rope_parameters=PARTIAL), ""),
    "DFlash, a partial decoder": ({}, dict(partial_rotary_factor=0.5), ""),
    "DFlash, a Llama decoder without head_dim": ({}, dict(model_type="llama", head_dim=None), ""),
    "DFlash2, sliding layers not causal by default": (DFLASH2, SLIDING, ""),
    "DFlash2, sliding layers causal": (dict(DFLASH2, sliding_window_non_causal=False), SLIDING, ""),
    "DFlash2, sizes by default": (dict.fromkeys(SIZES) | DFLASH2_NAMES, SLIDING, ""),
    "DSpark, a vanilla Markov head": (DSPARK, SLIDING, ""),
    "DSpark, a gated Markov head": (dict(DSPARK, markov_head_type="gated"), {}, "embed_tokens lm_head"),
    "DSpark, an rnn Markov head": (dict(DSPARK, markov_head_type="rnn"), {}, ""),
    "DSpark, no Markov head": (dict(DSPARK, markov_rank=0, confidence_head_with_markov=False), {}, ""),
    "DFlash, from the anchor": (dict(sample_from_anchor=True), SLIDING, ""),
    "DFlash, from the anchor, a reduced vocabulary": (dict(sample_from_anchor=True, draft_vocab_size=len(KEPT)),
     {}, "embed_tokens lm_head"),
    "DFlash2, from the anchor": (dict(DFLASH2, sample_from_anchor=True), SLIDING, ""),
    "DSpark, not from the anchor": (dict(DSPARK, sample_from_anchor=False), {}, ""),
}  # fmt: skip


def written(fields: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    """config.json with `fields` and a decoder with `decoder`; None removes."""
    zlab = draft_config(rope_theta=None, rope_parameters=ROPE, layer_types=FULL, sliding_window=None)
    top = speculators_config(zlab, aux_hidden_state_layer_ids=[2, 4, 5], sliding_window_non_causal=None)
    unsaid = ("projector_type", "sample_from_anchor", "speculators_config", "auto_map")
    top |= {**dict.fromkeys(unsaid), **fields}
    nested = {**top.pop("transformer_layer_config"), **decoder}
    top["transformer_layer_config"] = {key: value for key, value in nested.items() if value is not None}
    return json.loads(json.dumps({key: value for key, value in top.items() if value is not None}))


@pytest.fixture(scope="module")
def rank() -> None:
    pytest.importorskip("speculators", reason="the speculators package is not installed")
    layers.start_rank()


def exported(directory: Path, config: dict[str, Any], own: str, target: Target) -> Any:
    """The package's model of a config.json, with random weights and the target's head and embedding, and its own
    export of it in `directory`, where it also writes the modules `own`."""
    from speculators.config import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    parsed_config = SpeculatorModelConfig.from_dict(config)
    parsed_config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.registered_model_class_from_config(parsed_config)(parsed_config).eval()
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("base_kernel"):
            parameter.data += 0.5 * noise
        elif parameter.dim() == 1:
            sharp = 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            parameter.data = 0.1 * noise + (0.0 if name.endswith("bias") else sharp)
        else:
            parameter.data = noise * (1.0 if "predecessor" in name else parameter.shape[-1] ** -0.5)
    if not own:
        model.embed_tokens.weight.data = target.embed_tokens.weight.data.clone()
        model.lm_head.weight.data = target.lm_head.weight.data.clone()
    if model.use_draft_vocab:
        mapping = vocabulary_tensors(KEPT, 320)
        model.load_vocab_mappings(mapping["t2d"], mapping["d2t"])
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    added = {f"{name}.weight": getattr(model, name).weight.data.clone() for name in own.split()}
    save_file({**load_file(file), **added}, file)
    return model


@torch.no_grad()
def proposals_of_the_package(model: Any, features: Tensor, tokens: Tensor) -> Tensor:
    """features [LENGTH, layers * hidden], tokens [LENGTH] -> [anchors, proposals], the target's ids."""
    mask = torch.ones(1, LENGTH)
    mask[:, 0] = 0
    hidden, logits, *_ = model._backbone_forward(
        features[None], tokens[None], mask, features[None, :, :64], torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=len(ANCHORS),
    )  # fmt: skip
    is_dspark = hasattr(model, "markov_head")
    first = 0 if model.config.sample_from_anchor else 1
    hidden, logits = (rows.view(len(ANCHORS), BLOCK, -1)[:, first:] for rows in (hidden, logits))
    walk = [tokens[list(ANCHORS)]]
    if is_dspark and model.markov_head is not None:  # among the 16 likeliest tokens of a row
        for step in range(BLOCK - first):
            rows, before = hidden[:, : step + 1], torch.stack(walk, dim=1)
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=rows)
            likeliest, ids = logits[:, step].topk(16)
            index = (likeliest + bias[:, -1].gather(1, ids)).argmax(-1, keepdim=True)
            walk.append(ids.gather(1, index)[:, 0])
        return torch.stack(walk[1:], dim=1)
    if not hasattr(model, "candidate_selector"):
        ids = logits.argmax(-1)
        return ids if model.d2t is None else ids + model.d2t[ids]
    for step in range(BLOCK - first):
        candidates, scores = model.candidate_selector.select(logits[:, step], hidden[:, step], walk[-1])
        walk.append(candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0])
    return torch.stack(walk[1:], dim=1)


@torch.no_grad()
def proposals_of_ours(directory: Path, target: Target, features: Tensor, tokens: Tensor) -> Tensor:
    """The same of the served model, loaded from the package's export: one batch with a request per anchor."""
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.models.context_kv.projection import ContextKV
    from dflash_sglang.models.dflash2 import DFlash2DraftModel
    from dflash_sglang.models.draft import DFlashDraftModel
    from dflash_sglang.models.dspark import DSparkDraftModel

    spec = DraftSpec.from_config(read_config(directory))
    plain = DFlashDraftModel if spec.dspark is None else DSparkDraftModel
    with layers.defaults(torch.float32):
        model = (plain if spec.dflash2 is None else DFlash2DraftModel)(layers.hf_config(directory))
        model.load_weights(load_file(directory / "model.safetensors").items())
    model.bind_target(target)
    count = len(ANCHORS)
    pool, context = layers.make_pool(model, slots=LENGTH + count * BLOCK), ContextKV(model)
    context.bind(pool)
    known = 1 + torch.arange(LENGTH)
    context.write(features, torch.arange(LENGTH), known)
    own = 1 + LENGTH + torch.arange(count * BLOCK).view(count, BLOCK)
    requests = [(torch.cat((known[:a], own[i])), a) for i, a in enumerate(ANCHORS)]
    blocks = torch.full((count, BLOCK), model.spec.mask_token_id)
    blocks[:, 0] = tokens[list(ANCHORS)]
    positions = torch.cat([torch.arange(a, a + BLOCK) for a in ANCHORS])
    hidden = layers.run_draft(
        model, model.forward_embed(blocks).flatten(0, 1), positions, layers.PlainAttention(pool, requests, BLOCK)
    )
    steps = spec.block_size - 1
    hidden = hidden.view(count, BLOCK, -1)[:, -steps:]
    if model.edges is None:
        return model.head.likeliest(hidden.flatten(0, 1), 1).ids[:, 0].view(count, -1)
    walks = torch.zeros((count, steps + 1), dtype=torch.int64)
    walks[:, 0] = blocks[:, 0]
    RowReader(model.head, model.edges, count, steps, drawn=False, device="cpu").write(hidden, walks)
    return walks[:, 1:]


def row(name: str) -> pytest.MarkDecorator:
    family = name.partition(",")[0]
    draft = "speculators, as the speculators package" if family == "DFlash" else f"speculators {family}"
    return pytest.mark.matrix(target="Qwen3", draft=draft, kv="model dtype", outcome="works")


@layers.cpu_only
@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("name", [pytest.param(name, marks=row(name)) for name in DRAFTS])
def test_every_proposal_is_the_packages_own(tmp_path: Path, name: str) -> None:
    fields, decoder, own = DRAFTS[name]
    config, target = written(fields, decoder), Target()
    model = exported(tmp_path, config, own, target)
    assert DraftSpec.from_config(config) == DraftSpec.from_config(read_config(tmp_path))
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(LENGTH, 3 * 64, generator=generator)
    tokens = torch.randint(0, 320, (LENGTH,), generator=generator)
    expected = proposals_of_the_package(model, features, tokens)
    assert len(expected.unique()) > 30  # they depend on what is read
    assert int((proposals_of_ours(tmp_path, target, features, tokens) != expected).sum()) == 0
