"""Drafts of all served families: the model against plain PyTorch and against SGLang's own, and its loading."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.configs.laguna import LagunaConfig, normalize_gating
from sglang.srt.models import dflash
from sglang.srt.utils.hf_transformers.common import get_rope_config
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import check_family, foreign
from dflash_sglang.kernels.head.selector_walk import Lattice, selector_walk
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.startup.facts import LoadError
from tests.support import sglang_layers as layers
from tests.support.draft_formats import matrix, speculators_config, vocabulary_tensors
from tests.support.int8_quant import dequantised, int8_config, quantised
from tests.support.reference_dflash2 import ReferenceDFlash2, dflash2_config, dflash2_tensors
from tests.support.reference_domino import ReferenceDomino, domino_config, domino_tensors
from tests.support.reference_dspark import ReferenceDSpark, dspark_config, dspark_tensors
from tests.support.reference_gemma4 import ReferenceGemma4, gemma4_config, gemma4_tensors
from tests.support.reference_layers import LAGUNA, SWIGLU, is_norm, layer_tensors, reference_draft
from tests.support.reference_walks import Target, assert_equals_the_reference
from tests.support.tiny import draft_config

pytestmark = layers.cpu_only

GEMMA = dict(use_gemma_norm=True)
laguna, swigluoai = (functools.partial(draft_config, **fields) for fields in (LAGUNA, SWIGLU))
REDUCED = [int(token) for token in torch.randperm(320, generator=torch.Generator().manual_seed(4))[:60]]


class Draft(NamedTuple):
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    reference: Callable[[dict[str, Tensor]], Any]  # of these weights

    def load(self, directory: Any, quant_config: Any = None) -> Any:
        return layers.load_draft(directory, self.config, self.tensors, quant_config)


def plain(block: int = 8, **fields: Any) -> Draft:
    config = draft_config(block_size=block, **fields)
    return Draft(config, layer_tensors(config), functools.partial(reference_draft, config))


def dflash2(served: int = 8, **fields: Any) -> Draft:
    config = dflash2_config(**fields)
    of_served = dict(config, dflash_config={**config["dflash_config"], "block_size": served})
    return Draft(config, dflash2_tensors(config), functools.partial(ReferenceDFlash2.from_weights, of_served))


def domino(block: int = 8, shifted: bool = True) -> Draft:
    config = domino_config(block_size=block, dflash_config=dict(shift_label=shifted))
    embed = Target().model.embed_tokens
    return Draft(config, domino_tensors(config), lambda weights: ReferenceDomino.of_target(config, weights, embed))


def dspark(block: int = 8, kind: str = "vanilla") -> Draft:
    config = dspark_config(block_size=block - 1, markov_head_type=kind)
    return Draft(config, dspark_tensors(config), functools.partial(ReferenceDSpark.from_weights, config))


def reduced(block: int = 8, kind: str = "vanilla") -> Draft:
    """In the speculators format, of a draft that knows the tokens REDUCED, in this order."""
    config = dspark_config(block_size=block - 1, markov_head_type=kind, draft_vocab_size=len(REDUCED))
    tensors = dspark_tensors(config) | vocabulary_tensors(REDUCED, 320)
    tensors["lm_head.weight"] = matrix(len(REDUCED), 64, 12)
    fields = {name: config[name] for name in ("architectures", "draft_vocab_size", "markov_rank")}
    written = speculators_config(
        config, speculators_model_type="dspark", markov_head_type=kind, sample_from_anchor=True,
        sliding_window_non_causal=True, **fields,
    )  # fmt: skip
    return Draft(written, tensors, functools.partial(ReferenceDSpark.from_weights, config))


def padded() -> Draft:
    """Whose head and Markov matrix have rows beyond the vocabulary, which would win."""
    config = dspark_config(draft_vocab_size=384)
    own = {"lm_head.weight": torch.cat((matrix(320, 64, 12), 100 * matrix(64, 64, 13)))}
    return Draft(config, dspark_tensors(config) | own, functools.partial(ReferenceDSpark.from_weights, config))


def gemma4(block: int = 8, **fields: Any) -> Draft:
    config = gemma4_config(block_size=block - 1, **fields)
    return Draft(config, gemma4_tensors(config), functools.partial(ReferenceGemma4.from_weights, config))


PARTS = dict(attention_bias=True, dflash_config={"attention_value_scale": 0.612})
NO_TAPS = dict(conv_kernel_size=None, conv_group_size=None)
NO_CONVOLUTION = dict(**NO_TAPS, output_multiplier=0.4, final_logit_softcapping=5.0)
TWO_HEADS = dict(num_global_key_value_heads=2, attention_bias=True, final_logit_softcapping=2.0)
# (name, block, the support matrix's name, draft)
# fmt: off
FAMILIES: list[tuple[str, int, str, Callable[[], Draft]]] = [
    ("plain", 8, "z-lab", plain),
    ("no layer causal", 16, "z-lab", lambda: plain(16, is_causal=False)),
    ("all layers causal", 5, "z-lab", lambda: plain(5, dflash_config={"causal": True})),
    ("biases, value scale, a quarter rotated", 8, "z-lab", lambda: plain(partial_rotary_factor=0.25, **PARTS)),
    ("unsorted target layers, interleaved rotation", 8, "z-lab", lambda: plain(
        rope_is_neox_style=False, rope_theta=1e6, dflash_config={"target_layer_ids": [4, 0, 2]})),
    ("one wide key-value head", 8, "z-lab", lambda: plain(num_key_value_heads=1, head_dim=32)),
    ("Gemma norms", 5, "Gemma norms", lambda: plain(5, **GEMMA)),
    ("swigluoai", 16, "swigluoai", lambda: plain(16, **SWIGLU)),
    ("Gemma norms, swigluoai", 8, "Gemma norms and swigluoai", lambda: plain(
        **GEMMA, **SWIGLU, attention_bias=True)),
    ("Laguna", 8, "Laguna", lambda: plain(**LAGUNA)),
    ("Laguna by channel", 16, "Laguna, a gate per channel", lambda: plain(
        16, **{**LAGUNA, "gating": "per-element"})),
    ("Laguna ungated", 5, "Laguna without gates", lambda: plain(5, **{**LAGUNA, "gating": "disabled"})),
    ("DFlash2", 8, "DFlash2", dflash2),
    ("DFlash2, narrower than trained", 5, "DFlash2", lambda: dflash2(5)),
    ("DFlash2, three taps in groups of 4", 16, "DFlash2", lambda: dflash2(
        16, dflash_config={"block_size": 16, "conv_kernel_size": 3, "conv_group_size": 4})),
    ("DFlash2, biases, value scale, causal", 8, "DFlash2", lambda: dflash2(is_causal=True, **PARTS)),
    ("DFlash2, no convolution", 8, "DFlash2", lambda: dflash2(dflash_config=NO_CONVOLUTION)),
    ("Domino", 8, "Domino", domino),
    ("Domino, wide", 16, "Domino", lambda: domino(16)),
    ("Domino in place", 5, "Domino", lambda: domino(5, shifted=False)),
    ("DSpark", 16, "DSpark", lambda: dspark(16)),
    ("DSpark, gated", 5, "DSpark", lambda: dspark(5, "gated")),
    ("DSpark, rnn", 8, "DSpark", lambda: dspark(8, "rnn")),
    ("DSpark, padded head", 8, "DSpark", padded),
    ("DSpark, reduced", 8, "speculators DSpark, a reduced vocabulary", reduced),
    ("DSpark, reduced, gated", 16, "speculators DSpark, a reduced vocabulary", lambda: reduced(16, "gated")),
    ("DSpark, reduced, rnn", 5, "speculators DSpark, a reduced vocabulary", lambda: reduced(5, "rnn")),
    ("Gemma 4", 16, "DSpark of Gemma 4's layers", lambda: gemma4(16)),
    ("Gemma 4, two heads", 5, "DSpark of Gemma 4's layers", lambda: gemma4(5, **TWO_HEADS)),
]
# fmt: on
BY_NAME = {name: draft for name, _, _, draft in FAMILIES}


@pytest.mark.parametrize(
    ("block", "draft"),
    [
        pytest.param(
            block, draft, id=name,
            marks=pytest.mark.matrix(target="Qwen3", draft=shown, kv="model dtype", outcome="works"),
        )
        for name, block, shown, draft in FAMILIES
    ],
)  # fmt: skip
def test_rows_proposals_and_q_equal_the_reference(tmp_path, block, draft):
    made, target = draft(), Target()
    assert foreign(made.config) is None
    model = made.load(tmp_path)
    model.bind_target(target, vocab_size=320)
    model.serve_blocks_of(block)
    assert_equals_the_reference(model, made.reference(made.tensors), target.lm_head, block)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("name", ["DFlash2", "Laguna"])
def test_small_projections_are_quantised_where_the_checkpoint_is_and_not_while_loading(tmp_path, name, in_file):
    made, small = BY_NAME[name](), (".g_proj.", "kernel_projection", "hidden_projection")
    held, rounded = {}, {}
    for one, tensor in made.tensors.items():
        linear = one == "fc.weight" or one.endswith("_proj.weight") or "projection" in one
        linear &= in_file or not any(part in one for part in small)
        held |= quantised(one, tensor) if linear else {one: tensor}
        scale = one.removesuffix(".weight") + ".weight_scale"
        rounded[one] = dequantised(held[one], held[scale]) if linear else tensor
    config = made.config | ({"quantization_config": {"quant_method": "int8"}} if in_file else {})
    model, target = Draft(config, held, made.reference).load(tmp_path, int8_config()), Target()
    found = {
        p.dtype for n, p in model.named_parameters() if n.endswith(".weight") and any(of in n for of in small)
    }
    assert found == {torch.int8 if in_file else torch.float32}
    model.bind_target(target)
    assert_equals_the_reference(model, made.reference(rounded), target.lm_head, 8)
    assert ContextKV(model).form == "per_layer"
    why = (
        "each layer norms its context rows"
        if name == "Laguna"
        else "layers.0.self_attn.qkv_proj is served by Int8"
    )
    with pytest.raises(LoadError, match=f"but {why}.*Set context_kv to 'auto'"):
        ContextKV(model, "stacked")


def run(model: Any, pool: Any, embeds: Tensor) -> Tensor:
    """Of two blocks of 8 rows, behind 20 and 3 tokens."""
    slots, prefixes = torch.arange(1, 1 + 2 * 40).view(2, 40), (20, 3)
    attention = layers.PlainAttention(pool, list(zip(slots, prefixes, strict=True)), 8)
    positions = torch.cat([torch.arange(n, n + 8) for n in prefixes])
    return layers.run_draft(model, embeds.clone(), positions, attention)


BUILT_IN = ("DFlash2", "Gemma norms", "swigluoai", "Gemma norms, swigluoai", "Laguna", "Laguna by channel",
            "Laguna ungated")  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_rows_equal_those_of_sglangs_own_model(tmp_path, name):
    """An independent witness: the built-in model on the same checkpoint, not compiled."""
    from transformers import PretrainedConfig

    made = BY_NAME[name]()
    config = made.config | {"layer_types": ["sliding_attention"] * 2}
    model = made._replace(config=config).load(tmp_path)

    def random(*shape: int, seed: int = 2) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    with torch.compiler.set_stance("force_eager"):
        with layers.defaults(torch.float32):
            built_in = getattr(dflash, config["architectures"][0])(PretrainedConfig.from_dict(config))
            built_in.load_weights(made.tensors.items())
        hidden = [run(one, layers.make_pool(model), random(16, 64)) for one in (model, built_in)]
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)

        features, context, positions = random(9, model.fc.input_size, seed=4), ContextKV(model), torch.arange(9)
        rows, theirs = context.project(features), built_in.project_target_hidden(features)
        torch.testing.assert_close(rows, theirs, rtol=1e-4, atol=1e-4)
        for layer, (keys, values) in zip(built_in.layers, context.keys_values(rows, positions), strict=True):
            attention = layer.self_attn
            k, v = attention.kv_proj_only(built_in.prepare_context_hidden_for_kv(layer, theirs))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            torch.testing.assert_close(keys, k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, v, rtol=1e-4, atol=1e-4)
        if model.edges is None:
            return

        rows, anchors = hidden[0].view(2, 8, -1)[:, 1:], torch.tensor([4, 9])
        logits, candidates = random(2, 7, 320, seed=5).topk(5)
        scores = built_in.candidate_selector.build_lattice(
            candidate_ids=candidates, unary_logits=logits, hidden_states=rows, anchor_token_ids=anchors
        )
        tokens, _ = built_in.candidate_selector.sample_path(
            candidate_ids=candidates, scores=scores, uniforms=torch.rand(2, 7), temperatures=torch.ones(2),
            greedy_mask=torch.ones(2, dtype=torch.bool),
        )  # fmt: skip
        walked = torch.cat([anchors[:, None], torch.zeros_like(tokens)], dim=1)
        selector_walk(model.edges.codebooks, Lattice(candidates, logits, model.edges.project(rows)), walked)
        assert walked[:, 1:].tolist() == tokens.tolist() != candidates[..., 0].tolist()


@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "Qwen3DSparkModel"])
def test_gemma_norms_of_other_families_are_plain_norms_of_one_more(tmp_path, architecture):
    made = dspark() if architecture == "Qwen3DSparkModel" else dflash2(architectures=[architecture])
    of_gemma = {name: tensor - 1 if is_norm(name) else tensor for name, tensor in made.tensors.items()}
    other = made._replace(config=made.config | GEMMA, tensors=of_gemma)
    assert foreign(other.config) is None
    embeds = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    models = [one.load(tmp_path / str(i)) for i, one in enumerate((made, other))]
    hidden = [run(model, layers.make_pool(model), embeds) for model in models]
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["plain", "DFlash2", "Gemma norms, swigluoai", "Laguna", "Laguna ungated", "Gemma 4"]
)
def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path, name):
    model = BY_NAME[name]().load(tmp_path)
    model.bind_target(Target())
    layers.assert_idle_batch_writes_nothing(model)


@pytest.mark.parametrize("name", ["Laguna", "Gemma 4"])
def test_context_rows_and_values_that_are_normed_are_so_in_both_forms_of_the_projection(tmp_path, name):
    made = BY_NAME[name]()
    layers.assert_context_kv(made.load(tmp_path), made.reference(made.tensors))


# ---- What the draft borrows, and what the runner asks of it --------------------------------------------------


def test_the_draft_embeds_with_the_targets_table_and_keeps_it_out_of_its_own_state(tmp_path):
    model, target, ids = plain().load(tmp_path), Target(scale=8.0), torch.tensor([5, 3, 3])
    with pytest.raises(RuntimeError, match="bind_target"):
        model.forward_embed(ids)
    own = set(model.state_dict())
    model.bind_target(target)
    table = target.model.embed_tokens.weight
    torch.testing.assert_close(model.forward_embed(ids), table[ids] * 8.0)
    assert set(model.state_dict()) == own and all(parameter is not table for parameter in model.parameters())


def test_the_blocks_embeddings_are_scaled_by_the_draft_or_by_the_target_and_not_by_both(tmp_path):
    made, target, ids = dflash2(dflash_config={"input_embedding_scale": 3.0}), Target(), torch.tensor([5, 3, 3])
    model = made.load(tmp_path / "dflash2")
    model.bind_target(target)
    torch.testing.assert_close(model.forward_embed(ids), 3.0 * target.model.embed_tokens.weight[ids])
    message = r"dflash_config.input_embedding_scale=3.0: expected 1.0 or none beside Target.*by 8.0 itself. Remove"
    with pytest.raises(ValueError, match=message):
        model.bind_target(Target(scale=8.0))
    made = gemma4()
    model, reference = made.load(tmp_path / "gemma4"), made.reference(made.tensors)
    model.bind_target(Target(scale=8.0))  # the draft has a table of its own
    torch.testing.assert_close(model.forward_embed(ids), reference.model.embed_tokens(ids))


def test_the_runner_gets_the_keys_left_of_a_query_as_window(tmp_path):
    for i, (fields, window, of_layers) in enumerate((
        ({}, 15, [15, -1]),
        ({"layer_types": ["full_attention"] * 2}, None, [-1, -1]),
        ({"sliding_window": 1}, 0, [0, -1]),
    )):  # fmt: skip
        model = plain(**fields).load(tmp_path / str(i))
        assert model.get_attention_sliding_window_size() == window
        assert [layer.self_attn.attn.sliding_window_size for layer in model.layers] == of_layers


def test_convolutions_span_the_rows_of_a_block_whichever_row_proposes_first(tmp_path):
    for first, rows in ((False, 5), (True, 4)):
        model = dflash2(sample_from_anchor=first).load(tmp_path / str(first))
        assert model.layers[1].mlp_conv.block_size == 8
        model.serve_blocks_of(5)
        assert model.layers[1].mlp_conv.block_size == model.layers[0].attention_conv.block_size == rows


def test_kernels_that_norm_otherwise_than_the_draft_are_left_out(tmp_path):
    for name, why in (
        ("Gemma norms", "the draft's norms scale by 1 + weight"),
        ("Gemma 4", "the draft norms its values"),
        ("swigluoai", None),
    ):
        model = BY_NAME[name]().load(tmp_path / name)
        assert {layer.self_attn.no_table_kernel for layer in model.layers} == {why}


# ---- Loading -------------------------------------------------------------------------------------------------

# fmt: off
MISSING = [
    ("DFlash2", "candidate_selector.predecessor_codebook"),
    ("DFlash2", "candidate_selector.hidden_projection.weight"),
    ("DFlash2", "layers.1.mlp_conv.base_kernel"),
    ("DFlash2", "layers.0.attention_conv.kernel_projection.weight"),
    ("Laguna", "aux_hidden_norms.2.weight"),
    ("Laguna", "layers.1.self_attn.g_proj.weight"),
    ("Gemma 4", "layers.1.layer_scalar"),
    ("Gemma 4", "layers.1.pre_feedforward_layernorm.weight"),
    ("Gemma 4", "layers.1.self_attn.k_norm.weight"),
]
VALUES = "layers.1.self_attn.v_proj.weight"
# (draft, fields that its config has otherwise, tensors that it has otherwise, what is said)
WRONG: list[tuple[Callable[[], Draft], dict[str, Any], dict[str, Tensor], str]] = [
    (dflash2, {"dflash_config": dflash2_config(dflash_config=NO_CONVOLUTION)["dflash_config"]}, {},
     "unexpected tensors .*layers.0.attention_conv.base_kernel"),
    (dflash2, {"dflash_config": dflash2_config(dflash_config={"conv_kernel_size": 3})["dflash_config"]}, {},
     r"'layers.0.attention_conv.base_kernel' of shape \(2, 2, 64\)"),
    (BY_NAME["Laguna by channel"], {"gating": "per-head"}, {},
     r"'layers.0.self_attn.g_proj.weight' of shape \(64, 64\)"),
    (BY_NAME["Gemma norms"], {}, {"hidden_norm.weight": torch.zeros(32)},
     r"'hidden_norm.weight' of shape \(32,\) .* expected shape \(64,\)"),
    (reduced, {}, {"markov_head.markov_w2.weight": torch.zeros(320, 12)},
     r"'markov_head.markov_w2.weight' of shape \(320, 12\).*expected shape \(60, 12\)"),
    (gemma4, {}, {VALUES: torch.zeros(32, 64)},
     f"unexpected tensor {re.escape(repr(VALUES))}. Expected none of v_proj"),
]
# fmt: on


def test_a_missing_tensor_of_a_family_is_an_error_that_names_it_alone(tmp_path):
    for i, (name, lost) in enumerate(MISSING):
        made = BY_NAME[name]()
        del made.tensors[lost]
        with pytest.raises(ValueError, match=rf"missing tensors \['{re.escape(lost)}'\]"):
            made.load(tmp_path / str(i))


def test_a_tensor_of_another_shape_or_none_of_the_familys_is_an_error_that_names_it(tmp_path):
    for i, (draft, fields, tensors, says) in enumerate(WRONG):
        made = draft()
        with pytest.raises(ValueError, match=says):
            made._replace(config=made.config | fields, tensors=made.tensors | tensors).load(tmp_path / str(i))


def test_an_update_puts_rows_where_loading_did(tmp_path):
    """Rows of a reduced vocabulary at their tokens; a key projection of Gemma 4's layers is one of the values."""
    made = reduced()
    model = made.load(tmp_path / "reduced")
    model.bind_target(Target())
    new = made.tensors["markov_head.markov_w2.weight"] + 1
    model.load_weights([("markov_head.markov_w2.weight", new)])
    assert torch.equal(model.edges.codebooks.successor[REDUCED], new)
    model, new = gemma4().load(tmp_path / "gemma4"), torch.randn(32, 64)
    model.load_weights([(VALUES.replace("v_proj", "k_proj"), new)])
    assert torch.equal(model.layers[1].self_attn.qkv_proj.weight[-64:], torch.cat((new, new)))


