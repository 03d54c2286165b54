"""NVFP4 drafts as Nemotron 3.5's is: DSpark with an embedding of its own, tables packed or not. SGLang's kernels
are `quantised_twins`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_sglang.startup.facts import LoadError
from tests.support import quantised_drafts as drafts
from tests.support import quantised_twins
from tests.support import sglang_layers as layers
from tests.support.quantised_layouts import dequantised
from tests.support.reference_dspark import ReferenceDSpark, dspark_config, dspark_tensors
from tests.support.reference_walks import assert_equals_the_reference
from tests.support.tiny import write_checkpoint
from tests.unit.models.test_dflash2 import Target
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
PACKED = {
    "embedding and successors": (EMBEDDING, SUCCESSORS),
    "successors": (SUCCESSORS,),
    "no table": (),
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    layers.start_rank()
    with pytest.MonkeyPatch.context() as patch:
        quantised_twins.install(patch)
        yield


class Reference(ReferenceDSpark):
    """Whose anchor's row proposes nothing."""

    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        return super().propose(hidden[1:], head, anchor)


def config_of(block: int = 8) -> dict[str, Any]:
    return dspark_config(
        hidden_size=256,
        head_dim=64,
        intermediate_size=512,
        block_size=block,
        markov_rank=32,
        sample_from_anchor=False,
        has_embed_tokens=True,
        has_lm_head=False,
        is_causal=True,
        quantization_config=dict(RAW),
    )


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
    from dflash_sglang.models.dspark import Qwen3DSparkModel

    write_checkpoint(directory, config, tensors)
    with layers.defaults(torch.float32):
        model = Qwen3DSparkModel(layers.hf_config(directory), drafts.sglang_config(RAW))
        model.load_weights(tensors.items())
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return model


@works
@pytest.mark.parametrize("tables", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, tables
):
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
    assert_equals_the_reference(model, reference, target.lm_head, block, lambda rows: rows[1:])


def test_an_update_reaches_packed_tables_in_the_same_memory(tmp_path):
    config = config_of()
    model = build(tmp_path, config, checkpoint(config, PACKED["embedding and successors"])[0])
    model.bind_target(Target(hidden=256))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    new, weights = checkpoint(config, PACKED["embedding and successors"], seed=9)
    tables = {name: tensor for name, tensor in new.items() if name.startswith((EMBEDDING, SUCCESSORS))}
    model.load_weights(tables.items())
    torch.testing.assert_close(model.forward_embed(torch.arange(320)), weights["embed_tokens.weight"])
    torch.testing.assert_close(model.markov_head.markov_w2.weight, weights["markov_head.markov_w2.weight"])
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("lost", ["embed_tokens.weight_scale_2", "markov_head.markov_w2.weight_scale"])
def test_a_packed_table_without_a_scale_is_an_error_that_names_it(tmp_path, lost, prefix):
    config = config_of()
    tensors, _ = checkpoint(config, PACKED["embedding and successors"])
    del tensors[lost]
    with pytest.raises(LoadError, match=rf"missing tensors \['{prefix}{lost}'\]\. Expected all of weight, "):
        build(tmp_path, config, {f"{prefix}{name}": tensor for name, tensor in tensors.items()})


@pytest.mark.matrix(
    draft="NVFP4, scales of q, k, v differ",
    kv="model dtype",
    outcome="refused",
    message="draft checkpoint: tensor ... is another scale than that of the modules stacked with it",
)
def test_stacked_modules_with_scales_that_differ_are_refused(tmp_path):
    config = config_of()
    tensors, _ = checkpoint(config, ())
    tensors["layers.1.self_attn.k_proj.weight_scale_2"] *= 2
    with pytest.raises(
        LoadError, match=r"another scale than .* stacked with it in 'layers.1.self_attn.qkv_proj\."
    ):
        build(tmp_path, config, tensors)


def test_biases_that_the_kernel_would_add_to_other_outputs_are_refused(tmp_path):
    config = config_of() | {"attention_bias": True}
    tensors, _ = checkpoint(config, ())
    rows = {"q_proj": config["num_attention_heads"] * 64, "o_proj": 256}
    rows |= dict.fromkeys(("k_proj", "v_proj"), config["num_key_value_heads"] * 64)
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"layers.{layer}.self_attn.{name}.bias": torch.randn(size) for name, size in rows.items()}
    with pytest.raises(LoadError, match=r"biases of \['layers.0.self_attn.*NVFP4. Expected none"):
        build(tmp_path, config, tensors)


def test_scales_of_a_table_in_another_format_are_unexpected(tmp_path):
    config = config_of()
    tensors, _ = checkpoint(config, ())
    with pytest.raises(LoadError, match=r"unexpected tensors \['embed_tokens.weight_scale'\]"):
        build(tmp_path, config, tensors | {"embed_tokens.weight_scale": torch.ones(320)})
