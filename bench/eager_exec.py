"""What static fp8 layers read of a server's resolved arguments, for processes without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def eager_exec() -> Any:
    """SGLang's namespace `exec` with an eager prefill, as a server without torch.compile resolves it."""
    from sglang.srt.runtime_context import get_exec

    prefill = SimpleNamespace(tc_compiler="eager")
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    return SimpleNamespace(graph=graph, kernel=get_exec().kernel)
