"""A scheduler whose device takes no time: python -m tests.support.null_gpu [--counts | --lower]

What is left of a step is the host's, as it runs beside a GPU. Graphs return what they were captured with, kernels
are left out, and each step commits `COMMITTED` tokens of a request. Steps take the shape that `steps` asks for,
after the width policy has chosen one. The times that it learns from are made up: it does the same in every run.

Prints milliseconds of a turn of the scheduler's loop, which its thread spends on it: with this package's default
settings, with one width and no copies, and with SGLang's built-in worker. `--counts` prints what a turn counts by
default beside its numbers in `tests/step_work.toml`, which a test holds. `--lower` lowers these.
A number is raised, and a row added, by hand, in a commit that says why.

A plugin of SGLang like `scheduler_hooks`, for a CPU with `recorded_graphs`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import os
import pkgutil
import statistics
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_sglang import kernels
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.verify.rows import Shape
from tests.support import budget, recorded_graphs, scheduler_hooks, seam
from tests.support.engines import greedy_params, serve
from tests.support.kits import DRAFT, TARGET, without_the_last_layer
from tests.support.recorded_graphs import Backend
from tests.support.step_work import VIEWS, is_ours

COUNTS_ENV = "DFLASH_TEST_NULL_GPU"
FILE = budget.ROOT / "tests" / "step_work.toml"
HEAD = """# What a turn of the scheduler's loop may count, by shape and requests: see `tests.support.null_gpu`.
# `python -m tests.support.null_gpu --counts` prints today's, `--lower` lowers the numbers to them.
"""
SHAPES = ("block", "narrow", "plain", "ragged", "tree", "copy")
REQUESTS = (1, 8)
STEPS = 40  # that are looked at: SGLang reports every 40 steps, the policy tabulates every fourth
OTHERS = 60  # steps, most of them before these: their slots may be there already, of a wider step
FIGURES = ("calls", "operators", "launches", "to host")
ROUNDS, TIMED = 5, 100  # of steps of each shape, and steps of a round
COMMITTED = 6  # tokens of a request in a step, where it verifies as many
NARROW = 8
TOKEN = 5
NO_LAUNCH = {"lift_fresh", "alias", "unbind", "_record_function_enter_new", "_record_function_exit"}
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # from Python 3.12 on
UNREAD = ("find_copies_torch", "write_copies_torch", "grow_tree_torch")  # slow, and nobody reads their results
DECISION = ("width", "verify_budget", "tree_nodes", "chain")  # the fields of a shape in one
DEFAULTS = {"width": "auto"}
SERVERS = {"default": DEFAULTS, "one width, no copies": {"width": "block", "copy": "off"}, "built-in": None}

Turn = dict[str, Any]


@contextmanager
def served(directory: Path, settings: Mapping[str, str] | None, counts: bool = False) -> Iterator[Server]:
    """A server with these settings, or of SGLang's built-in worker, whose turns `steps` reads from `directory`."""
    environment = recorded_graphs.recording(directory, "", "support.null_gpu", **{COUNTS_ENV: str(int(counts))})
    draft = DRAFT
    if settings is None:
        del environment[REQUIRE_ENV]
        environment["SGLANG_PLUGINS"] = "dflash_recorded_graphs,dflash_null_gpu"
        draft = without_the_last_layer(directory / "draft")
    else:
        environment[CONFIG_ENV] = json.dumps(settings)
    arguments = dict(max_running_requests=max(REQUESTS), min_free_slots_delay=1, random_seed=1)
    with serve(TARGET, draft, environment=environment, **arguments) as server:
        yield server


def steps(server: Server, directory: Path, shape: str, requests: int, last: int = STEPS) -> list[Turn]:
    """The last turns of steps of so many requests; none where this shape is not served for as many."""
    (directory / "asked.json").write_text(json.dumps([shape, requests]))
    tokens = (OTHERS + last) * (1 if shape == "plain" else COMMITTED)
    prompts = [[4 + i, 9, 70 + i] for i in range(requests)]
    server.generate(input_ids=prompts, sampling_params=greedy_params(tokens))
    turns = scheduler_hooks.noted(directory, "turns.jsonl")
    return [turn for turn in turns if (turn["shape"], turn["requests"]) == (shape, requests)][-last - 2 : -2]


