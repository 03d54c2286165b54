"""Quantised drafts on SGLang's own layers (C6, C22, C24): without a GPU its kernels are `quantised_twins`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.models.loading.updates import DraftWeightUpdater
from tests.support import quantised_drafts as drafts
from tests.support import quantised_twins
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config, draft_tensors
from training.quantise import SCHEMES

pytestmark = [pytest.mark.gpu] if layers.DEVICE == "cuda" else []

ROUNDS_ACTIVATIONS = {name for name in SCHEMES if "8" in name}
POSITIONS = torch.tensor([0, 1, 2, 70, 300])
SLOTS = torch.tensor([9, 4, 31, 2, 17])
# By scheme: the support matrix's name, and the form of context KV.
# fmt: off
KINDS = {
    "fp8-dynamic": ("fp8, dynamic activations", "stacked"),
    "fp8-static": ("fp8, static activations", "sliced"),
    "ct-w8a8-fp8": ("compressed-tensors W8A8 fp8", "stacked"),
    "ct-w8a8-fp8-static": ("compressed-tensors W8A8 fp8, static", "sliced"),
    "ct-w8a8-int8": ("compressed-tensors W8A8 int8", "per_layer"),
    "ct-w4a16": ("compressed-tensors W4A16", "per_layer"),
    "ct-w4a16-asym": ("compressed-tensors W4A16, zero points", "per_layer"),
    "ct-w4a16-actorder": ("compressed-tensors W4A16, activation order", "per_layer"),
    "awq": ("AWQ", "per_layer"),
    "gptq": ("GPTQ", "per_layer"),
    "gptq-actorder": ("GPTQ, activation order", "per_layer"),
    "nvfp4-a16": ("ModelOpt W4A16 NVFP4, on a CPU stand-ins for its kernels", "per_layer"),
}
# Tensors without which a checkpoint is not loaded.
LOST = {
    "fp8-static": ["fc.weight_scale", "layers.1.self_attn.k_proj.input_scale"],
    "ct-w8a8-int8": ["layers.0.self_attn.v_proj.weight_scale", "layers.2.mlp.up_proj.weight_scale"],
    "ct-w4a16-asym": ["fc.weight_scale", "layers.0.self_attn.q_proj.weight_zero_point"],
    "ct-w4a16-actorder": ["layers.2.self_attn.k_proj.weight_g_idx"],
    "awq": ["fc.qzeros", "layers.0.mlp.gate_proj.qzeros"],
    "gptq": ["layers.0.self_attn.k_proj.scales", "layers.1.self_attn.o_proj.qweight"],
    "nvfp4-a16": ["fc.weight_scale_2", "layers.1.mlp.up_proj.weight_scale"],
}
# fmt: on
WITHOUT_BIASES = ("nvfp4-a16",)  # refused with them
ALL = pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(
            name, marks=pytest.mark.matrix(target="any", draft=shown, kv="model dtype", outcome="works")
        )
        for name, (shown, _) in KINDS.items()
    ],
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if layers.DEVICE == "cpu":
            quantised_twins.install(patch)
        else:
            patch.setattr(fp8_utils, "get_exec", eager_exec)
        yield


def eager_exec() -> Any:
    """SGLang's namespace `exec` with an eager prefill, as a server without torch.compile resolves it."""
    prefill = SimpleNamespace(tc_compiler="eager")
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    return SimpleNamespace(graph=graph, kernel=get_exec().kernel)


def close(got: Tensor, wanted: Tensor, scheme: str) -> bool:
    """Within the rounding of activations and of the dtype, far below what a lost scale or zero point does."""
    limit = 0.06 if scheme in ROUNDS_ACTIVATIONS else 1e-5 if drafts.DTYPE == torch.float32 else 0.02
    got, wanted = got.float().cpu(), wanted.float().cpu()
    return bool((got - wanted).norm() <= limit * wanted.norm())


def some_rows(width: int, count: int = 5) -> Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(11))
    return rows.to(layers.DEVICE, drafts.DTYPE)


