"""A discrete-event simulation of serving, for the policy that chooses the verify width.

A closed loop of requests of several kinds, a machine that is a table of step times with noise, a draft that is a
conditional acceptance per position (per kind and width) or a record of a trained pair, and results that reach the
policy some steps late. Time is the sum of the steps' times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.kernels.block.grow_tree import Candidates, Tree, grow_tree_torch
from dflash_sglang.kernels.block.share_rows import share_rows
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width.options import Kind
from dflash_sglang.width.policy import WidthPolicy
from dflash_sglang.width.ranks import Group
from dflash_sglang.width.step_times import Sample, startup_cells

BLOCK = 16
WIDTHS = (1, 2, 4, 6, 8, 12, 16)
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
PASSES = 2  # of start-up
CONTEXT = 512  # tokens per request at which the table was measured
SECONDS_PER_CONTEXT_TOKEN = 3.7e-8  # 36 layers x 8 KV heads x 128 x K and V in bfloat16 at 4 TB/s

# One H200, SGLang 0.5.23, Qwen3-8B kinds with a 5-layer draft: output tokens/s -> milliseconds of a step.
DRAFTED_MS = {4: 6.78, 8: 6.95, 16: 6.96, 64: 10.7, 128: 12.5, 256: 15.8, 512: 24.4, 1024: 41.8, 2048: 74.8}
PER_REQUEST_MS = 0.012  # what equal tokens cost more in narrow steps of more requests
PLAIN_MS = {1: 5.24, 8: 7.54, 32: 8.81, 64: 10.2}
PLAIN_SHARE = 0.85  # of a drafted step of as many tokens, beyond what was measured: neither draft nor its head
# FlashAttention 3: {requests: {rows of each: ms of a step}}, rows of chains. A tree takes TREE_MS more for its
# mask, its growth and its moves.
ROWS_MS = {
    1: {16: 6.78, 32: 7.15, 64: 7.26},
    4: {16: 7.13, 32: 8.07, 64: 10.05},
    8: {16: 7.88, 32: 10.1, 64: 15.6},
}
TREE_MS = 0.25
TREES = {16: 8, 32: 4, 64: 2}
RECORD = Path("bench/records/pair.npz")


@dataclass
class Machine:
    """True step times, and what a clock reads of them: `jitter` (relative), outliers of `outlier` times.

    `distort[bucket, width]` multiplies the truth that start-up measured, `parts` that of steps that verify blocks
    in part and more than as few tokens as can be, which start-up measures. A prefill takes `launch` seconds, and a
    pass over the weights (`weights` seconds) or `prompt_token` seconds for each of its tokens, whichever is more;
    by default nothing, and the policy is not told of it. No step takes less than `host` seconds, of plain ones and
    of others: the device waits for the host then. Half of the lesser one has nothing to do with the launch. A
    step of another kind than the one before takes the host `switch` seconds more.
    """

    widths: Sequence[int] = WIDTHS
    buckets: Sequence[int] = BUCKETS
    jitter: float = 0.0
    outliers: float = 0.0
    outlier: float = 5.0
    distort: np.ndarray | None = None
    parts: float = 1.0
    launch: float = 0.0
    weights: float = 0.0
    prompt_token: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)
    switch: float = 0.0
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.array([[_h200(batch, width) for width in self.widths] for batch in self.buckets])
        if self.distort is not None:
            self.table = self.table * self.distort

    def seconds(self, batch: int, context_tokens: float) -> np.ndarray:
        """[widths] of a step of a batch."""
        row = self.table[int(np.searchsorted(self.buckets, batch))]
        return row + (context_tokens - CONTEXT * batch) * SECONDS_PER_CONTEXT_TOKEN

    def prefill_seconds(self, tokens: int) -> float:
        """Of so many prompt tokens together."""
        return self.launch + max(self.weights, self.prompt_token * tokens) if tokens else 0.0

    def kind_seconds(self, batch: int, context_tokens: float, kind: Kind, budget: int | None) -> float:
        """Of a step of any kind; budget: tokens that a ragged one verifies together. A tree takes more than a
        block by what so many rows take more."""
        size = self.buckets[int(np.searchsorted(self.buckets, batch))]
        seconds = float(self.seconds(batch, context_tokens)[list(self.widths).index(kind.width)])
        if kind.nodes is not None:
            over = [(by_rows[kind.nodes] + TREE_MS) / by_rows[16] for by_rows in ROWS_MS.values()]
            return seconds * float(np.interp(size, list(ROWS_MS), over))
        if budget is not None:
            full = size * kind.width
            saved = PLAIN_SHARE * (_drafted(full) - _drafted(min(budget, full))) / 1e3
            return (seconds - saved) * (self.parts if budget > batch else 1.0)
        return seconds

    def read(self, seconds: float, random: np.random.Generator) -> float:
        if self.jitter:
            seconds *= max(1.0 + self.jitter * random.standard_normal(), 0.3)
        return seconds * (self.outlier if random.random() < self.outliers else 1.0)


def _h200(batch: int, width: int) -> float:
    if width == 1 and batch <= 64:
        return float(np.interp(batch, list(PLAIN_MS), list(PLAIN_MS.values()))) / 1e3
    drafted = _drafted(batch * width)
    return (drafted * PLAIN_SHARE if width == 1 else drafted + PER_REQUEST_MS * batch) / 1e3


def _drafted(tokens: int) -> float:
    last = max(DRAFTED_MS)
    drafted = float(np.interp(tokens, list(DRAFTED_MS), list(DRAFTED_MS.values())))
    return drafted + max(tokens - last, 0) * (DRAFTED_MS[last] - DRAFTED_MS[1024]) / (last - 1024)


class Draft:
    """Conditional acceptance of every position by kind of request, cut at the width.

    It says of each proposal what its chance is, to the power 1 / `sure`. That is the same for all of a kind at a
    position, or, with `spread`, drawn from a beta distribution of that mean whose parameters add up to it.
    """

    def __init__(self, *kinds: Sequence[float], spread: float | None = None, sure: float = 1.0):
        self.kinds, self.spread, self.sure = len(kinds), spread, sure
        self._mean = np.array(kinds)  # [kind, proposals]
        self._reach = self._mean.cumprod(axis=1)  # chance that more than k are accepted
        self.expected = np.array([[reach[: width - 1].sum() for width in WIDTHS] for reach in self._reach])

    def step(self, kinds: np.ndarray, width: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """What is said of the proposals of requests of these kinds [n, width - 1], logprobs, and how many are
        accepted [n]."""
        chances = self._mean[kinds, : width - 1]
        if self.spread is None:
            drawn, accepted = random.random(len(kinds)), np.empty(len(kinds), np.int64)
            for kind, reach in enumerate(self._reach):
                mine, falling = kinds == kind, reach[: width - 1][::-1]
                accepted[mine] = len(falling) - np.searchsorted(falling, drawn[mine], side="right")
        else:
            chances = random.beta(self.spread * chances, self.spread * (1 - chances))
            accepted = (random.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
        return np.log(chances.clip(1e-9)) / self.sure, accepted


class Recorded:
    """The steps of a trained pair: `RECORD`, whose texts lie in a circle. A request goes on from where it is."""

    kinds = 1

    def __init__(self) -> None:
        record = AcceptanceRecord.load(RECORD)
        logprobs = np.minimum(record.logprobs.astype(np.float32), 0.0)
        starts, nodes = len(logprobs), max(TREES)
        candidates = torch.arange(logprobs.shape[2]).expand(*logprobs.shape).contiguous()
        tokens = torch.zeros((starts, nodes), dtype=torch.int64)
        of = (torch.zeros_like(tokens, dtype=torch.int32) for _ in range(2))
        tree = Tree(*of, torch.zeros_like(tokens), torch.zeros(tokens.shape))
        grow_tree_torch(tokens[:, 0], Candidates(candidates, torch.from_numpy(logprobs)), tokens, tree)
        parents, depths, ranks = tree.parents.numpy(), tree.depths.numpy(), tokens.numpy()
        true = np.zeros(tokens.shape, bool)
        true[:, 0] = True
        row = np.arange(starts)
        for node in range(1, nodes):
            right = record.ranks[row, depths[:, node] - 1] == ranks[:, node]
            true[:, node] = true[row, parents[:, node]] & right & (parents[:, node] >= 0)
        self.logprobs = logprobs[:, :, 0].astype(np.float64)  # [starts, proposals]
        self.accepted_of = record.accepted
        self.mass, self.accepted_of_tree = tree.mass.numpy(), true.cumsum(axis=1) - 1  # [starts, nodes]
        self.expected = np.array([[np.minimum(self.accepted_of, w - 1).mean() for w in WIDTHS]])


def profile(first: float, last: float, block: int = BLOCK) -> list[float]:
    """Conditional acceptance: `first` for the first half of the block, `last` for the rest."""
    return [first] * (block // 2 - 1) + [last] * (block - block // 2)


GOOD = profile(0.866, 0.819)  # accept length 6.4 at 16, 5.1 at 8, 3.2 at 4
POOR = profile(1 / 3, 1 / 3)  # 1.5
EASY = profile(0.95, 0.93)
HARD = profile(0.55, 0.55)
QUIET = Machine(jitter=0.02, outliers=0.01)


@dataclass
class Run:
    """What a simulated run did, step by step. `tokens` counts what the steps commit in expectation."""

    tokens: float = 0.0
    seconds: float = 0.0
    lost: float = 0.0  # seconds that probes took beyond what the held width needs for the same tokens
    widths: list[int] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)  # rate of the chosen width over the best, in the long run

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def held(self) -> list[int]:
        """The widths, probes left out."""
        return [width for width, probe in zip(self.widths, self.probes, strict=True) if not probe]

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.held, self.held[1:], strict=False))

    def settled(self, share: float = 0.97) -> int:
        """Steps until every later one, probes aside, is worth `share` of the best."""
        steps = enumerate(zip(self.worth, self.probes, strict=True), 1)
        return max((step for step, (worth, probe) in steps if worth < share and not probe), default=0)


class Fixed:
    """Always one width, or trees, or ragged chains of so many rows of a request on average."""

    probe = False

    def __init__(self, width: int, nodes: int | None = None, rows: float = 0.0):
        self.width, self.tree_nodes, self.rows, self.decision = width, nodes, rows, self

    def admit(self, *_: Any) -> None: ...

    def timed(self, *_: Any) -> None: ...

    def prefill(self) -> None: ...

    def choose(self, slots: np.ndarray, context_tokens: int) -> Fixed:
        self.verify_budget = round(self.rows * len(slots)) or None
        return self

    def verified(self, *_: Any) -> None: ...


class Oracle(Fixed):
    """Is told before each step which width is best in the long run."""

    def __init__(self) -> None:
        super().__init__(0)


def adaptive(
    machine: Machine,
    requests: int,
    config: WidthConfig | None = None,
    wrong: np.ndarray | None = None,
    group: Group | None = None,
    seed: int = 0,
    ragged: bool = False,
    trees: dict[int, int] | None = None,
) -> WidthPolicy:
    """Our policy, started on `startup_cells` of this machine, read `PASSES` times each.

    `wrong[bucket, width]` multiplies what start-up measures of chains; `ragged`: tokens are shared out among the
    requests; `trees`: {nodes: most requests}.
    """
    buckets = [bucket for bucket in machine.buckets if bucket < requests]
    buckets.append(machine.buckets[len(buckets)])
    config = config or WidthConfig(widths=tuple(machine.widths))
    budgets = tiers(buckets[-1] * BLOCK) if ragged else None
    policy = WidthPolicy(config, BLOCK, buckets, requests + 1, group, budgets, trees)
    if policy.decider is None:
        return policy
    random, samples = np.random.default_rng(seed), []
    for batch, kind, context in startup_cells(buckets, policy.kinds, policy.trees):
        seconds = machine.kind_seconds(batch, context, kind, batch if kind.ragged else None)
        if wrong is not None and kind == Kind(kind.width):
            seconds *= wrong[list(machine.buckets).index(batch), list(machine.widths).index(kind.width)]
        for _ in range(PASSES):
            launch = machine.host[kind.width > 1] - min(machine.host) / 2
            samples.append(Sample(batch, kind, context, machine.read(seconds, random), launch))
    policy.decider.step_times.fit(samples)
    return policy


@dataclass(eq=False)
class Rank:
    """A closed loop of requests: whenever one ends another takes its place, as far as the concurrency asks."""

    policy: Any
    draft: Draft | Recorded
    hard: float = 0.0  # share of requests of the draft's second kind
    tokens: int = 512  # of an answer, on average
    prompt: int = 256
    uncached: int | None = None  # tokens of a prompt that are computed; None: all
    delay: int = 2  # steps after which a result is known
    timed: float = 0.7  # share of stretches whose time is measured
    caps: Callable[[np.ndarray], Any] | None = None  # max_width of requests by their kinds [n]
    floors: Callable[[np.ndarray], Any] | None = None  # min_width
    seed: int = 1
    clock: Any = 0  # what the times that it reads are drawn from
    slots: int = 4096

    def __post_init__(self) -> None:
        self.random, self._arrivals = map(np.random.default_rng, (self.seed, self.seed + 1000))
        self.clock = np.random.default_rng(self.clock)
        self._free = list(range(self.slots - 1, -1, -1))
        self._kind, self._left, self._context = (np.zeros(self.slots, np.int64) for _ in range(3))
        self._cap = np.full(self.slots, BLOCK, np.int64)
        self._at = np.zeros(self.slots, np.int64)  # in the record
        self._running = np.zeros(0, np.int64)
        self._step: Any = None  # the policy's stretch
        self._clocked: list[float] = []  # seconds of its steps
        self._waited = 0  # of these, for the host
        self._late: list[tuple[Any, ...]] = []
        self._fresh = True

    @property
    def batch(self) -> int:
        return len(self._running)

    @property
    def context_tokens(self) -> int:
        return int(self._context[self._running].sum())

    def arrive(self, concurrency: int) -> int:
        """New requests up to the concurrency; clients beyond it hang up. Prompt tokens to prefill; none of the
        first requests."""
        missing = concurrency - len(self._running)
        if missing <= 0:
            self._free.extend(self._running[concurrency:].tolist())
            self._running = self._running[:concurrency]
            return 0
        new = np.array([self._free.pop() for _ in range(missing)])
        drawn = self._arrivals.random((missing, 3))  # the same requests in the same order, whatever the policy
        self._kind[new] = drawn[:, 0] < self.hard
        self._left[new] = self.tokens * (0.5 + drawn[:, 1])
        self._context[new] = self.prompt
        if isinstance(self.draft, Recorded):
            self._at[new] = drawn[:, 0] * len(self.draft.logprobs)
        prompts = 0 if self._fresh else missing * (self.prompt if self.uncached is None else self.uncached)
        if self._fresh:  # the first ones are found somewhere in the middle, and the long ones more often
            self._left[new] = self.tokens * np.sqrt(0.25 + 2.0 * drawn[:, 1])
            done = (self._left[new] * drawn[:, 2]).astype(np.int64)
            self._left[new] -= done
            self._context[new] += done
            self._fresh = False
        caps = None if self.caps is None else self.caps(self._kind[new])
        self._cap[new] = BLOCK if caps is None else caps
        self.policy.admit(new, caps, None if self.floors is None else self.floors(self._kind[new]))
        self._running = np.concatenate([self._running, new])
        return prompts

    def committed(self) -> np.ndarray:
        """[widths] tokens that a step commits in expectation, requests' caps aside."""
        counts = np.bincount(self._kind[self._running], minlength=self.draft.kinds)
        return len(self._running) + counts @ self.draft.expected

    def steps_needed(self, held: int) -> np.ndarray:
        """[widths] steps of one request that commit what a step of all does at `widths[held]`, caps aside."""
        counts = np.bincount(self._kind[self._running], minlength=self.draft.kinds)
        committed = 1 + self.draft.expected
        return (counts * committed[:, held]) @ (1 / committed)

    def choose(self) -> Any:
        step = self.policy.choose(self._running, self.context_tokens)
        if step is not self._step and self._clocked:
            # As the controller does.
            steps, timed = len(self._clocked), self.clock.random() < self.timed
            told = (self._step, float(np.median(self._clocked)), steps, 2 * self._waited > steps)
            if self._late and self._late[-1][0] is self._step:
                self._late[-1] = (*self._late[-1][:-1], told if timed else None)
            elif timed:
                self.policy.timed(*told)
            self._clocked, self._waited = [], 0
        self._step = step
        return step.decision

    def draft_step(self, width: int) -> Proposed:
        """Of blocks of this width."""
        slots = self._running
        if isinstance(self.draft, Recorded):
            at = self._at[slots]
            accepted, of_trees = self.draft.accepted_of[at], (self.draft.mass[at], self.draft.accepted_of_tree[at])
            return Proposed(self.draft.logprobs[at, : width - 1], np.minimum(accepted, width - 1), *of_trees)
        said, accepted = self.draft.step(self._kind[slots], width, self.random)
        most = self._cap[slots] - 1
        said = np.where(np.arange(said.shape[1]) < most[:, None], said, -np.inf)
        return Proposed(said, np.minimum(accepted, most))

    def finish(
        self,
        seconds: float,
        accepted: np.ndarray,
        said: np.ndarray,
        lens: np.ndarray | None = None,
        mass: np.ndarray | None = None,
        interrupted: bool = False,
        waited: bool = False,
    ) -> None:
        """The step is over: its results reach the policy `delay` steps after it was chosen. seconds: what its time
        would be read as, if it can be; said [n, proposals]: logprobs; lens [n]: verified; mass [n, nodes]. waited:
        for the host."""
        slots = self._running
        if not interrupted:
            self._clocked.append(seconds)
            self._waited += waited
        self._late.append((self._step, accepted, said, lens, mass, None))
        if len(self._late) >= self.delay:
            *result, timed = self._late.pop(0)
            self.policy.verified(*result)
            if timed is not None:
                self.policy.timed(*timed)
        self._left[slots] -= accepted + 1
        self._context[slots] += accepted + 1
        if isinstance(self.draft, Recorded):
            self._at[slots] = (self._at[slots] + accepted + 1) % len(self.draft.logprobs)
        done = self._left[slots] <= 0
        if done.any():
            self._free.extend(slots[done].tolist())
            self._running = slots[~done]


