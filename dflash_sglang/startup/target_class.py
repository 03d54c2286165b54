"""Which class of SGLang serves a target, found without importing all of its models."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.sglang_names.launcher import envs

_MODELS = "sglang.srt.models"
_REGISTRY = f"{_MODELS}.registry"
CAPTURE_METHODS = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
"""Of a target's class: either hands out what the draft is fed with."""
_WRAPPERS = ("LlavaForConditionalGeneration",)
"""Vision-language classes, with those derived from them, that leave the forward to a `language_model` of the class
that transformers has for their text_config."""


def hands_out_features(architectures: Sequence[str], text_config: Any, model_impl: Any) -> bool:
    """Whether the class of a target, or of the language model in a wrapper, has one of `CAPTURE_METHODS`.

    ``text_config``: the transformers config of the language model. ``model_impl``: as of `target_class`.
    """
    model = target_class(architectures, model_impl)
    if model is not None and any(base.__name__ in _WRAPPERS for base in model.__mro__):
        # Imported here: most targets are no wrappers.
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text_config.model_type)
        model = target_class([] if name is None else [name], model_impl)
    return model is not None and any(hasattr(model, method) for method in CAPTURE_METHODS)


def target_class(architectures: Sequence[str], model_impl: Any) -> type | None:
    """The first class that SGLang has under one of these names; None where transformers' own model would run.

    ``model_impl``: of SGLang's ModelConfig (--model-impl). Packages of models that were registered come first.
    """
    if str(getattr(model_impl, "value", model_impl)) == "transformers":
        return None
    for name in architectures:
        for found in itertools.chain(_registered(name), defined_classes(name)):
            return found
    return None


def _registered(name: str) -> Iterator[type]:
    """Of SGLang's registry, where it is imported anyway: it imports every model, which takes seconds."""
    if _REGISTRY in sys.modules or envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():
        model = importlib.import_module(_REGISTRY).ModelRegistry.models.get(name)
        if isinstance(model, type):
            yield model


def defined_classes(name: str) -> Iterator[type]:
    """The class of this name that a module of SGLang's own models offers as its entry."""
    files = [
        path
        for directory in importlib.import_module(_MODELS).__path__
        for path in sorted(Path(directory).glob("*.py"))
        if name in path.read_text(encoding="utf-8")
    ]
    defined = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    files.sort(key=lambda path: not defined.search(path.read_text(encoding="utf-8")))  # then those that import it
    for module in (path.stem for path in files):
        try:
            entry = getattr(importlib.import_module(f"{_MODELS}.{module}"), "EntryClass", [])
        except ImportError:
            continue  # SGLang's registry leaves it out, too
        yield from (model for model in (entry if isinstance(entry, list) else [entry]) if model.__name__ == name)