@ALL
def test_every_linear_layer_computes_what_an_independent_reader_of_the_checkpoint_says(tmp_path, scheme):
    raw, tensors = SCHEMES[scheme].config, drafts.checkpoint(scheme)
    model, reference = drafts.build(tmp_path, raw, tensors), drafts.reference(raw, tensors).model
    pairs = [(model.fc, [reference.fc])]
    for ours, plain in zip(model.layers, reference.layers, strict=True):
        attention, mlp = plain.self_attn, plain.mlp
        pairs += [
            (ours.self_attn.qkv_proj, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (ours.self_attn.o_proj, [attention.o_proj]),
            (ours.mlp.gate_up_proj, [mlp.gate_proj, mlp.up_proj]),
            (ours.mlp.down_proj, [mlp.down_proj]),
        ]
    for layer, parts in pairs:
        rows = some_rows(parts[0].in_features)
        out, _ = layer(rows)
        widths = [part.out_features for part in parts]
        for got, part in zip(out.split(widths, dim=-1), parts, strict=True):
            assert close(got, rows.float().cpu() @ part.weight.T, scheme), layer


@ALL
def test_context_kv_equals_the_layers_own_and_takes_k_and_v_alone_in_fp8(tmp_path, scheme):
    for bias in (False,) if scheme in WITHOUT_BIASES else (False, True):
        raw, tensors = SCHEMES[scheme].config, drafts.checkpoint(scheme, attention_bias=bias)
        model = drafts.build(tmp_path / str(bias), raw, tensors, attention_bias=bias)
        context = ContextKV(model)
        assert context.form == KINDS[scheme][1], context.reason
        rows, positions = some_rows(256), POSITIONS.to(layers.DEVICE)
        # Sums of another order may round a last bit otherwise, which the rotation carries to another element.
        step = 1e-5 if drafts.DTYPE == torch.float32 else torch.finfo(torch.bfloat16).eps
        for layer, pair in zip(model.layers, context.keys_values(rows, positions), strict=True):
            for got, own in zip(pair, layers.context_key_value(layer.self_attn, rows, positions), strict=True):
                torch.testing.assert_close(got, own, rtol=step, atol=step * float(own.abs().max()))

        features = some_rows(768)
        pool = layers.make_pool(model, slots=40, dtype=drafts.DTYPE)
        context.bind(pool)
        context.write(features, positions, SLOTS.to(layers.DEVICE))
        reference = drafts.reference(raw, tensors, attention_bias=bias)
        for layer, kv in enumerate(reference.context_kv(features.float().cpu(), POSITIONS)):
            for buffer, wanted in zip(pool.get_kv_buffer(layer), kv, strict=True):
                assert close(buffer[SLOTS.to(buffer.device)], wanted, scheme)
                assert bool((buffer[[0, 1, 3, 5]].float() == 7).all())


def test_the_operator_can_ask_for_a_form_and_is_told_when_the_weights_do_not_allow_it(tmp_path):
    for scheme, why in (
        ("fp8-dynamic", None),
        ("fp8-static", "has input_scale of its own"),
        ("ct-w4a16", "by CompressedTensorsWNA16"),
    ):
        model = drafts.build(tmp_path / scheme, SCHEMES[scheme].config, drafts.checkpoint(scheme))
        assert ContextKV(model, "per_layer").form == "per_layer"
        if why is None:
            assert ContextKV(model, "stacked").form == "stacked"
            continue
        with pytest.raises(ValueError, match=rf"context_kv='stacked'.*{why}.*'auto'"):
            ContextKV(model, "stacked")


@layers.cpu_only
def test_rows_that_end_inside_of_a_kernels_tile_go_through_the_whole_layer(tmp_path):
    heads = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=24)  # q 72 rows: no multiple of 16
    scheme = "fp8-dynamic"
    model = drafts.build(tmp_path, SCHEMES[scheme].config, drafts.checkpoint(scheme, **heads), **heads)
    assert ContextKV(model).form == "per_layer"
    assert "whose rows come in 16s: q 72, kv 24" in ContextKV(model).reason


class Updated:
    """A draft with its context KV and our updater, over as much of SGLang's as tensors need."""

    def __init__(self, model: Any) -> None:
        def load(named_tensors: Any, load_format: Any) -> tuple[bool, str]:
            model.load_weights(named_tensors)
            return True, "Success"

        self.model, self.context = model, ContextKV(model)
        sglangs = SimpleNamespace(update_weights_from_tensor=load)
        self._updater = DraftWeightUpdater(sglangs, model, [self.context.refresh])
        self.addresses = self._addresses()

    def send(self, tensors: Mapping[str, Tensor], load_format: str | None = None) -> tuple[bool, str]:
        """In a session of its own; without tensors, one that only ends."""
        named, answer = [(name, tensor.to(layers.DEVICE)) for name, tensor in tensors.items()], (True, "")
        self._updater.begin_weight_update()
        if named or load_format:
            answer = self._updater.update_weights_from_tensor(named_tensors=named, load_format=load_format)
        self._updater.end_weight_update(run_post_load=not (named or load_format))
        assert self._addresses() == self.addresses
        return answer

    def _addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self.model.named_parameters()}