class Proposed(NamedTuple):
    """What a draft says of the requests of a step, and what comes true of it."""

    said: np.ndarray  # [n, proposals] logprobs
    accepted: np.ndarray  # [n] of whole blocks
    mass: np.ndarray | None = None  # [n, nodes]
    accepted_of_tree: np.ndarray | None = None  # [n, nodes] of the first 1, 2, ... nodes


class Server:
    """Ranks that run their steps together, at one width: a step is as long as that of the largest batch."""

    def __init__(self, machine: Machine, *ranks: Rank):
        self.machine, self.ranks = machine, ranks
        self._held, self._before = 0, None

    def run(
        self, concurrency: int | Sequence[int], *, steps: int | None = None, seconds: float | None = None
    ) -> Run:
        """Steps at a concurrency (of each rank), by their number or their time; a later call goes on from here."""
        run, widths = Run(), list(self.machine.widths)
        each = [concurrency] * len(self.ranks) if isinstance(concurrency, int) else concurrency
        while (steps is None or len(run.widths) < steps) and (seconds is None or run.seconds < seconds):
            prompts = max(rank.arrive(requests) for rank, requests in zip(self.ranks, each, strict=True))
            prefilled = self.machine.prefill_seconds(prompts)
            if prefilled:
                run.seconds += prefilled
                for rank in self.ranks:
                    rank.policy.prefill()
            committed = np.sum([rank.committed() for rank in self.ranks], axis=0)
            times = self.machine.seconds(
                max(rank.batch for rank in self.ranks), max(rank.context_tokens for rank in self.ranks)
            )
            needed = np.sum([rank.steps_needed(self._held) for rank in self.ranks], axis=0)
            long_run = sum(rank.batch for rank in self.ranks) * needed[0] / needed
            rates = long_run / times
            for rank in self.ranks:
                if isinstance(rank.policy, Oracle):
                    rank.policy.width = widths[int(rates.argmax())]
            decisions = [rank.choose() for rank in self.ranks]
            assert len({decision.width for decision in decisions}) == 1, "ranks chose different widths"
            decision = decisions[0]
            width = widths.index(decision.width)
            budget, nodes = decision.verify_budget, decision.tree_nodes
            kind = Kind(decision.width, budget is not None, nodes)
            drafted = [rank.draft_step(decision.width) for rank in self.ranks]
            taken, gained, lens, mass = times[width], committed[width], None, None
            accepted = [of.accepted for of in drafted]
            if budget is not None or nodes is not None or isinstance(self.ranks[0].draft, Recorded):
                (rank,), (of_rank,) = self.ranks, drafted
                taken = self.machine.kind_seconds(rank.batch, rank.context_tokens, kind, budget)
                if budget is not None:
                    lens = shared(of_rank.said, budget)
                    accepted = [np.minimum(of_rank.accepted, lens - 1)]
                if nodes is not None:
                    mass, accepted = of_rank.mass[:, :nodes], [of_rank.accepted_of_tree[:, nodes - 1]]
                gained = (accepted[0] + 1).sum()
                if budget is not None and not isinstance(rank.draft, Recorded):
                    reach = np.exp(rank.draft.sure * of_rank.said.cumsum(axis=1))
                    gained = rank.batch + reach[np.arange(reach.shape[1]) < lens[:, None] - 1].sum()
            host = self.machine.host[decision.width > 1] + self.machine.switch * (kind != self._before)
            self._before = kind
            taken, waited = max(taken, host), taken < host
            for rank, of_rank, of in zip(self.ranks, drafted, accepted, strict=True):
                read = self.machine.read(taken, rank.clock)
                rank.finish(read, of, of_rank.said, lens, mass, prefilled > 0, waited)
            if not decision.probe:
                self._held = width
            run.lost += max(times[width] - long_run[width] / rates[self._held], 0.0)
            run.tokens += float(gained)
            run.seconds += float(taken)
            run.widths.append(decision.width)
            run.probes.append(decision.probe)
            run.worth.append(float(rates[width] / rates.max()))
        return run


