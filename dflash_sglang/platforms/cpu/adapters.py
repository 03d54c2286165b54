"""LoRA adapters on a CPU: SGLang's torch backend, without the pinned memory of its small tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BACKEND = "torch_native"


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
