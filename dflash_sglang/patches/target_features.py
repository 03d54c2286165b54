"""Capture of the draft's features: the target's residual stream after the layers that the checkpoint names.

SGLang's models capture in layer order, before layer i + 1; after the last layer there is none. Here the
features come in the checkpoint's order, the last layer's among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_sglang.startup.target_class import CAPTURE_METHODS

# Bodies of SGLang that capture a layer's output without the residual that it has yet to be added to. Their layers
# return (output, residual).
_WITHOUT_RESIDUAL = ("Gemma3TextModel",)
# Bodies of SGLang for which a layer to capture is one whose input is meant, and not its output.
_BY_INPUT = ("MuseGlimmerModel",)


class CaptureError(ValueError):
    """The target's class cannot deliver the features that the draft asks for."""


def ensure_capture(
    target_model: torch.nn.Module, layer_ids: Sequence[int], asked: Sequence[int] | None = None
) -> None:
    """Makes the target capture the residual stream after `layer_ids` (0-based, unique), in this order.

    asked: what SGLang will ask the target for, None for `layer_ids`. On a Muse Glimmer target it names layers by
    their input: one more than `layer_ids` for DFlash2 drafts. For older drafts it is the same, because they name
    the layers so, too; then the residual stream before `layer_ids` is captured.

    Call it before SGLang sets the attention backends up: that calls the target's
    `set_dflash_layers_to_capture`, which exists afterwards even where the class only has
    `set_eagle3_layers_to_capture` (the same contract under another name), or is a wrapper whose `language_model`
    has either. A target that already delivers these layers is left as it is; otherwise its transformer body is
    made to return the features in this order, the last layer's taken at the final norm, and all of them at the
    layers where the body's own captures are no residual stream. All of it runs inside captured graphs.

    Raises CaptureError where neither has a capture method, or the body cannot reorder.
    """
    ids = tuple(layer_ids)
    asked = ids if asked is None else tuple(asked)
    set_layers, body = _capture_method(target_model), _body(target_model)
    by_input = int(body is not None and _is_one_of(body, _BY_INPUT))
    if by_input and asked == ids:
        ids = tuple(i - 1 for i in ids)
    if body is not None and not hasattr(body, "set_dflash_layers_to_capture"):
        # Qwen3-VL's wrapper calls it on its body, which has it in the mixture-of-experts model alone.
        body.set_dflash_layers_to_capture = functools.partial(setattr, body, "layers_to_capture")
    if body is None and list(ids) != sorted(ids):
        raise CaptureError(
            f"target_layer_ids={list(ids)}: {type(target_model).__name__} captures in layer order and has no "
            "transformer body (a module with layers and layers_to_capture) to reorder at. "
            "Serve this draft on another target class."
        )
    captured: Sequence[int] = ids
    outside = body is not None and _is_one_of(body, _WITHOUT_RESIDUAL)
    if body is not None and (list(ids) != sorted(ids) or ids[-1] == _last_layer(body) or outside):
        features = _OrderedFeatures(body, ids)
        features.install()
        captured = features.model_ids
    named, of_model = (tuple(i + by_input for i in of) for of in (ids, captured))
    target_model.set_dflash_layers_to_capture = functools.partial(_checked, named, set_layers, list(of_model))


def deliver_hidden_states(target_model: torch.nn.Module) -> None:
    """The features are the hidden states that Step-3.5 in SGLang hands out by itself: those before the final norm.

    As for `ensure_capture`, SGLang asks the target for layers to capture: there is nothing to set.
    """
    target_model.set_dflash_layers_to_capture = lambda layer_ids: None


def _capture_method(target_model: torch.nn.Module) -> Callable[[list[int]], None]:
    """The target's own, or of the language model that it wraps."""
    for model in (target_model, getattr(target_model, "language_model", None)):
        for name in CAPTURE_METHODS:
            method = getattr(model, name, None)
            if method is not None:
                return method
    raise CaptureError(
        f"target class {type(target_model).__name__}: expected set_dflash_layers_to_capture or "
        "set_eagle3_layers_to_capture, which hand the draft its features. Serve another target, or without "
        "--speculative-algorithm DFLASH."
    )


