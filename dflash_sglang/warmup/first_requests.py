"""Start-up runs what the first requests would otherwise run for the first time.

Kernels are compiled and loaded where they are first launched, libraries choose them by the number of rows, and
memory is taken when it is first needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash_sglang.sglang_names.scheduler import ModelRunner, get_parallel, get_schedule
from dflash_sglang.verify.rows import Shape
from dflash_sglang.warmup.dummy_batches import GREEDY, Rehearsal

logger = logging.getLogger(__name__)

# Tokens of rehearsed prompts. Triton compiles a kernel anew for an argument that is one, and for one that 16 does
# not divide; GEMMs differ by powers of two. Longer prompts have the kernels of the longest here.
FORMS = (1, 16, 37)
PROMPTS_ON_GPU = (*FORMS, 64, 128, 256, 512, 1000, 2048)
TOGETHER = 64  # rehearsed prompts of a recurrent target, at most; two where nothing is compiled
SHORT = 16  # what is rehearsed where nothing is compiled, and where the number of rows makes no difference
SAMPLINGS: tuple[Mapping[str, Any], ...] = (  # each has launches of its own
    GREEDY,
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
)


def rehearse(runner: ModelRunner, rehearsal: Rehearsal, prefills: bool, shapes: Sequence[Shape]) -> None:
    """On the stream of the forwards, whose memory is its own. Leaves torch's random numbers as they were.

    runner: the target's; prefills: there will be some; shapes: of steps that will be.
    """
    start, on_gpu = time.perf_counter(), torch.device(runner.device).type == "cuda"
    most = min(rehearsal.longest, _most_at_once())
    short = min(SHORT, most)
    # SGLang's sampler takes no min_p with seeds: a request that asks for both ends its scheduler.
    samplings = [sampling for sampling in SAMPLINGS if not (rehearsal.seeded and "min_p" in sampling)]
    if runner.lora_manager is not None:
        runner.lora_manager.fetch_new_loras({None})  # what a batch without adapters needs
    with torch.random.fork_rng([runner.gpu_id] if on_gpu else []):
        if on_gpu:
            torch.cuda.synchronize()  # what start-up launched before was on another stream
        rehearsal.reserve()
        for tokens in prompts(PROMPTS_ON_GPU if on_gpu else (SHORT,), most) if prefills else ():
            rehearsal.prefill(tokens, GREEDY)
            if on_gpu and tokens in FORMS:
                rehearsal.prefill(tokens, GREEDY, offset=1)
        for sampling in samplings[1:] if prefills else ():
            rehearsal.prefill(short, sampling)
        for tokens in _together(rehearsal) if prefills else ():
            requests = min(TOGETHER if on_gpu else 2, rehearsal.most_requests, most // tokens)
            if requests:
                rehearsal.prefill(tokens, GREEDY, requests=requests)
        for shape in shapes:
            for sampling in samplings if shape.chain is None else samplings[:1]:
                rehearsal.step(short, sampling, shape)
        if on_gpu:
            torch.cuda.synchronize()
    if get_parallel().tp_rank == 0:
        logger.info("dflash_sglang rehearsed the first requests in %.2f s", time.perf_counter() - start)


def _together(rehearsal: Rehearsal) -> tuple[int, ...]:
    """Tokens of prompts that are rehearsed several at a time: those of a recurrent target.

    FlashInfer has other kernels for many sequences than for few, and others that keep a state before the end of a
    prompt. Each process compiles all of them anew, for 5 to 10 s a kernel.
    """
    if not rehearsal.recurrent:
        return ()
    grid = rehearsal.kept
    return (FORMS[-1],) if grid is None else (grid, grid + grid // 2)


def _most_at_once() -> int:
    """Tokens that are prefilled in one forward."""
    chunk, most = get_schedule().chunked_prefill_size, get_schedule().max_prefill_tokens
    return most if chunk is None or chunk <= 0 else min(chunk, most)


def prompts(wanted: Sequence[int], most: int) -> list[int]:
    """Tokens of prompts that a server takes in one piece, the longest first: others fit into its memory."""
    return sorted({min(tokens, most) for tokens in wanted}, reverse=True)