# ---- Configs -------------------------------------------------------------------------------------------------

FULL = gemma4_config()["rope_parameters"]["full_attention"]
# fmt: off
# (config, field, value, what is said)
REFUSED: list[tuple[Callable[..., dict[str, Any]], str, Any, str]] = [
    (domino_config, "pure_draft_prefix_len", 2, "dflash_config.pure_draft_prefix_len=2: expected 1: the first"),
    (domino_config, "pure_draft_prefix_len", None, "pure_draft_prefix_len=None: expected the field to be present"),
    (domino_config, "gru_hidden_dim", None, "gru_hidden_dim=None: expected the field to be present"),
    (domino_config, "emb_dim", 0, "dflash_config.emb_dim=0: expected an integer >= 1"),
    (domino_config, "shift_label", None, "shift_label=None: expected the field to be present"),
    (domino_config, "shift_label", 1, "dflash_config.shift_label=1: expected true or false"),
    (domino_config, "draft_vocab_size", 40,
     "dflash_config.draft_vocab_size=40: expected none, or vocab_size=320: Domino's projector has a row"),
    (dspark_config, "markov_rank", None, "markov_rank=None: expected .*the field to be present"),
    (dspark_config, "markov_rank", -1, "markov_rank=-1: expected .*an integer >= 0"),
    (swigluoai, "swiglu_alpha", None, "swiglu_alpha=None: expected a positive number beside"),
    (swigluoai, "swiglu_limit", None, "swiglu_limit=None: expected a positive number beside"),
    (laguna, "gating", "per-layer", "gating='per-layer': expected per-head"),
    (laguna, "gating", 1, "gating=1: expected per-head"),
    (laguna, "gating", ["per-head"], r"gating=\['per-head'\]: expected per-head"),
    (gemma4_config, "attention_k_eq_v", False, "attention_k_eq_v=False: expected true: k_proj gives the values"),
    (gemma4_config, "hidden_activation", "silu", "hidden_activation='silu': expected gelu_pytorch_tanh"),
    (gemma4_config, "global_head_dim", None, "global_head_dim=None: expected an integer >= 2"),
    (gemma4_config, "num_global_key_value_heads", None, "num_global_key_value_heads=None: expected an integer >="),
    (gemma4_config, "layer_types", ["full_attention", "sliding_attention"],
     "layer_types=.*: expected a list of full_attention"),
    (gemma4_config, "layer_types", None, "layer_types=None: expected a list of full_attention"),
    (gemma4_config, "rope_parameters", {"rope_theta": 1e4},
     "rope_parameters=.*: expected an object with full_attention"),
    (gemma4_config, "rope_parameters", {"full_attention": {**FULL, "factor": 2.0}},
     "rope_parameters.factor=2.0: expected none beside"),
    (gemma4_config, "dflash_config", 3, "dflash_config=3: expected an object"),
    (gemma4_config, "final_logit_softcapping", -1.0,
     "(dflash_config.)?final_logit_softcapping=-1.0: expected a positive number"),
]
# fmt: on