def shared(said: np.ndarray, tokens: int) -> np.ndarray:
    """[n] tokens of each request, the likeliest of the batch (`share_rows`). said: [n, proposals] logprobs"""
    lens, starts = torch.zeros(len(said), dtype=torch.int32), torch.zeros(len(said) + 1, dtype=torch.int32)
    share_rows(torch.from_numpy(np.maximum(said, -1e3)), tokens, lens, starts)
    return lens.numpy().astype(np.int64)


def serve(policy: Any, machine: Machine, draft: Draft | Recorded, **load: Any) -> Server:
    """A server of one rank."""
    return Server(machine, Rank(policy, draft, **load))


def steady_mix(policy: Any, concurrency: int, hard: float, seed: int, steps: int = 1000, **draft: float) -> Run:
    """Steps of a mix of easy and hard requests with equal token budgets, after 400 in which the batch becomes
    what it stays: easy requests leave it early, and another of the same mix takes the place of any that does."""
    server = serve(policy, QUIET, Draft(EASY, HARD, **draft), hard=hard, seed=seed, clock=seed)
    server.run(concurrency, steps=400)
    return server.run(concurrency, steps=steps)


PREFILLS = dict(launch=2e-3, weights=5.3e-3, prompt_token=24.6e-6)  # Qwen3-8B in bfloat16 on one H200
CACHED = dict(prompt=256, uncached=32)  # what prefills have in common decides, not their tokens


def between_prefills(policy: Any, concurrency: int, answer: int, seed: int = 0) -> Run:
    """500 steps of requests with so many tokens on average, prefilled as others end, after 300 not counted."""
    machine = Machine(jitter=0.02, outliers=0.01, **PREFILLS)
    server = serve(policy, machine, Draft(GOOD), tokens=answer, timed=1.0, seed=seed, clock=seed, **CACHED)
    server.run(concurrency, steps=300)
    return server.run(concurrency, steps=500)


def tiers(most: int) -> list[int]:
    """1, 3 and 5 times powers of two, up to the first that is at least `most`."""
    sizes = sorted(factor << power for factor in (1, 3, 5) for power in range(most.bit_length()))
    return [*(size for size in sizes if size < most), next(size for size in sizes if size >= most)]
