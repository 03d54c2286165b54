"""Capture of the target's layers (C11) on SGLang's own model classes, and on bodies of the same contract."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.patches.target_features import CaptureError, ensure_capture
from tests.support import sglang_layers
from tests.support.tiny import target_config, target_tensors, write_checkpoint

HIDDEN, LAYERS = 4, 5


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual += x  # in place, as the fused kernels do
        return residual * 2, residual


class Body(torch.nn.Module):
    """A transformer body as SGLang writes them: layer i adds 10 ** i, captures are taken before a layer."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))
        self.norm = Norm()
        self.layers_to_capture: list[int] = []
        self.packed = packed

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        x, residual = torch.zeros(len(input_ids), HIDDEN), torch.ones(len(input_ids), HIDDEN)
        captured = []
        for i in range(LAYERS):
            if i in self.layers_to_capture:
                captured.append(residual + x)
            residual = residual + x
            x = torch.full_like(x, 10.0**i)
        if len(input_ids) == 0:
            return (x, captured) if captured else x
        hidden, _ = self.norm(x, residual)
        if self.packed and captured:
            return hidden, torch.cat(captured, dim=-1)
        return (hidden, captured) if captured else hidden


class MiMoV2(Body):
    """Returns the hidden states before its norm, or None, between the others, as SGLang's MiMo-V2 does."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        output = super().forward(input_ids, positions, input_embeds)
        hidden, *captured = output if isinstance(output, tuple) else (output,)
        return hidden, "before the norm", *captured


class LoopedBody(Body):
    """Runs its layers twice and numbers them through both, as SGLang's Nanbeige does."""

    config = SimpleNamespace(num_loops=2)

    def __init__(self) -> None:
        super().__init__(packed=False)
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        x, residual = torch.zeros(len(input_ids), HIDDEN), torch.ones(len(input_ids), HIDDEN)
        captured = []
        for i in range(4):
            if i == 2:
                x, _ = self.norm(x, residual.clone())
                residual = torch.zeros_like(x)
            if i in self.layers_to_capture:
                captured.append(residual + x)
            residual = residual + x
            x = torch.full_like(x, 10.0**i)
        hidden, _ = self.norm(x, residual)
        return (hidden, captured) if captured else hidden


