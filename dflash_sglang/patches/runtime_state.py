"""What a model runner runs its next forward with: an attention backend and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_sglang.patches.apply import replace

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def use(runner: ModelRunner, attention: Any, graphs: Any) -> None:
    """From the next forward on. graphs: SGLang's decode graph runner, its eager runner, or None."""
    replace("runtime-attention", runner, attention)
    replace("runtime-graphs", runner, graphs)
