"""What a model runner runs its next forward with: an attention backend, graphs, and a pool of recurrent states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dflash_sglang.patches.apply import replace, replaced

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def use(runner: ModelRunner, attention: Any, graphs: Any, recurrent: Any = None) -> None:
    """From the next forward on.

    graphs: SGLang's decode graph runner, its eager runner, or None. recurrent: a form of the target's
    `MambaPool.SpeculativeState`, or None for a runner without recurrent layers."""
    replace("runtime-attention", runner, attention)
    replace("runtime-graphs", runner, graphs)
    if recurrent is not None:
        replace("runtime-recurrent", runner.req_to_token_pool.mamba_pool, recurrent)


def captured_with(runner: ModelRunner, recurrent: Any) -> AbstractContextManager[None]:
    """Graphs that are captured meanwhile keep the states of verified rows in `recurrent`, if it is not None."""
    if recurrent is None:
        return nullcontext()
    return replaced("runtime-recurrent", runner.req_to_token_pool.mamba_pool, recurrent)
