"""NVFP4 drafts as Nemotron 3.5's is: DSpark with an embedding of its own, tables packed or not. SGLang's kernels
are `quantised_twins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.models.dspark import DSparkDraftModel
from dflash_sglang.startup.facts import LoadError
from tests.support import quantised_drafts as drafts
from tests.support import quantised_twins
from tests.support import sglang_layers as layers
from tests.support.quantised_layouts import dequantised
from tests.support.reference_dspark import ReferenceDSpark, dspark_config, dspark_tensors
from tests.support.reference_walks import Target, assert_equals_the_reference
from tests.support.tiny import write_checkpoint
from training.quantise import SCHEMES, quantise

pytestmark = layers.cpu_only
works = pytest.mark.matrix(
    target="any",
    draft="DSpark in NVFP4 with an embedding of its own, stand-ins for its kernels",
    kv="model dtype",
    outcome="works",
)

RAW = SCHEMES["nvfp4-a16"].config
EMBEDDING, SUCCESSORS = "embed_tokens", "markov_head.markov_w2"
PACKED = {"embedding and successors": (EMBEDDING, SUCCESSORS), "successors": (SUCCESSORS,), "no table": ()}
ALL = PACKED["embedding and successors"]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quantised_twins.install(patch)
        yield


class Reference(ReferenceDSpark):
    """Whose anchor's row proposes nothing."""

    def proposing(self, hidden: Tensor) -> Tensor:
        return hidden[1:]


def config_of(block: int = 8) -> dict[str, Any]:
    return dspark_config(
        hidden_size=256, head_dim=64, intermediate_size=512, block_size=block, markov_rank=32, is_causal=True,
        sample_from_anchor=False, has_embed_tokens=True, has_lm_head=False, quantization_config=dict(RAW),
    )  # fmt: skip


def checkpoint(config: dict[str, Any], tables: tuple[str, ...], seed: int = 1) -> tuple[dict, dict]:
    """(tensors of the checkpoint, the weights that they stand for): all linear layers packed, and these tables."""
    generator = torch.Generator().manual_seed(seed)
    weights = dspark_tensors(config, seed)
    weights["embed_tokens.weight"] = torch.randn(320, 256, generator=generator)
    linear = [name for name in weights if name == "fc.weight" or name.endswith("_proj.weight")]
    linear += [f"{table}.weight" for table in tables]
    packed = quantise({name: weights.pop(name) for name in linear}, SCHEMES["nvfp4-a16"])
    return {**weights, **packed}, {**weights, **dequantised(packed, RAW)}


def build(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    write_checkpoint(directory, config, tensors)
    with layers.defaults(torch.float32):
        model = DSparkDraftModel(layers.hf_config(directory), drafts.sglang_config(RAW))
        model.load_weights(tensors.items())
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return model


@works
@pytest.mark.parametrize(("tables", "block"), zip(PACKED.values(), (5, 8, 16), strict=True), ids=PACKED)
def test_rows_proposals_and_q_equal_the_reference(tmp_path, tables, block):
    config = config_of(block)
    tensors, weights = checkpoint(config, tables)
    model, target = build(tmp_path, config, tensors), Target(hidden=256)
    model.bind_target(target)
    assert type(model.fc.quant_method).__name__ == "ModelOptNvFp4A16LinearMethod"
    ids = torch.arange(320)
    table = weights.pop("embed_tokens.weight")
    torch.testing.assert_close(model.forward_embed(ids), table, rtol=1e-6, atol=0)
    assert not torch.allclose(target.model.embed_tokens(ids), table, atol=0.1)
    reference = Reference.from_weights(config, weights)
    assert_equals_the_reference(model, reference, target.lm_head, block)


def test_an_update_reaches_packed_tables_in_the_same_memory(tmp_path):
    config = config_of()
    model = build(tmp_path, config, checkpoint(config, ALL)[0])
    model.bind_target(Target(hidden=256))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    new, weights = checkpoint(config, ALL, seed=9)
    tables = {name: tensor for name, tensor in new.items() if name.startswith((EMBEDDING, SUCCESSORS))}
    model.load_weights(tables.items())
    torch.testing.assert_close(model.forward_embed(torch.arange(320)), weights["embed_tokens.weight"])
    torch.testing.assert_close(model.markov_head.markov_w2.weight, weights["markov_head.markov_w2.weight"])
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


def test_a_packed_table_without_a_scale_is_an_error_that_names_it(tmp_path):
    config = config_of()
    for prefix, lost in (("", "embed_tokens.weight_scale_2"), ("model.", "markov_head.markov_w2.weight_scale")):
        tensors, _ = checkpoint(config, ALL)
        del tensors[lost]
        with pytest.raises(LoadError, match=rf"missing tensors \['{prefix}{lost}'\]\. Expected all of weight, "):
            build(tmp_path / lost, config, {f"{prefix}{name}": tensor for name, tensor in tensors.items()})


@pytest.mark.matrix(
    draft="NVFP4, scales of q, k, v differ",
    kv="model dtype",
    outcome="refused",
    message="draft checkpoint: tensor ... is another scale than that of the modules stacked with it",
)
def test_scales_that_differ_or_are_of_another_format_and_biases_are_refused(tmp_path):
    """The kernel would add biases to other outputs."""
    config = config_of()
    tensors, _ = checkpoint(config, ())
    scale = {"layers.1.self_attn.k_proj.weight_scale_2": 2 * tensors["layers.1.self_attn.k_proj.weight_scale_2"]}
    rows = {"q_proj": config["num_attention_heads"] * 64, "o_proj": 256}
    rows |= dict.fromkeys(("k_proj", "v_proj"), config["num_key_value_heads"] * 64)
    biases = {
        f"layers.{i}.self_attn.{name}.bias": torch.randn(size) for i in (0, 1) for name, size in rows.items()
    }
    for i, (fields, changed, says) in enumerate((
        ({}, scale, r"another scale than .* stacked with it in 'layers.1.self_attn.qkv_proj\."),
        ({"attention_bias": True}, biases, r"biases of \['layers.0.self_attn.*NVFP4. Expected none"),
        ({}, {"embed_tokens.weight_scale": torch.ones(320)}, r"unexpected tensors \['embed_tokens.weight_scale"),
    )):  # fmt: skip
        with pytest.raises(LoadError, match=says):
            build(tmp_path / str(i), config | fields, tensors | changed)
