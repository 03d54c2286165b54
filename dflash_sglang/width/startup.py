"""Start-up of the width policy: which widths are served, what they take, how long their steps are."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dflash_sglang.attention.trees import why_no_trees
from dflash_sglang.attention.verifying import verifies_parts, verifying
from dflash_sglang.patches.flash3 import shares_schedules
from dflash_sglang.settings.width import BLOCK, DEFAULT_TREES, PLAIN, WidthConfig
from dflash_sglang.sglang_names.scheduler import (
    ModelRunner,
    get_available_gpu_memory,
    get_exec,
    get_observability,
    get_parallel,
    get_tp_group,
    mambaish_config,
)
from dflash_sglang.startup.facts import Problem, StartupError
from dflash_sglang.verify.graph_tail import VerifyTail, names_slots_alike
from dflash_sglang.verify.recurrent import keeps_apart, kernel_of, only_one_width
from dflash_sglang.verify.rows import Shape
from dflash_sglang.verify.tree import TreeVerify
from dflash_sglang.width.options import Kind, least_budget
from dflash_sglang.width.policy import WidthPolicy
from dflash_sglang.width.ranks import Group
from dflash_sglang.width.runtime_states import RuntimeStates, captured_sizes, most_requests, sparse
from dflash_sglang.width.step_times import Sample, StepTimes, startup_cells

if TYPE_CHECKING:
    from dflash_sglang.warmup.dummy_batches import Rehearsal

logger = logging.getLogger(__name__)

PASSES = 2  # over all cells
MOST_SECONDS = 10.0  # after which only batches of the smallest size are still measured, once
EAGER_CONTEXT, EAGER_TOKENS = 512, 1024  # where nothing is captured; the second ones are verified at once at most


def servable(config: WidthConfig, runner: ModelRunner, block: int) -> WidthConfig:
    """These settings, or those of the block's width alone where a launch has but one width; the log says why.

    Raises StartupError if another width was asked for.
    """
    reason = _only_the_block(runner)
    unasked = config.fixed is None and config.widths is None
    if reason is None and unasked and runner.server_args.disable_cuda_graph_padding:
        reason = "without padding, graphs of other widths fit few batches"
    if reason is None or config.fixed in (BLOCK, block):
        return config
    if not unasked:
        raise StartupError([
            Problem(
                "DFLASH_SGLANG_CONFIG width",
                config.widths or config.fixed,
                f"{BLOCK!r} alone: {reason}",
                "Leave it out.",
            )
        ])  # fmt: skip
    _log("verify width: always the block's, %d: %s", block, reason)
    return WidthConfig(fixed=BLOCK)


def _log(message: str, *values: object, level: int = logging.INFO) -> None:
    """Writes one line for all ranks."""
    if get_parallel().tp_rank == 0:
        logger.log(level, f"dflash_sglang {message}", *values)


def _only_the_block(runner: ModelRunner) -> str | None:
    if mambaish_config(runner.model_config) is not None and (reason := only_one_width(runner.attn_backend)):
        return reason
    if runner.lora_manager is not None:
        return "SGLang keeps one width for the adapters of captured graphs"
    if get_observability().forward_hooks:
        return "SGLang has registered --forward-hooks by now, which graphs of other widths would capture"
    if get_exec().deterministic.enable_deterministic_inference:
        return "--enable-deterministic-inference, and the widths that are chosen follow measured times"
    return None


def add_widths(
    config: WidthConfig, states: RuntimeStates, block: int, free: Callable[[], float], ragged: bool = False
) -> WidthConfig:
    """Build the runtime states that these settings ask for, as far as memory allows, and that of `ragged` steps.

    Returns the settings of what is served."""
    wanted = config.states(block)
    if config.fixed is not None:
        (width,) = wanted
        states.add(width)  # at all batch sizes: its steps are all there are
        return config
    took = states.add_while_free(wanted, free, config.memory_reserve)
    served = tuple(width for width in wanted if width in took or width == block)
    _log("verify widths: %s%s", served, _prices(took, wanted, served, config.memory_reserve))
    # A ragged step's graphs are as dear as a width's: the same forwards, of fewer requests or more.
    if ragged and free() - max(took.values(), default=0.0) >= config.memory_reserve:
        states.add_ragged()
    elif ragged:
        why = "its graphs would not leave %g GB free. Lower memory_reserve, or --mem-fraction-static."
        _log(f"verify width: not ragged: {why}", config.memory_reserve, level=logging.WARNING)
    return replace(config, widths=served)


def without_misplaced_states(
    config: WidthConfig,
    states: RuntimeStates,
    runner: ModelRunner,
    rehearsal: Rehearsal,
    group: Group,
    block: int,
) -> WidthConfig:
    """Leave out the widths at which a kernel puts the target's recurrent states where the commit does not look for
    them; the log names the kernel. What rank 0 finds counts for all. Returns the settings of what is served.

    Raises StartupError if the fixed width is one of them, or the block's."""
    widths = config.states(block)
    if widths == (block,) or states.recurrent(block) is None:
        return config
    requests = min(2, runner.req_to_token_pool.size)

    def apart(width: int) -> bool:
        step = partial(rehearsal.seconds, requests, 1, Shape(width))
        return keeps_apart(states.recurrent(width), requests, step)

    found = np.array([not apart(width) for width in widths], dtype=np.float64)
    if group.broadcast is not None:
        found = group.broadcast(found)
    misplaced = [width for width, is_misplaced in zip(widths, found, strict=True) if is_misplaced]
    if not misplaced:
        return config
    kernel = kernel_of(runner.attn_backend)
    if config.fixed is not None or block in misplaced:
        raise StartupError([
            Problem(
                "target's linear-attention kernel",
                kernel,
                f"one that keeps the states of verified rows where they are committed from, at widths {misplaced}",
                "Choose another --linear-attn-decode-backend, or serve without speculation.",
            )
        ])  # fmt: skip
    why = "at these, %s does not keep the states of verified rows where they are committed from"
    _log(f"verify widths: left out %s: {why}", misplaced, kernel, level=logging.WARNING)
    states.drop(misplaced)
    if PLAIN in misplaced:  # a width that is always served
        return WidthConfig(fixed=BLOCK)
    return replace(config, widths=tuple(width for width in widths if width not in misplaced))


