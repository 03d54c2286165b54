"""LoRA adapters on a CPU: SGLang's torch backend, without the pinned memory of its small tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from torch.overrides import TorchFunctionMode

BACKEND = "torch_native"


def register(source: HookSource) -> None:
    """Registers the hooks; SGLang's `load_plugins()` or `HookRegistry.apply_hooks()` puts them in place."""
    for target in (
        "sglang.srt.model_executor.model_runner.ModelRunner.init_lora_manager",
        "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    ):
        HookRegistry.register(target, unpinned, HookType.AROUND, source=source)


def unpinned(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with _Unpinned():
        original(*args, **kwargs)


class _Unpinned(TorchFunctionMode):
    """Makes memory that torch would pin, which takes a GPU, ordinary."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})
