"""How SGLang's graph runners capture: at which sizes, and by requests or by tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace as with_fields

from sglang.srt.model_executor.runner import decode_cuda_graph_runner

from dflash_sglang.patches.apply import replaced
from dflash_sglang.sglang_names.scheduler import ModelRunner, get_cuda_graph_batch_size_alignment, get_exec


def captured_at(sizes: Sequence[int]) -> AbstractContextManager[None]:
    """SGLang's graphs that are made meanwhile are for these batch sizes, if it makes any."""
    graph = get_exec().graph
    if not sizes:
        return nullcontext()
    decode = with_fields(graph.cuda_graph_config.decode, bs=list(sizes))
    return graph.override(cuda_graph_config=with_fields(graph.cuda_graph_config, decode=decode))


def shared_evenly(sizes: Sequence[int], runner: ModelRunner, width: int) -> list[int]:
    """Raise each batch size to the next one whose rows the ranks can share evenly: SGLang captures no others."""
    if not sizes:
        return []
    gathers = any(runner.decode_graph_gather_requirements())
    ranks = get_cuda_graph_batch_size_alignment(gathered_buffer_required=gathers)
    multiple = ranks // math.gcd(ranks, width)
    return sorted({-(-size // multiple) * multiple for size in sizes})


def by_tokens() -> AbstractContextManager[None]:
    """SGLang's graphs that are made meanwhile are of a ragged verify: one for each number of tokens.

    SGLang makes them for algorithms that ask for them by the environment.
    """
    return replaced("ragged-graphs", decode_cuda_graph_runner, lambda spec_algorithm: True)