@ALL
def test_an_update_of_a_quantised_draft_reaches_block_and_context_in_the_same_memory(tmp_path, scheme):
    raw, old, new = SCHEMES[scheme].config, drafts.checkpoint(scheme), drafts.checkpoint(scheme, seed=99)
    updated = Updated(drafts.build(tmp_path / "old", raw, old))
    rows, positions = some_rows(256), POSITIONS.to(layers.DEVICE)

    def state(of: Updated) -> list[Tensor]:
        pairs = [tensor.clone() for pair in of.context.keys_values(rows, positions) for tensor in pair]
        with torch.no_grad():
            outputs = [of.model.fc(some_rows(768))[0]]
            outputs += [layer.self_attn.qkv_proj(rows)[0] for layer in of.model.layers]
            return [*pairs, *outputs, *(layer.mlp(rows) for layer in of.model.layers)]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    before = state(updated)
    assert updated.send({})[0] and same(state(updated), before), "an update without tensors"
    part = next(name for name in new if ".v_proj." in name)
    success, message = updated.send({part: new[part]})
    assert not success and "missing tensors ['layers.0.self_attn." in message and "in one request" in message
    assert same(state(updated), before), "an update with a part of a module"
    success, message = updated.send({}, load_format="direct")
    assert not success and "load_format='direct': expected None or 'flattened_bucket'" in message

    assert updated.send(new)[0]
    assert same(state(updated), state(Updated(drafts.build(tmp_path / "new", raw, new))))


def dense(seed: int = 1) -> dict[str, Tensor]:
    config = draft_config(**drafts.SHAPE)
    return {name: tensor.bfloat16().to(drafts.DTYPE) for name, tensor in draft_tensors(config, seed).items()}


@pytest.mark.matrix(target="any", draft="dense, read in fp8", kv="model dtype", outcome="works")
def test_a_dense_draft_that_is_quantised_while_it_is_loaded_is_served_and_updated_as_one(tmp_path):
    updated = Updated(drafts.build(tmp_path, {}, dense()))
    model, context = updated.model, updated.context
    assert context.form == "stacked"
    rows, positions = some_rows(256), POSITIONS.to(layers.DEVICE)
    for seed in (1, 99):
        assert seed == 1 or updated.send(dense(seed))[0]
        keys_values = list(context.keys_values(rows, positions))
        for number, layer in enumerate(model.layers):
            attention = layer.self_attn
            assert attention.qkv_proj.weight.dtype == torch.float8_e4m3fn
            weight = dense(seed)[f"layers.{number}.self_attn.o_proj.weight"].float()
            assert close(attention.o_proj(rows)[0], rows.float().cpu() @ weight.T, "fp8-dynamic")
            own = layers.context_key_value(attention, rows, positions)
            for got, expected in zip(keys_values[number], own, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("scheme", "ignored"), [("fp8-dynamic", "fc"), ("ct-w8a8-int8", "model.fc"), ("ct-w4a16", "fc")]
)
def test_an_ignored_fc_stays_dense_with_and_without_the_prefix_of_the_tensors(tmp_path, scheme, ignored):
    raw, tensors = dict(SCHEMES[scheme].config), drafts.checkpoint(scheme)
    raw["ignored_layers" if scheme == "fp8-dynamic" else "ignore"] = [ignored]
    dense = {n: t for n, t in tensors.items() if not n.startswith("fc.")} | {"fc.weight": torch.randn(256, 768)}
    model = drafts.build(tmp_path, raw, {f"model.{n}": t for n, t in dense.items()})
    assert torch.equal(model.fc.weight.cpu(), dense["fc.weight"].to(drafts.DTYPE))
    assert type(model.layers[0].self_attn.qkv_proj.quant_method).__name__ != "UnquantizedLinearMethod"


