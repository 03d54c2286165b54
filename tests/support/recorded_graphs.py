"""CUDA graphs on the CPU: SGLang's decode graph runner over recorded torch operations.

A recording has what makes a CUDA graph one: replayed are the operations of the capture, on the tensors of the
capture, without its Python. Reading a value or a data-dependent shape while it records is an error, as it is under
CUDA. Attention is replayed as a call, of a backend whose metadata SGLang has renewed, and so are the copy of as
many rows as a tensor says and the experts of tokens. Collectives are waited for.

A plugin of SGLang like `scheduler_hooks`: `recording(directory)` gives the environment of a server whose target
and draft run in such graphs. Each replay adds a line to `directory`/replays.jsonl: `replays` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.support import scheduler_hooks

DIRECTORY_ENV = "DFLASH_TEST_REPLAYS"
SIZES = (1, 2, 4, 8, 16)  # captured batch sizes
COLLECTIVES = "c10d"
UNCAPTURABLE = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "equal"}


class Node(NamedTuple):
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class Recording(TorchDispatchMode):
    """Records the operations that run under it; `replay` runs them again, into the tensors of the first time."""

    current: Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []

    def __enter__(self) -> Any:
        Recording.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        Recording.current = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in UNCAPTURABLE:
            raise RuntimeError(f"{func} in a captured graph: its result is known after the graph ran")
        out = func(*args, **kwargs)
        if func.namespace == COLLECTIVES or func._schema.is_mutable or not _are_views(out, (args, kwargs)):
            self.nodes.append(Node(func, args, kwargs, out))
        return out

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One node for a whole Python function."""
        with _disable_current_modes():
            out = run(*args, **kwargs)
        self.nodes.append(Node(run, args, kwargs, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for node in self.nodes:
            new = node.run(*node.args, **node.kwargs)
            if getattr(node.run, "namespace", None) == COLLECTIVES:
                new[-1].wait()
            for old, fresh in zip(_tensors(node.out), _tensors(new), strict=True):
                if old is not fresh:
                    old.copy_(fresh)


def _are_views(out: Any, of: Any) -> bool:
    """Whether there is nothing to compute. `reshape` may copy, so that its schema does not tell."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(of)}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(out))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, value)
    return found


class Backend:
    """SGLang's interface of a graph backend."""

    def __init__(self, runner: Any) -> None:
        self._role = "draft" if runner.model_runner.is_draft_worker else "target"
        self._graphs: dict[Any, tuple[Recording, Any]] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def capture_one(self, key: Any, forward: Callable[[], Any], **kwargs: Any) -> None:
        for _ in ("warm-up", "warm-up"):
            forward()
        with Recording() as recording:
            out = forward()
        self._graphs[key] = recording, out

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return key in self._graphs

    def replay(self, key: Any, forward_batch: Any, **kwargs: Any) -> Any:
        recording, out = self._graphs[key]
        recording.replay()
        with (Path(os.environ[DIRECTORY_ENV]) / "replays.jsonl").open("a") as file:
            file.write(json.dumps([self._role, key.size, forward_batch.batch_size, len(recording.nodes)]) + "\n")
        return out

    def cleanup(self) -> None:
        self._graphs.clear()


def recording(directory: Path, hooks: str = "", *modules: str, **environment: str) -> dict[str, str]:
    """`scheduler_hooks.hooked` of a server with recorded graphs."""
    environment = {DIRECTORY_ENV: str(directory), **environment}
    return scheduler_hooks.hooked(directory, hooks, "support.recorded_graphs", *modules, **environment)


class Replay(NamedTuple):
    role: str  # "target" or "draft"
    captured: int  # the graph's batch size
    requests: int
    operations: int


def replays(directory: Path) -> list[Replay]:
    return [Replay(*row) for row in scheduler_hooks.noted(directory, "replays.jsonl")]


def activate() -> None:
    """Entry point of the plugin."""
    if DIRECTORY_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_memory_pools", lambda scheduler: _install(), HookType.BEFORE
    )


def _install() -> None:
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
    from sglang.srt.platforms.interface import PlatformCapabilities

    from dflash_sglang.attention.torch_cpu import TorchCpuAttention
    from dflash_sglang.kernels.block import find_copy
    from dflash_sglang.sglang_names.scheduler import get_exec

    class Runner(module.DecodeCudaGraphRunner):
        def __init__(self, model_runner: Any, *, attn_backend: Any = None, **kwargs: Any) -> None:
            attention = attn_backend or model_runner.attn_backend
            attention.init_forward_metadata_out_graph = functools.partial(_prepare, attention)
            attention.init_cuda_graph_state = lambda max_bs, max_num_tokens: None
            attention.get_cuda_graph_seq_len_fill_value = lambda: 1
            attention.forward_extend = functools.partial(_as_node, attention.forward_extend)
            if isinstance(attention, TorchCpuAttention):  # as FlashAttention 3
                attention.prepares_in_graph = True
                attention.init_forward_metadata_in_graph = functools.partial(
                    _as_node, functools.partial(_prepare, attention)
                )
            super().__init__(model_runner, attn_backend=attn_backend, **kwargs)

        def warmup(self) -> None:
            """Compiles and tunes kernels."""

        def _record_in_graph_metadata_prep_done(self) -> None:
            """Records a CUDA event."""

    get_exec().graph.cuda_graph_config.decode.bs = list(SIZES)

    def sizes(runner: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        """As set while a runner is made: this package captures widths and trees at sizes of their own."""
        return list(get_exec().graph.cuda_graph_config.decode.bs), []

    @contextlib.contextmanager
    def no_stream(stream: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(stream=stream)

    def capture(*, model_runner: Any) -> setup.GraphCapture:
        phase = "draft_decode" if model_runner.is_draft_worker else "target_verify"
        runner = model_runner._decode_cuda_graph_runner_cls()(model_runner)
        return setup.GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0.0, capture_time=0.0)

    replaced: dict[str, Any] = dict(
        graph_capture=no_stream,
        get_or_create_global_graph_capture_stream=lambda: None,
        resolve_decode_backend=Backend,
        maybe_flashinfer_autotune_speculative_draft=lambda *args, **kwargs: None,
        get_batch_sizes_to_capture=sizes,
    )
    for name, value in replaced.items():
        assert hasattr(module, name), name
        setattr(module, name, value)
    setup.capture_decode_graph = capture
    ModelRunner._decode_cuda_graph_runner_cls = lambda runner: Runner
    # On a GPU kernels that read lengths.
    for name in ("find_copies_torch", "write_copies_torch"):
        setattr(find_copy, name, functools.partial(_as_node, getattr(find_copy, name)))
    dp_attention.memcpy = functools.partial(_as_node, dp_attention.memcpy)
    fused_moe_native.moe_forward_native = functools.partial(_as_node, fused_moe_native.moe_forward_native)
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    type(setup.current_platform).capabilities = PlatformCapabilities(graph_capture=True)


def _prepare(attention: Any, batch: Any, **_: Any) -> None:
    attention.init_forward_metadata(batch)
    sliding = getattr(attention, "sliding_write", None)
    if sliding is not None:  # padding rows write to the slot that is nobody's
        padding = batch.positions.numel() - sliding.numel()
        attention.sliding_write = torch.nn.functional.pad(sliding, (0, padding))


def _as_node(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    recording = Recording.current
    return run(*args, **kwargs) if recording is None else recording.call(run, args, kwargs)
