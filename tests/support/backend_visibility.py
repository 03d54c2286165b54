"""What the rows of a draft's block see in SGLang's attention backends, told by a scheduler that is starting.

A plugin of SGLang like `scheduler_hooks`: once pools exist, each backend of DFLASH_TEST_BACKENDS (comma-separated)
is built for the draft's runner and asked, for layers of every kind, eagerly and, on a GPU, in a graph captured at
another length. NAME.json in DFLASH_TEST_RECORDS has the answers; then start-up ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.scheduler_hooks import RECORDS_ENV

BACKENDS_ENV = "DFLASH_TEST_BACKENDS"
RIGHT = "right"
TOLD = "the backends have told what they see"
KINDS = ("sliding, causal", "sliding, not causal", "full, causal", "full, not causal")


def activate() -> None:
    """Entry point: patches the worker class in the scheduler, before backends exist."""
    names = [name for name in os.environ.get(BACKENDS_ENV, "").split(",") if name]
    if not names:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before_memory_pools(scheduler: Any) -> None:
        from dflash_sglang.worker import DFlashWorker

        init_attention_backends = DFlashWorker.init_attention_backends

        def then_tell(self: Any) -> None:
            init_attention_backends(self)
            with self._draft.scope(), torch.no_grad():
                for name in names:
                    answers = _tell(self._draft.runner, self._draft.model, self.block_size, name)
                    (Path(os.environ[RECORDS_ENV]) / f"{name}.json").write_text(json.dumps(answers))
            raise RuntimeError(TOLD)

        DFlashWorker.init_attention_backends = then_tell  # type: ignore[method-assign]

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_memory_pools", before_memory_pools, HookType.BEFORE
    )


def _tell(runner: Any, model: Any, block_size: int, name: str) -> dict[str, str]:
    """`RIGHT`, what is wrong, or an error, by kind of layer and way of running it; or the backend's own error."""
    try:
        backend = _built(runner, name)
    except Exception as error:
        return {"backend": _said(error)}
    ways: dict[str, Any] = {"eager": None, "graph": captured} if runner.device == "cuda" else {"eager": None}
    return {
        f"{kind}, {way}": _answer(runner, model, backend, block_size, kind, attend)
        for way, attend in ways.items()
        for kind in KINDS
    }


def _built(runner: Any, name: str) -> Any:
    """As the worker and `RuntimeState.build` make one."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from dflash_sglang.patches.attention_room import plan_windows, room_for_blocks
    from dflash_sglang.patches.flash3 import spare_launches

    with room_for_blocks(runner):
        backend = ATTENTION_BACKENDS[name](runner)
    spare_launches(backend)
    plan_windows(backend)
    return backend


def _answer(runner: Any, model: Any, backend: Any, block_size: int, kind: str, attend: Any) -> str:
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    from dflash_sglang.attention.visibility import eagerly, edges, seen_keys, visible
    from dflash_sglang.checkpoint.layers import LayerAttention

    sliding, causal = kind.startswith("sliding"), "not" not in kind
    window = model.get_attention_sliding_window_size() + 1 if sliding else None
    attention = LayerAttention("sliding_attention" if sliding else "full_attention", causal, window)
    of_draft = model.layers[0].self_attn.attn
    layer = RadixAttention(
        of_draft.tp_q_head_num,
        of_draft.head_dim,
        of_draft.scaling,
        num_kv_heads=of_draft.tp_k_head_num,
        layer_id=0,
        sliding_window_size=-1 if window is None else window - 1,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )
    context, keys = edges(attention, block_size, 4 * (window or block_size))
    try:
        seen = seen_keys(runner, backend, layer, block_size, context, keys, attend or eagerly)
    except Exception as error:
        return _said(error)
    wrong = (seen != visible(attention, block_size, context, keys)[:, None]).any(dim=1).nonzero().tolist()
    if not wrong:
        return RIGHT
    return "; ".join(
        f"row {row} {'sees' if seen[row, :, i].any() else 'does not see'} {keys[i] - context}" for row, i in wrong
    )


def captured(backend: Any, forward_batch: Any, layer: Callable[[], Tensor]) -> Tensor:
    """A layer in a CUDA graph that is captured at SGLang's length for captures and replayed at the batch's."""
    from dflash_sglang.sglang_names.scheduler import ForwardContext, forward_context

    tokens = forward_batch.positions.numel()
    backend.init_cuda_graph_state(1, tokens)
    with _length(forward_batch, backend.get_cuda_graph_seq_len_fill_value()):
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)

        def run() -> Tensor:
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata_in_graph(forward_batch)
            return layer()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            backend.on_after_cuda_graph_warmup()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
    with forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata_out_graph(forward_batch)
    graph.replay()
    torch.cuda.synchronize()
    return output.clone()


@contextmanager
def _length(batch: Any, length: int) -> Iterator[None]:
    """The batch has this length meanwhile."""
    before = batch.seq_lens.clone(), batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens.fill_(length)
    batch.seq_lens_cpu, batch.seq_lens_sum = torch.full_like(batch.seq_lens_cpu, length), length
    try:
        yield
    finally:
        lengths, batch.seq_lens_cpu, batch.seq_lens_sum = before
        batch.seq_lens.copy_(lengths)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:400]}"


def answers(directory: Path) -> dict[str, dict[str, str]]:
    """By name what the backends have told that a scheduler came to."""
    return {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