def test_context_kv_is_stacked_where_the_rest_of_a_draft_is_quantised(tmp_path):
    scheme, raw = "ct-w8a8-int8", dict(SCHEMES["ct-w8a8-int8"].config)
    raw["ignore"] = [f"layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkv"]
    held = {n: t for n, t in drafts.checkpoint(scheme).items() if n.rpartition(".")[0] not in raw["ignore"]}
    held |= {n: t for n, t in dense().items() if n.rpartition(".")[0] in raw["ignore"]}
    model = drafts.build(tmp_path, raw, held)
    assert model.layers[0].mlp.gate_up_proj.weight.dtype == torch.int8
    context = ContextKV(model)
    assert context.form == "stacked" and context.reason.startswith("stacked (no qkv_proj is quantised)")


@pytest.mark.parametrize("scheme", LOST)
def test_a_lost_scale_zero_point_or_order_is_an_error_that_names_it_alone(tmp_path, scheme):
    tensors = dict(drafts.checkpoint(scheme))
    for name in LOST[scheme]:
        del tensors[name]
    with pytest.raises(ValueError, match="missing tensors") as error:
        drafts.build(tmp_path, SCHEMES[scheme].config, tensors)
    assert f"missing tensors {sorted(LOST[scheme])}." in str(error.value)


@pytest.mark.matrix(
    draft="act-order, orders of q, k, v differ",
    kv="model dtype",
    outcome="refused",
    message="draft checkpoint: tensor ... is another activation order than that of the modules stacked with it",
)
@pytest.mark.parametrize("scheme", ["ct-w4a16-actorder", "gptq-actorder"])
def test_stacked_modules_with_activation_orders_that_differ_are_refused(tmp_path, scheme):
    tensors = dict(drafts.checkpoint(scheme))
    name = next(n for n in tensors if "layers.1.self_attn.k_proj" in n and n.endswith("g_idx"))
    tensors[name] = tensors[name].flip(0)
    with pytest.raises(ValueError, match="activation order") as error:
        drafts.build(tmp_path, SCHEMES[scheme].config, tensors)
    assert "layers.1.self_attn." in str(error.value) and "desc_act false" in str(error.value)


def test_scales_of_a_quantised_kv_cache_reach_the_attention_of_their_layer(tmp_path):
    raw = dict(SCHEMES["ct-w8a8-int8"].config)
    raw["kv_cache_scheme"] = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    tensors = dict(drafts.checkpoint("ct-w8a8-int8"))
    for layer in range(3):
        tensors[f"layers.{layer}.self_attn.k_scale"] = torch.tensor([0.5 + layer])
        tensors[f"layers.{layer}.self_attn.v_scale"] = torch.tensor([0.25 + layer])
    model = drafts.build(tmp_path, raw, tensors)
    scales = [(float(layer.self_attn.attn.k_scale), float(layer.self_attn.attn.v_scale)) for layer in model.layers]
    assert scales == [(0.5, 0.25), (1.5, 1.25), (2.5, 2.25)]


@pytest.mark.matrix(target="quantised head", draft="z-lab", kv="model dtype", outcome="works")
def test_a_quantised_head_proposes_the_argmax_of_its_own_logits(tmp_path):
    vocabulary, hidden = 320, 256
    weight = torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(3))
    raw = dict(SCHEMES["ct-w8a8-fp8"].config)
    raw["config_groups"] = {"group_0": {**raw["config_groups"]["group_0"], "targets": ["Linear", "lm_head"]}}
    raw["ignore"] = []
    matrix = SimpleNamespace(weight=weight, read=None, order=None)
    with layers.defaults(drafts.DTYPE):
        head = ParallelLMHead(vocabulary, hidden, quant_config=drafts.sglang_config(raw), prefix="lm_head")
        for name, tensor in SCHEMES["ct-w8a8-fp8"].tensors(matrix).items():  # type: ignore[arg-type]
            parameter = getattr(head, name)
            parameter.weight_loader(parameter, tensor.to(layers.DEVICE))
    head = head.to(layers.DEVICE)
    head.quant_method.process_weights_after_loading(head)
    target = TargetHead(head)
    assert target.quantised
    rows = some_rows(hidden, 64)
    logits = head.quant_method.apply(head, rows, None)[:, :vocabulary]
    assert target.likeliest(rows, 1).ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert close(logits, rows.float().cpu() @ weight.T, "ct-w8a8-fp8")