def test_a_config_that_cannot_be_served_is_refused_by_its_field():
    for make, field, value, message in REFUSED:
        nested = make is domino_config
        config = make(dflash_config={field: value}) if nested else {**make(), field: value}
        with pytest.raises(DraftConfigError, match=f"draft config {message}"):
            DraftSpec.from_config(config)


def test_other_markov_heads_are_the_built_in_workers():
    other = foreign(dspark_config(markov_head_type="lstm"))
    assert str(other) == (
        "draft config markov_head_type='lstm': a Markov head of another kind. "
        "SGLang's built-in DFlashWorkerV2 serves it, not dflash_sglang."
    )


def test_dominos_fields_stand_in_dflash_config_or_at_the_top_level():
    config = domino_config()
    nested = config.pop("dflash_config")
    flat = {**config, **nested}
    assert foreign(flat) is None
    assert DraftSpec.from_config(flat) == DraftSpec.from_config({**config, "dflash_config": nested})
    for shifted in (True, False):
        spec = DraftSpec.from_config(domino(16, shifted).config)
        assert (spec.block_size, spec.draft_rows(16), spec.anchor_proposes) == (16, 16, shifted)


def test_both_formats_of_dspark_say_the_same_and_the_anchors_row_proposes_unless_the_config_says_otherwise():
    zlab = dspark_config()
    fields = dict(architectures=["Qwen3DSparkModel"], markov_rank=12, sample_from_anchor=True)
    for config in (zlab, speculators_config(zlab, speculators_model_type="dspark", **fields)):
        assert foreign(config) is None
        spec = DraftSpec.from_config(config)
        assert (spec.block_size, spec.draft_rows(8), spec.draft_rows(2)) == (8, 7, 1)
        spec = DraftSpec.from_config({**config, "sample_from_anchor": False})
        assert (spec.block_size, spec.draft_rows(7)) == (7, 7)