def free_memory(runner: ModelRunner) -> Callable[[], float]:
    """GB that are free on the device of the rank with least; on a CPU more than anyone asks for."""
    if runner.device != "cuda":
        return lambda: 1e6
    ranks = get_tp_group()
    return lambda: get_available_gpu_memory(
        runner.device, runner.gpu_id, distributed=ranks.world_size > 1, cpu_group=ranks.cpu_group
    )


def can_be_ragged(config: WidthConfig, runner: ModelRunner, group: Group, full_blocks: str | None = None) -> bool:
    """Whether steps can be ragged; the log says why not.

    full_blocks: why the draft needs as many rows of each request; None if it does not."""
    if config.fixed is not None:
        return False
    reason = full_blocks or _why_not_ragged(runner, group)
    if reason is not None:
        _log("verify width: not ragged: %s", reason)
    return reason is None


def _why_not_ragged(runner: ModelRunner, group: Group) -> str | None:
    if not verifies_parts(runner.attn_backend):
        backend = type(verifying(runner.attn_backend)).__name__
        return f"{backend} verifies as many rows of each request; fa3 does not have to"
    if runner.server_args.nnodes > 1:
        return "ranks are on several nodes, whose devices may round the draft's probabilities otherwise"
    return _why_rows_of_blocks(runner, group)