def _checked(
    expected: tuple[int, ...], set_layers: Callable[[list[int]], None], ids: list[int], layer_ids: Sequence[int]
) -> None:
    if tuple(layer_ids) != expected:
        raise CaptureError(
            f"target_layer_ids: SGLang asks the target for {list(layer_ids)}, the draft expects {list(expected)}. "
            "Check --json-model-override-args against the draft's config.json."
        )
    set_layers(ids)


def _body(target_model: torch.nn.Module) -> Any:
    """The module that runs the decoder layers and collects the captures, whatever it is nested in."""
    bodies = [
        module
        for module in target_model.modules()
        if hasattr(module, "layers_to_capture") and hasattr(module, "layers")
    ]
    return bodies[0] if len(bodies) == 1 else None


def _last_layer(body: Any) -> int:
    """A looped body numbers its layers through all loops."""
    loops = getattr(getattr(body, "config", None), "num_loops", 1)
    return len(body.layers) * loops - 1


def _is_one_of(body: Any, names: Sequence[str]) -> bool:
    return any(base.__name__ in names for base in type(body).__mro__)


class _OrderedFeatures:
    """Arranges what a transformer body captures, and adds what it does not: at most the last layer's output."""

    def __init__(self, body: Any, ids: tuple[int, ...]) -> None:
        self._body = body
        self._ids = ids
        # Without a final norm to observe, the body is trusted with its last layer and checked when it runs.
        self._last = _last_layer(body) if _last_layer(body) in ids and hasattr(body, "norm") else None
        self._observed: dict[int, torch.Tensor] = {}  # layer -> its output, seen from outside
        at_layers = ids if _is_one_of(body, _WITHOUT_RESIDUAL) else ()
        self.model_ids = sorted(i for i in ids if i != self._last and i not in at_layers)

    def install(self) -> None:
        if _is_one_of(self._body, _WITHOUT_RESIDUAL):
            for i in self._ids:
                self._body.layers[i].register_forward_hook(functools.partial(self._keep_output, i))
        elif self._last is not None:
            self._body.norm.register_forward_hook(self._keep_residual)
        run = self._body.forward

        # SGLang reads the signature of a body's forward, and swaps the attribute to replay a prefill graph.
        @functools.wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._observed.clear()
            return self._arrange(run(*args, **kwargs))

        self._body.forward = forward

    def _keep_residual(self, norm: torch.nn.Module, args: tuple, output: Any) -> None:
        """The final norm's input: `norm(x, residual)` returns the sum it normalised, `norm(x)` does not."""
        summed = output[1] if isinstance(output, tuple) else args[0]
        assert self._last is not None
        self._observed[self._last] = summed.clone()

    def _keep_output(self, i: int, layer: torch.nn.Module, args: tuple, output: Any) -> None:
        hidden, residual = output
        self._observed[i] = hidden + residual

    def _arrange(self, output: Any) -> Any:
        hidden, others, captured = self._parts(output)
        if isinstance(captured, torch.Tensor):
            captured = captured.chunk(len(self.model_ids), dim=-1)
        if len(captured) != len(self.model_ids):
            raise CaptureError(
                f"target_layer_ids={list(self._ids)}: {type(self._body).__name__} captured {len(captured)} "
                f"of the layers {self.model_ids}. This target class cannot serve the draft."
            )
        by_layer = self._observed | dict(zip(self.model_ids, captured, strict=True))
        if self._last is not None and self._last not in by_layer:
            by_layer[self._last] = self._unobserved_last(hidden)
        return hidden, *others, [by_layer[i] for i in self._ids]

    def _parts(self, output: Any) -> tuple[Any, list[Any], Any]:
        """(hidden states, what else the body returns, its captures): bodies that captured nothing return none, and
        MiMo-V2's returns the hidden states before its norm, too."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        captures = bool(others) and (bool(self.model_ids) or isinstance(others[-1], list))
        captured = others.pop() if captures else None
        return hidden, others, [] if captured is None else captured

    def _unobserved_last(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] == 0:
            return hidden  # an idle batch skips the final norm
        raise CaptureError(
            f"target_layer_ids={list(self._ids)}: {type(self._body).__name__} finished without its final "
            f"norm, where layer {self._last} is captured. This target class cannot serve the draft."
        )