class Target(torch.nn.Module):
    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.language_model = torch.nn.Module()
        self.language_model.model = Body(packed)

    def run(self, tokens: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.language_model.model(torch.zeros(tokens), torch.zeros(tokens))


class DFlashTarget(Target):
    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.language_model.model.layers_to_capture = [i + 1 for i in layer_ids]


class Eagle3Target(Target):
    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        ids = [2] if layer_ids is None else layer_ids
        self.language_model.model.layers_to_capture = [i + 1 for i in ids]


class Gemma3TextModel(Body):
    """Layers return (output, residual) and a capture takes the output alone, as in SGLang's class of this name."""

    def __init__(self) -> None:
        super().__init__(packed=False)
        self.layers = torch.nn.ModuleList(ResidualLayer(i) for i in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        x, residual = torch.ones(len(input_ids), HIDDEN), torch.zeros(len(input_ids), HIDDEN)
        captured = []
        for i, layer in enumerate(self.layers):
            if i in self.layers_to_capture:
                captured.append(x)
            x, residual = layer(x, residual)
        hidden, _ = self.norm(x, residual)
        return (hidden, captured) if captured else hidden


class ResidualLayer(torch.nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(x, 10.0**self.i), residual + x


AFTER = [2.0, 12.0, 112.0, 1112.0, 11112.0]  # the residual stream after each layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("target_class", [DFlashTarget, Eagle3Target])
@pytest.mark.parametrize("ids", [[0, 2, 3], [0, 2, 4], [4], [3, 0, 2], [4, 0, 2], [2, 4, 0]], ids=str)
def test_the_features_are_the_residuals_after_the_layers_in_the_order_of_the_ids(
    ids: list[int], target_class: type[Target], packed: bool
) -> None:
    target = target_class(packed)
    ensure_capture(target, ids)
    target.set_dflash_layers_to_capture(ids)
    for _ in range(2):
        hidden, features = target.run()
        features = list(features.chunk(len(ids), -1)) if isinstance(features, torch.Tensor) else features
        assert [feature[1].tolist() for feature in features] == [[AFTER[i]] * HIDDEN for i in ids]
        assert hidden[0].tolist() == [2 * AFTER[-1]] * HIDDEN


@pytest.mark.parametrize("ids", [[0, 2, 3], [0, 2, 4], [4, 0, 2]], ids=str)
def test_the_residual_is_part_of_the_features_of_a_body_that_captures_without(ids: list[int]) -> None:
    target = Eagle3Target()
    target.language_model.model = Gemma3TextModel()
    ensure_capture(target, ids)
    target.set_dflash_layers_to_capture(ids)
    for _ in range(2):
        hidden, features = target.run()
        assert [feature[1].tolist() for feature in features] == [[AFTER[i]] * HIDDEN for i in ids]
        assert hidden[0].tolist() == [2 * AFTER[-1]] * HIDDEN


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ids", [[0, 2, 3], [0, 2, 4], [4], [3, 0, 2], [4, 0, 2]], ids=str)
def test_what_else_a_body_returns_stays_in_its_place(ids: list[int], packed: bool) -> None:
    target = DFlashTarget()
    target.language_model.model = MiMoV2(packed)
    ensure_capture(target, ids)
    target.set_dflash_layers_to_capture(ids)
    hidden, before_norm, features = target.run()
    features = list(features.chunk(len(ids), -1)) if isinstance(features, torch.Tensor) else features
    assert [feature[1].tolist() for feature in features] == [[AFTER[i]] * HIDDEN for i in ids]
    assert hidden[0].tolist() == [2 * AFTER[-1]] * HIDDEN and before_norm == "before the norm"


@pytest.mark.parametrize("ids", [[0, 1], [1, 3], [3], [3, 1, 2]], ids=str)
def test_the_last_layer_of_a_looped_body_is_that_of_its_last_loop(ids: list[int]) -> None:
    target = DFlashTarget()
    target.language_model.model = LoopedBody()
    ensure_capture(target, ids)
    target.set_dflash_layers_to_capture(ids)
    _, features = target.run()
    after = [2.0, 24.0, 124.0, 1124.0]  # the first loop ends with a norm, which doubles 12
    assert [feature[1].tolist() for feature in features] == [[after[i]] * HIDDEN for i in ids]


@pytest.mark.parametrize("ids", [[0, 2], [4, 0]], ids=str)
def test_a_wrapper_that_calls_its_body_for_what_the_body_lacks_captures(ids: list[int]) -> None:
    class Wrapper(Target):
        def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
            self.language_model.model.set_dflash_layers_to_capture([i + 1 for i in layer_ids])

    ensure_capture(target := Wrapper(), ids)
    target.set_dflash_layers_to_capture(ids)
    _, features = target.run()
    assert [feature[1].tolist() for feature in features] == [[AFTER[i]] * HIDDEN for i in ids]


@pytest.mark.parametrize("method", ["set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"])
@pytest.mark.parametrize("ids", [[0, 2], [4, 0]], ids=str)
def test_the_language_model_of_a_wrapper_without_a_capture_method_captures(ids: list[int], method: str) -> None:
    target = Target()
    text = target.language_model
    setattr(text, method, lambda ids: setattr(text.model, "layers_to_capture", [i + 1 for i in ids]))
    ensure_capture(target, ids)
    target.set_dflash_layers_to_capture(ids)
    _, features = target.run()
    assert [feature[1].tolist() for feature in features] == [[AFTER[i]] * HIDDEN for i in ids]


class AddsTens(torch.nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def forward(self, positions: torch.Tensor, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return x + 10.0**self.i


def muse_glimmer() -> Any:
    """SGLang's own target, whose layer i adds 10 ** i."""
    from sglang.srt.configs.muse_glimmer import MuseGlimmerConfig
    from sglang.srt.models.muse_glimmer import MuseGlimmerForCausalLM

    from tests.support import sglang_layers

    sglang_layers.start_rank()
    kinds = dict(layer_types=["full_attention"] * LAYERS, no_rope_layers=[1] * LAYERS)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    target = MuseGlimmerForCausalLM(MuseGlimmerConfig(vocab_size=8, num_hidden_layers=LAYERS, **sizes, **kinds))
    target.model.layers = torch.nn.ModuleList(AddsTens(i) for i in range(LAYERS))
    return target


@pytest.mark.parametrize("ids", [[0, 2, 3], [0, 2, 4], [4], [3, 0, 2], [4, 0, 2]], ids=str)
@pytest.mark.parametrize(("architecture", "by_output"), [("DFlash2DraftModel", True), ("DFlashDraftModel", False)])
def test_muse_glimmers_layers_are_named_by_output_in_dflash2_drafts_and_by_input_in_older_ones(
    ids: list[int], architecture: str, by_output: bool
) -> None:
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state

    asked = spec_aux_hidden_state._map_muse_target_layer_ids(
        target_hf_config=SimpleNamespace(model_type="muse_glimmer"),
        draft_hf_config=SimpleNamespace(architectures=[architecture]),
        layer_ids=ids,
    )
    target = muse_glimmer()
    ensure_capture(target, ids, asked)
    target.set_dflash_layers_to_capture(asked)
    embeds = torch.zeros(2, 16)
    for _ in range(2):
        _, features = target.model(None, torch.arange(2), None, embeds)
        before = [0.0, 1.0, 11.0, 111.0, 1111.0, 11111.0]
        assert [feature[1, 0].item() for feature in features] == [before[i + by_output] for i in ids]


def test_a_captured_last_layer_survives_later_writes_to_the_residual() -> None:
    ensure_capture(target := DFlashTarget(), [4])
    target.set_dflash_layers_to_capture([4])
    kept = []
    target.language_model.model.norm.register_forward_hook(lambda norm, args, out: kept.append(out[1]))
    _, (feature,) = target.run()
    kept[0].zero_()
    assert feature[0].tolist() == [AFTER[-1]] * HIDDEN


def test_an_idle_batch_that_skips_the_final_norm_has_empty_features() -> None:
    ensure_capture(target := DFlashTarget(), [4, 0])
    target.set_dflash_layers_to_capture([4, 0])
    target.run()
    _, features = target.run(tokens=0)
    assert [feature.shape for feature in features] == [(0, HIDDEN), (0, HIDDEN)]


def test_a_body_keeps_the_signature_that_prefill_graphs_read() -> None:
    ensure_capture(target := DFlashTarget(), [4, 0])
    assert "input_embeds" in inspect.signature(target.language_model.model.forward).parameters


def test_a_target_that_delivers_the_layers_itself_runs_its_own_forward() -> None:
    ensure_capture(target := DFlashTarget(), [0, 3])
    assert "forward" not in vars(target.language_model.model)


def test_a_target_without_any_capture_method_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="target class Target: expected set_dflash_layers_to_capture or"):
        ensure_capture(Target(), [0])


def test_a_body_that_cannot_be_found_is_refused_only_where_it_would_have_to_reorder() -> None:
    ensure_capture(target := DFlashTarget(), [0, 1])
    del target.language_model.model.layers_to_capture
    ensure_capture(target, [0, 1])
    with pytest.raises(CaptureError, match=r"target_layer_ids=\[1, 0\]: DFlashTarget captures in layer order"):
        ensure_capture(target, [1, 0])


def test_other_layers_than_the_drafts_are_refused() -> None:
    ensure_capture(target := DFlashTarget(), [0, 2])
    with pytest.raises(CaptureError, match=r"asks the target for \[1, 3\], the draft expects \[0, 2\]"):
        target.set_dflash_layers_to_capture([1, 3])


def test_a_body_that_captures_too_little_is_refused_when_it_runs() -> None:
    ensure_capture(target := DFlashTarget(), [4, 0])
    target.set_dflash_layers_to_capture([4, 0])
    target.language_model.model.layers_to_capture = []
    with pytest.raises(CaptureError, match=r"Body captured 0 of the layers \[0\]"):
        target.run()


# ---- SGLang's Qwen3 against that of transformers ---------------------------------------------------------


class CausalAttention:
    """Causal attention of one sequence's prefill, in place of a served backend."""

    token_to_kv_pool = None

    def forward(self, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **options: Any) -> torch.Tensor:
        heads = [x.view(len(x), -1, layer.head_dim).transpose(0, 1) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).reshape(len(q), -1)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny Qwen3 in SGLang and in transformers, with the output of each of the latter's layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = target_config()
    tensors = target_tensors(config)
    directory = write_checkpoint(tmp_path_factory.mktemp("capture") / "target", config, tensors)
    reference = AutoModelForCausalLM.from_pretrained(directory)
    outputs: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda layer, args, out: outputs.append(out[0] if out.ndim == 3 else out))
    input_ids = torch.arange(7, 19)
    with torch.no_grad():
        reference(input_ids[None])

    sglang_layers.start_rank()
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM

    def make() -> Any:
        with sglang_layers.defaults(torch.float32):
            model = Qwen3ForCausalLM(AutoConfig.from_pretrained(directory))
            model.load_weights((name, tensor) for name, tensor in tensors.items())
        return model.to("cpu")

    return SimpleNamespace(make=make, input_ids=input_ids, outputs=outputs)


def run_qwen3(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    rows = torch.arange(len(input_ids))
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=input_ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([len(rows)]),
        out_cache_loc=rows,
        seq_lens_sum=len(rows),
    )
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=CausalAttention())):
        return model.model(input_ids, rows, batch)


@sglang_layers.cpu_only
@pytest.mark.parametrize("method", ["set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"])
@pytest.mark.parametrize("ids", [[1, 3], [0, 2, 4], [4, 0, 2]], ids=str)
def test_sglangs_qwen3_hands_over_what_transformers_computes_after_these_layers(
    qwen3: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, ids: list[int], method: str
) -> None:
    model = qwen3.make()
    if method == "set_eagle3_layers_to_capture":
        monkeypatch.delattr(type(model), "set_dflash_layers_to_capture")
    ensure_capture(model, ids)
    model.set_dflash_layers_to_capture(ids)
    _, features = run_qwen3(model, qwen3.input_ids)
    assert len(features) == len(ids)
    for feature, i in zip(features, ids, strict=True):
        torch.testing.assert_close(feature, qwen3.outputs[i], rtol=1e-4, atol=1e-4)
