"""Quantised drafts on SGLang's layers: loaded as its loader does, and processed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support import sglang_layers as layers
from tests.support.quantised_layouts import dequantised
from tests.support.tiny import draft_config, draft_tensors
from training.quantise import SCHEMES, SGLANG_METHODS, quantise
from training.reference import ReferenceDraft

SHAPE: dict[str, Any] = dict(hidden_size=256, head_dim=64, intermediate_size=512, num_hidden_layers=3)
SHAPE["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
DTYPE = torch.float32 if layers.DEVICE == "cpu" else torch.bfloat16


@functools.cache
def checkpoint(scheme: str, seed: int = 1, **overrides: Any) -> Mapping[str, Tensor]:
    """A random draft's tensors in a scheme, made once in a process."""
    config = draft_config(**{**SHAPE, **overrides})
    weights = {n: t.bfloat16().float() for n, t in draft_tensors(config, seed).items()}
    read = None
    if SCHEMES[scheme].static:  # scales that tell the layers apart
        matrices = [n.removesuffix(".weight") for n, t in weights.items() if t.ndim == 2]
        read = {n: SimpleNamespace(largest=4.0 + 0.1 * i, moments=None) for i, n in enumerate(matrices)}
    return quantise(weights, SCHEMES[scheme], read)  # type: ignore[arg-type]


def sglang_config(raw: Mapping[str, Any]) -> Any:
    """SGLang's object for a checkpoint's quantization_config, as its loader makes it for a draft; for an empty
    one, of a dense checkpoint, that of `--speculative-draft-model-quantization fp8`."""
    from sglang.srt.layers.quantization import get_quantization_config

    from dflash_sglang.models.draft import DFlashDraftModel

    if not raw:
        return get_quantization_config("fp8")()
    method = SGLANG_METHODS.get(raw["quant_method"], raw["quant_method"])
    packed = DFlashDraftModel.packed_modules_mapping
    config = get_quantization_config(method).from_config({**raw, "packed_modules_mapping": packed})
    config.apply_weight_name_mapper(DFlashDraftModel.hf_to_sglang_mapper)
    return config


def build(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], **overrides: Any) -> Any:
    """The draft model with these tensors, processed."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    model = layers.make_draft(directory, DTYPE, sglang_config(raw), tensors, **{**SHAPE, **overrides})
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return model


def reference(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], **overrides: Any) -> ReferenceDraft:
    """The plain-PyTorch draft of the same checkpoint, as an independent reader understands it."""
    return ReferenceDraft.from_weights(draft_config(**{**SHAPE, **overrides}), dequantised(tensors, raw))
