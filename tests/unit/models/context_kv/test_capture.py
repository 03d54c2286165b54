"""Capture of the target's layers (C11) on bodies of SGLang's contract. Its own classes: `tests.zoo`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.muse_glimmer import MuseGlimmerConfig
from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state
from sglang.srt.models.muse_glimmer import MuseGlimmerForCausalLM

from dflash_sglang.patches.target_features import CaptureError, ensure_capture

HIDDEN, LAYERS = 4, 5
DFLASH, EAGLE3 = "set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"


class Norm(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual += x  # in place, as the fused kernels do
        return residual * 2, residual


class Body(torch.nn.Module):
    """A transformer body as SGLang writes them: layer i adds 10 ** i, captures are taken before a layer."""

    def __init__(self, packed: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))
        self.norm = Norm()
        self.layers_to_capture: list[int] = []
        self.packed = packed

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        x, residual = torch.zeros(len(input_ids), HIDDEN), torch.ones(len(input_ids), HIDDEN)
        captured = []
        for i in range(self.passes()):
            x, residual = self.before_layer(i, x, residual)
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

    def passes(self) -> int:
        return len(self.layers)

    def before_layer(self, i: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, residual


class MiMoV2(Body):
    """Returns the hidden states before its norm, or None, between the others, as SGLang's MiMo-V2 does."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, input_embeds: Any = None) -> Any:
        output = super().forward(input_ids, positions, input_embeds)
        hidden, *captured = output if isinstance(output, tuple) else (output,)
        return hidden, "before the norm", *captured