def _why_rows_of_blocks(runner: ModelRunner, group: Group) -> str | None:
    """Why steps verify the rows of blocks, no fewer and no more; None if nothing here is against others."""
    if group.gather is not None:
        return "ranks hold requests of their own"
    if runner.server_args.disable_cuda_graph_padding:
        return "without padding, SGLang has few graphs that fit such steps, or none"
    if runner.model_config.model_is_mrope:
        return "SGLang gives the target's positions of three axes to blocks of one width"
    if runner.server_args.enable_return_routed_experts or runner.server_args.enable_return_indexer_topk:
        return "what layers chose is reported for blocks of one width"
    return None


def can_verify_trees(
    config: WidthConfig, target: ModelRunner, draft: ModelRunner, group: Group, no_candidates: str | None
) -> bool:
    """Whether steps can verify trees; where they cannot, the log says why, as a warning if they were asked for.

    no_candidates: why the draft does not give the likeliest tokens of each position; None if it does."""
    if not config.trees:
        return False
    reason = no_candidates or _why_not_ragged(target, group) or why_no_trees(target)
    if reason is None and not names_slots_alike(target, draft):
        reason = "the KV pools name slots otherwise than req_to_token"
    if reason is not None:
        level = logging.INFO if config.trees == DEFAULT_TREES else logging.WARNING
        _log("verify width: no trees: %s", reason, level=level)
    return reason is None


def add_trees(
    config: WidthConfig, states: RuntimeStates, verify: TreeVerify, tail: VerifyTail, free: Callable[[], float]
) -> None:
    """Build the runtime states of the trees that these settings ask for, the smallest first, as far as memory
    allows; the log says what they took."""
    took: dict[int, float] = {}
    for nodes in sorted(config.trees):
        sizes, before = states.tree_sizes(nodes, most_requests(config.trees)), free()
        if sizes and before - max(took.values(), default=0.0) >= config.memory_reserve:
            trees = verify.add(nodes, sizes[-1])
            states.add_trees(trees, sizes, tail.of_trees(trees))
            took[nodes] = before - free()
    served = ", ".join(f"{nodes} nodes up to {most} requests" for nodes, most in states.trees.items())
    _log("trees: %s%s", served, _prices(took, config.trees, states.trees, config.memory_reserve))


def why_no_chains(config: WidthConfig, target: ModelRunner, group: Group) -> str | None:
    """Why steps cannot verify more rows of a request than a block; None if they can. config: of `servable`."""
    backend = verifying(target.attn_backend)
    if config.fixed is not None:
        return "steps have one width only"
    if not (hasattr(backend, "serve_trees") or shares_schedules(backend)):
        return f"no test verifies longer chains with {type(backend).__name__}; fa3 does without DP attention"
    return _why_rows_of_blocks(target, group)


def add_chains(
    chains: Mapping[int, int],
    states: RuntimeStates,
    free: Callable[[], float],
    reserve: float,
    none_because: str | None,
) -> None:
    """Build the runtime states of chains beyond blocks, {rows: most requests}, as far as memory allows; the log
    says what they took, or why there are none."""
    took: dict[int, float] = {}
    for rows, requests in sorted(chains.items(), reverse=True) if none_because is None else ():
        before = free()
        if before - max(took.values(), default=0.0) >= reserve:
            states.add_chain(rows, requests)
            took[rows] = before - free()
    served = ", ".join(f"{rows} rows up to {most} requests" for rows, most in states.chains.items()) or "none"
    note = f": {none_because}" if none_because else _prices(took, chains, states.chains, reserve)
    _log("copies beyond blocks: %s%s", served, note)


def _prices(took: Mapping[int, float], wanted: Iterable[int], served: Iterable[int], reserve: float) -> str:
    """took: {width, nodes or rows: GB}, as the others."""
    left_out = sorted(set(wanted) - set(served))
    note = f"; left out, to keep {reserve:g} GB free: {left_out}" if left_out else ""
    prices = ", ".join(f"{one}: {price:.3f}" for one, price in took.items())
    return f"{note}; memory that was added, in GB: {prices}"