def counted(directory: Path) -> budget.Weights:
    """What a turn counts with the default settings, by shape and requests: the commonest number of `STEPS` turns.

    A turn of the scheduler's loop does all that a decode step asks of the host, in SGLang's code as in this
    package's. Left out are graphs, and what runs inside of kernels.
    - "calls": of this package's Python functions; "mean calls" have a part in what comes every few steps.
    - "operators": of torch, but for those that only make a view.
    - "launches": the same, and kernels: this package's, the allocator's, KV moves, attention's metadata as one. An
      operator on a tensor of the host is among them, since on a CPU it looks like any other.
    - "to host": copies, of memory that was not copied before in the turn.
    """
    found: budget.Weights = {}
    with served(directory, DEFAULTS, counts=True) as server:
        for shape, requests in itertools.product(SHAPES, REQUESTS):
            turns = [Counter(turn["work"]) for turn in steps(server, directory, shape, requests)]
            if turns:
                common = {name: statistics.mode(turn[name] for turn in turns) for name in FIGURES}
                mean = -(-sum(turn["calls"] for turn in turns) // len(turns))
                found[f"{shape}-at-{requests}"] = {**common, "mean calls": mean}
    return found


def limits() -> budget.Weights:
    return tomllib.loads(FILE.read_text())


def faults(found: budget.Weights) -> list[str]:
    """A line for each number that a turn is above."""
    return budget.faults(found, limits(), FILE.name, "tests.support.null_gpu")


# ---- In the scheduler ------------------------------------------------------------------------------------


def activate() -> None:
    """Entry point of the plugin."""
    if COUNTS_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    recorded_graphs.SIZES = (1, 2, 8)
    Backend.capture_one = _capture
    Backend.replay = _replay
    HookRegistry.register(f"{scheduler}.init_model_worker", lambda scheduler: _make_up_times(), HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.run_event_loop", _install, HookType.BEFORE)


def _capture(backend: Backend, key: Any, forward: Callable[[], Any], **_: Any) -> None:
    backend._graphs[key] = forward()


def _replay(backend: Backend, key: Any, batch: Any, **_: Any) -> Any:
    """The target's writes the outcome of a step, from the time that this package's worker serves."""
    slots = getattr(Backend, "slots", None)
    if slots is not None and backend._role == "target":
        rows = batch.req_pool_indices[: batch.batch_size].long()
        commit = min(COMMITTED, len(batch.input_ids) // len(rows))
        lens = slots.relay.new_seq_lens[rows] + commit
        slots.relay.new_seq_lens[rows], slots.relay.bonus_tokens[rows] = lens, TOKEN
        token_ids, *of_requests = (of[slots._place] for of in slots.outcomes)
        token_ids.fill_(TOKEN)
        for of, value in zip(of_requests, (commit, TOKEN, lens), strict=True):
            of[: len(rows)] = value
    return backend._graphs[key]


def _make_up_times() -> None:
    from dflash_sglang.verify.step_clock import StepClock
    from dflash_sglang.warmup.dummy_batches import Rehearsal

    def rehearsed(self: Any, requests: int, context: int, shape: Any) -> tuple[float, float]:
        return 0.001 + 1e-5 * (shape.budget or requests * (shape.chain or shape.nodes or shape.width)), 0.0

    Rehearsal.seconds = rehearsed
    StepClock.seconds = lambda self, start, end: 0.002


class _Meter(TorchDispatchMode):
    """Of each turn of the loop that launches a decode step and processes the one before, of as many requests."""

    def __init__(self, path: Path, counts: bool) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)
        self.shape, self._muted = "", False
        self._begin()
        if counts:
            self.__enter__()
            sys.setprofile(self._on_event)

    def _begin(self) -> None:
        self.launched = self.processed = 0
        self.work: Counter[str] = Counter()
        self._on_host: set[int] = set()
        self._left_out, self._start = 0.0, time.thread_time()

    def turn(self) -> None:
        """Ends one, and begins the next."""
        if self.launched and self.launched == self.processed:
            ms = 1000 * (time.thread_time() - self._start - self._left_out)
            row = dict(shape=self.shape, requests=self.launched, ms=ms, work=self.work)
            self._muted = True
            print(json.dumps(row), file=self._file)
            self._muted = False
        self._begin()

    def on_device(self, owner: Any, name: str, result: Any = None, launches: int = 1) -> None:
        """From now on a call of this is neither counted nor timed; result: what it gives instead, if callable."""
        function = result or getattr(owner, name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._muted:
                return function(*args, **kwargs)
            self._muted, start = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._muted = False
                self.work["launches"] += launches
                self._left_out += time.thread_time() - start

        setattr(owner, name, run)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stands in for `async_d2h`, which copies nothing that is on the host."""
        memory = tensor.untyped_storage().data_ptr()
        self.work["to host"] += memory not in self._on_host
        self._on_host.add(memory)
        return tensor

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not self._muted and is_ours(frame):
            self.work["calls"] += frame.f_code.co_name not in INLINED

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._muted and name not in VIEWS:
            self.work["operators"] += 1
            self.work["launches"] += name not in NO_LAUNCH
        return func(*args, **(kwargs or {}))


def _install(scheduler: Any) -> None:
    from sglang.srt.managers import utils
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import allocation

    records, worker, runner = scheduler_hooks.records(), scheduler.draft_worker, scheduler.tp_worker.model_runner
    meter = _Meter(records / "turns.jsonl", os.environ[COUNTS_ENV] == "1")
    attention, ingest = type(runner.attn_backend), Scheduler.ingest_requests

    def ingesting(self: Any) -> None:
        meter.turn()
        ingest(self)
        while self.waiting_queue:  # they are prefilled together
            meter.shape, requests = json.loads((records / "asked.json").read_text())
            if len(self.waiting_queue) == requests:
                break
            ingest(self)

    def noted(name: str, as_name: str) -> None:
        function = getattr(Scheduler, name)

        def run(self: Any, batch: Any, *args: Any) -> Any:
            if batch.forward_mode.is_decode():
                setattr(meter, as_name, len(batch.reqs))
            return function(self, batch, *args)

        setattr(Scheduler, name, run)

    Scheduler.ingest_requests = ingesting
    noted("run_batch", "launched")
    noted("process_batch_result", "processed")
    prepare = attention.init_forward_metadata
    meter.on_device(
        attention,
        "init_forward_metadata",
        lambda self, batch, *of: batch.forward_mode.is_target_verify() or prepare(self, batch, *of),
    )
    meter.on_device(type(runner.token_to_kv_pool), "move_kv_cache", lambda self, *of: None)
    meter.on_device(allocation, "assign_req_to_token_pool_func")
    meter.on_device(Backend, "replay", launches=0)
    if hasattr(worker, "dflash_state"):
        from dflash_sglang.verify import step_result

        utils._async_d2h = step_result.async_d2h = meter.to_host
        Backend.slots = worker._slots
        _without_kernels(meter)
        if worker._widths.learns:
            seam.around("shape", functools.partial(_shaped, meter))
    else:
        _without_kernels_of_built_in(meter)


def _without_kernels(meter: _Meter) -> None:
    """The torch twins stand for them on a CPU."""
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for name in vars(module):
            if name.endswith("_torch") and hasattr(module, name.replace("_torch", "_triton")):
                meter.on_device(module, name, (lambda *of: None) if name in UNREAD else None)


def _without_kernels_of_built_in(meter: _Meter) -> None:
    from sglang.srt.speculative import dflash_worker_v2

    def accepted(self: Any, *, candidates: Any, prefix_lens: Any, bs: int, **_: Any) -> Any:
        commit = torch.full((bs,), COMMITTED, dtype=torch.int32)
        tokens = torch.full_like(candidates, TOKEN)
        return commit - 1, commit, tokens[:, 0], tokens, prefix_lens + COMMITTED

    worker = dflash_worker_v2.DFlashWorkerV2
    meter.on_device(worker, "_accept_block", accepted)
    meter.on_device(worker, "_append_target_hidden_to_draft_kv_by_loc", lambda self, **_: None)
    meter.on_device(worker, "_greedy_sample_from_vocab_parallel_head")
    meter.on_device(dflash_worker_v2, "assign_extend_cache_locs_func")


def _shaped(meter: _Meter, choose: Any, self: Any, slots: Any, *args: Any) -> Any:
    """The stretch that was chosen, in the shape that was asked for if that is served for so many requests."""
    stretch, n, block = choose(self, slots, *args), len(slots), self.widths[-1]
    shapes = {
        "block": Shape(block),
        "narrow": Shape(NARROW),
        "plain": Shape(PLAIN),
        "ragged": Shape(block, budget=next((of for of in self.budgets if 2 * of >= n * block), None)),
        "tree": Shape(block, nodes=max((of for of, most in self.trees.items() if n <= most), default=None)),
        "copy": Shape(block, chain=args[-1] or None),
    }
    decision = stretch.decision._replace(**dict(zip(DECISION, shapes[meter.shape], strict=True)))
    if meter.shape != "block" and decision.shape == shapes["block"]:
        meter.launched = 0  # such a turn is left out
    stretch.decision, stretch.plan = decision, None if decision.chain else stretch.plan
    return stretch


# ---- The command -----------------------------------------------------------------------------------------


def table(directory: Path) -> list[str]:
    """Lines of milliseconds of a turn: the median of its steps, in the best round, as other load only adds."""
    rows: dict[str, dict[int, float]] = {}
    for name, settings in SERVERS.items():
        (directory / name).mkdir()
        shapes = SHAPES if settings == DEFAULTS else ("block",)
        with served(directory / name, settings) as server:
            for _, shape, requests in itertools.product(range(ROUNDS), shapes, REQUESTS):
                turns = steps(server, directory / name, shape, requests, TIMED)
                if turns:
                    row = rows.setdefault(f"{name}, {shape}", {})
                    row[requests] = min(
                        statistics.median(turn["ms"] for turn in turns), row.get(requests, math.inf)
                    )
    head = f"{'ms of a turn at requests':28}" + "".join(f"{requests:>7}" for requests in REQUESTS)
    return [
        head,
        *(f"{name:28}" + "".join(f"{row.get(n, math.nan):7.2f}" for n in REQUESTS) for name, row in rows.items()),
    ]


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--lower", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `conftest`: servers are forked
    with tempfile.TemporaryDirectory() as directory:
        if not (asked.counts or asked.lower):
            print(*table(Path(directory)), sep="\n")
            return 0
        found = counted(Path(directory))
    if asked.lower:
        FILE.write_text(budget.text(budget.lowered(found, limits(), multiple=1), HEAD))
    wrong = faults(found)
    print(*budget.nearest(found, limits()), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