class LoopedBody(Body):
    """Runs its layers twice and numbers them through both, as SGLang's Nanbeige does."""

    config = SimpleNamespace(num_loops=2)

    def passes(self) -> int:
        return 2 * len(self.layers)

    def before_layer(self, i: int, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if i != len(self.layers):
            return x, residual
        return self.norm(x, residual.clone())[0], torch.zeros_like(x)


class ResidualLayer(torch.nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(x, 10.0**self.i), residual + x


class Gemma3TextModel(Body):
    """Layers return (output, residual) and a capture takes the output alone, as in SGLang's class of this name."""

    def __init__(self) -> None:
        super().__init__()
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


class Target(torch.nn.Module):
    """A body in a language model. methods: those that set its layers, by name."""

    def __init__(self, body: Body | None = None, *methods: str) -> None:
        super().__init__()
        self.language_model = torch.nn.Module()
        self.language_model.model = Body() if body is None else body
        for method in methods:
            setattr(self, method, self.capture)

    def capture(self, layer_ids: list[int] | None = None) -> None:
        self.language_model.model.layers_to_capture = [i + 1 for i in ([2] if layer_ids is None else layer_ids)]

    def run(self, tokens: int = 2) -> tuple[Any, ...]:
        return self.language_model.model(torch.zeros(tokens), torch.zeros(tokens))


class Wrapper(Target):
    """Calls its body for what the body lacks."""

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.language_model.model.set_dflash_layers_to_capture([i + 1 for i in layer_ids])


def of_language_model(method: str) -> Target:
    """A wrapper without a method to capture."""
    target = Target()
    setattr(target.language_model, method, target.capture)
    return target


AFTER = [2.0, 12.0, 112.0, 1112.0, 11112.0]  # the residual stream after each layer
LOOPED = [2.0, 24.0, 124.0, 1124.0]  # the first loop ends with a norm, which doubles 12
TARGETS: dict[str, tuple[Callable[[], Target], list[float]]] = {
    "dflash": (lambda: Target(Body(), DFLASH), AFTER),
    "dflash, packed": (lambda: Target(Body(packed=True), DFLASH), AFTER),
    "eagle3": (lambda: Target(Body(), EAGLE3), AFTER),
    "eagle3, packed": (lambda: Target(Body(packed=True), EAGLE3), AFTER),
    "captures without the residual": (lambda: Target(Gemma3TextModel(), EAGLE3), AFTER),
    "returns more": (lambda: Target(MiMoV2(), DFLASH), AFTER),
    "returns more, packed": (lambda: Target(MiMoV2(packed=True), DFLASH), AFTER),
    "looped": (lambda: Target(LoopedBody(layers=2), DFLASH), LOOPED),
    "asks its body": (Wrapper, AFTER),
    "dflash of the language model": (lambda: of_language_model(DFLASH), AFTER),
    "eagle3 of the language model": (lambda: of_language_model(EAGLE3), AFTER),
}


@pytest.mark.parametrize(("make", "after"), TARGETS.values(), ids=TARGETS)
def test_the_features_are_the_residuals_after_the_layers_in_the_order_of_the_ids(make, after):
    last = len(after) - 1
    for ids in ([0, 2, 3], [0, 2, last], [last], [3, 0, 2], [last, 0, 2], [2, last, 0], [0, 1]):
        target = make()
        ensure_capture(target, ids)
        target.set_dflash_layers_to_capture(ids)
        for _ in range(2):
            hidden, *others, features = target.run()
            features = list(features.chunk(len(ids), -1)) if isinstance(features, torch.Tensor) else features
            assert [feature[1].tolist() for feature in features] == [[after[i]] * HIDDEN for i in ids], ids
            assert hidden[0].tolist() == [2 * after[-1]] * HIDDEN
            assert others == (["before the norm"] if isinstance(target.language_model.model, MiMoV2) else [])


class AddsTens(torch.nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i

    def forward(self, positions: torch.Tensor, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return x + 10.0**self.i


def muse_glimmer() -> Any:
    """SGLang's own target, whose layer i adds 10 ** i."""
    kinds = dict(layer_types=["full_attention"] * LAYERS, no_rope_layers=[1] * LAYERS)
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    target = MuseGlimmerForCausalLM(MuseGlimmerConfig(vocab_size=8, num_hidden_layers=LAYERS, **sizes, **kinds))
    target.model.layers = torch.nn.ModuleList(AddsTens(i) for i in range(LAYERS))
    return target


@pytest.mark.parametrize(("architecture", "by_output"), [("DFlash2DraftModel", True), ("DFlashDraftModel", False)])
def test_muse_glimmers_layers_are_named_by_output_in_dflash2_drafts_and_by_input_in_older_ones(
    architecture: str, by_output: bool
) -> None:
    before = [0.0, 1.0, 11.0, 111.0, 1111.0, 11111.0]
    for ids in ([0, 2, 3], [0, 2, 4], [4], [3, 0, 2], [4, 0, 2]):
        asked = spec_aux_hidden_state._map_muse_target_layer_ids(
            target_hf_config=SimpleNamespace(model_type="muse_glimmer"),
            draft_hf_config=SimpleNamespace(architectures=[architecture]),
            layer_ids=ids,
        )
        target = muse_glimmer()
        ensure_capture(target, ids, asked)
        target.set_dflash_layers_to_capture(asked)
        for _ in range(2):
            _, features = target.model(None, torch.arange(2), None, torch.zeros(2, 16))
            assert [feature[1, 0].item() for feature in features] == [before[i + by_output] for i in ids]


def dflash_target(ids: list[int]) -> Target:
    target = Target(Body(), DFLASH)
    ensure_capture(target, ids)
    return target


def test_a_captured_last_layer_survives_later_writes_to_the_residual() -> None:
    target = dflash_target([4])
    target.set_dflash_layers_to_capture([4])
    kept = []
    target.language_model.model.norm.register_forward_hook(lambda norm, args, out: kept.append(out[1]))
    _, (feature,) = target.run()
    kept[0].zero_()
    assert feature[0].tolist() == [AFTER[-1]] * HIDDEN


def test_an_idle_batch_that_skips_the_final_norm_has_empty_features() -> None:
    target = dflash_target([4, 0])
    target.set_dflash_layers_to_capture([4, 0])
    target.run()
    _, features = target.run(tokens=0)
    assert [feature.shape for feature in features] == [(0, HIDDEN), (0, HIDDEN)]


def test_a_forward_is_replaced_where_it_has_to_be_and_keeps_the_signature_that_prefill_graphs_read() -> None:
    assert "input_embeds" in inspect.signature(dflash_target([4, 0]).language_model.model.forward).parameters
    assert "forward" not in vars(dflash_target([0, 3]).language_model.model)


def test_a_target_that_cannot_capture_what_the_draft_expects_is_refused() -> None:
    with pytest.raises(CaptureError, match="target class Target: expected set_dflash_layers_to_capture or"):
        ensure_capture(Target(), [0])
    target = dflash_target([0, 1])
    del target.language_model.model.layers_to_capture  # a body that cannot be found
    ensure_capture(target, [0, 1])
    with pytest.raises(CaptureError, match=r"target_layer_ids=\[1, 0\]: Target captures in layer order"):
        ensure_capture(target, [1, 0])
    target = dflash_target([0, 2])
    with pytest.raises(CaptureError, match=r"asks the target for \[1, 3\], the draft expects \[0, 2\]"):
        target.set_dflash_layers_to_capture([1, 3])
    target = dflash_target([4, 0])
    target.set_dflash_layers_to_capture([4, 0])
    target.language_model.model.layers_to_capture = []
    with pytest.raises(CaptureError, match=r"Body captured 0 of the layers \[0\]"):
        target.run()