def policy_of(
    config: WidthConfig, runner: ModelRunner, block: int, group: Group, states: RuntimeStates
) -> WidthPolicy:
    """The policy of these settings, before `measure`. Batch sizes are the captured ones, or powers of two."""
    pool = runner.req_to_token_pool
    sizes = sparse(captured_sizes(runner)) or [1 << power for power in range(pool.size.bit_length())]
    buckets = [size for size in sizes if size < pool.size]
    at_most = next((size for size in sizes if size >= pool.size), pool.size)
    budgets = states.verify_budgets(pool.size) if states.serves_ragged else None
    slots = pool.req_to_token.shape[0]
    return WidthPolicy(config, block, [*buckets, at_most], slots, group, budgets, states.trees, states.chains)


def measure(policy: WidthPolicy, runner: ModelRunner, rehearsal: Rehearsal, group: Group) -> None:
    """Fill the decider's tables from rehearsed steps, which all ranks run."""
    start, cells = time.perf_counter(), _cells(policy, runner)
    samples = _rehearse(cells, policy.budgets or [], rehearsal, group)
    if policy.decider is None:
        return
    policy.decider.step_times.fit(samples)
    logger.info(
        "dflash_sglang verify widths: %d of %d cells measured in %.1f s; ms of a step by shape: %s",
        len({sample[:2] for sample in samples}),
        len({cell[:2] for cell in cells}),
        time.perf_counter() - start,
        "; ".join(_row(policy.decider.step_times, bucket) for bucket in (0, len(policy.buckets) - 1)),
    )


def _rehearse(
    cells: Sequence[tuple[int, Kind, int]], budgets: Sequence[int], rehearsal: Rehearsal, group: Group
) -> list[Sample]:
    """Time one step of each cell in each of `PASSES`, for `MOST_SECONDS` and a batch each at most.

    cells: batch, kind, context tokens. budgets: of ragged steps. A cell's steps are a pass apart, so that what
    else runs on the GPU for a second or two (another server that starts) slows few of both."""
    begin, measured, samples = time.perf_counter(), set(), []
    for cell in PASSES * list(cells):
        requests, kind, context = cell
        budget = least_budget(budgets, requests, kind.width) if kind.ragged else None
        if kind.ragged and budget is None:
            continue
        elapsed = np.array([time.perf_counter() - begin])
        if group.broadcast is not None:
            elapsed = group.broadcast(elapsed)  # all ranks stop alike
        if elapsed[0] > MOST_SECONDS and (requests > cells[0][0] or cell in measured):
            continue
        each = min(max(context // requests, 1), rehearsal.longest)
        seconds, host = rehearsal.seconds(requests, each, Shape(kind.width, budget, kind.nodes))
        samples.append(Sample(requests, kind, requests * each, seconds, host))
        measured.add(cell)
    return samples


def _cells(policy: WidthPolicy, runner: ModelRunner) -> list[tuple[int, Kind, int]]:
    """(batch, kind, context tokens), small batches first. A batch that runs without a graph where others have one
    is left to what serving measures: its buffers are not."""
    captured, most = captured_sizes(runner), runner.req_to_token_pool.size
    sizes = sorted({min(size, most) for size in policy.buckets if not captured or size in captured})
    eager = {} if captured else dict(long_context=EAGER_CONTEXT, max_tokens=EAGER_TOKENS)
    cells = startup_cells(sizes, policy.kinds, policy.trees, **eager)
    return sorted(cells, key=lambda cell: (cell[0], cell[2]))


def _row(times: StepTimes, bucket: int) -> str:
    shown = zip(times.kinds, times.seconds(bucket, 0), strict=True)
    by_kind = ", ".join(f"{kind}: {1000 * seconds:.2f}" for kind, seconds in shown if seconds < math.inf)
    return f"{times.buckets[bucket]} requests {by_kind}"