def test_gemma_4s_heads_and_rope_are_those_of_full_attention():
    check_family(config := gemma4_config())
    spec = DraftSpec.from_config(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 1, 32)
    assert (spec.rope.theta, spec.rope.scaling, spec.rope.rotary_dim) == (1e4, {"rope_type": "proportional"}, 8)
    assert (spec.vocabulary.embedding_scale, spec.vocabulary.logit_softcap) == (8.0, 30.0)
    assert [(layer.causal, layer.window) for layer in spec.layers] == [(False, None)] * 2


def test_lagunas_gate_and_rope_are_read_as_sglang_reads_them():
    config = draft_config(**LAGUNA)
    gates = {"per-head": 1, "per-element": config["head_dim"], "disabled": 0}
    for gating in (True, False, None, *gates):
        assert DraftSpec.from_config({**config, "gating": gating}).laguna.gates == gates[normalize_gating(gating)]
    del config["gating"]
    assert DraftSpec.from_config(config).laguna.gates == 1
    # A base alone is plain RoPE.
    config = {**draft_config(**LAGUNA), "model_type": "laguna", "rope_theta": 500000.0}
    rope = DraftSpec.from_config(config).rope
    assert (rope.theta, rope.scaling, rope.rotary_dim) == (500000.0, None, config["head_dim"])
    theirs = LagunaConfig(**{name: value for name, value in config.items() if name != "model_type"})
    assert get_rope_config(theirs) == (500000.0, None) and theirs.partial_rotary_factor == 1.0
