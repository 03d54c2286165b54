"""Prints the tables of docs/results/width-simulated.md: python -m tests.support.width_tables

The last one is measured.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dflash_sglang.width import choice
from dflash_sglang.width.kinds import Kind
from tests.support.width_simulation import (
    EASY,
    GOOD,
    HARD,
    POOR,
    QUIET,
    TREES,
    WIDTHS,
    Draft,
    Fixed,
    FixedKind,
    Machine,
    Oracle,
    Recorded,
    Run,
    adaptive,
    between_prefills,
    heedless,
    serve,
    steady_mix,
)

CONCURRENCIES = (1, 8, 32, 64, 128, 256, 1024, 4096)
STEADY = ((32, 0.5), (64, 0.2), (64, 0.5), (128, 0.2))
MOVING = (1, 8, 64, 256, 32, 128, 8, 1)
SEEDS = range(3)
ANSWERS = (128, 512)
SPREAD = 1.0


def row(*cells: Any) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|")


def head(*cells: Any) -> None:
    print()
    row(*cells)
    row(*("---" for _ in cells))


def throughput(draft: Draft, machine: Machine) -> None:
    head("concurrency", "no speculation", "4", "8", "16 (built-in)", "best fixed", "ours", "ours / best", "probes")
    for concurrency in CONCURRENCIES:
        fixed = {w: serve(Fixed(w), machine, draft).run(concurrency, steps=60).rate for w in WIDTHS}
        ours = [
            serve(adaptive(machine, concurrency, seed=seed), machine, draft, seed=seed, clock=seed).run(
                concurrency, steps=900
            )
            for seed in SEEDS
        ]
        rate, best = float(np.mean([run.rate for run in ours])), max(fixed, key=fixed.__getitem__)
        probes = max(run.lost / run.seconds for run in ours)
        row(
            concurrency,
            *(round(fixed[width]) for width in (1, 4, 8, 16)),
            f"{best}: {fixed[best]:.0f}",
            round(rate),
            f"{rate / fixed[best]:.3f}",
            f"{probes:.1%}",
        )


def changing(machine: Machine) -> None:
    draft = Draft(EASY, HARD)
    head(*(f"fixed {width}" for width in WIDTHS), "ours", "oracle")

    def rate(policy: Any, loads: Any) -> float:
        server = serve(policy, machine, draft, hard=0.5)
        runs: list[Run] = []
        for concurrency, hard in loads:
            server.ranks[0].hard = hard
            runs.append(server.run(concurrency, seconds=3.0))
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    loads = {
        "load": [(concurrency, 0.5) for concurrency in MOVING],
        "traffic at 32": [(32, hard) for hard in (0.0, 1.0) * 3],
    }
    for name, load in loads.items():
        policies = [*(Fixed(width) for width in WIDTHS), adaptive(machine, 256), Oracle()]
        rates = [rate(policy, load) for policy in policies]
        row(*(f"{each / rates[-2]:.2f}" for each in rates), name)


def mixes() -> None:
    fixed_widths = (f"fixed {width}" for width in WIDTHS)
    kinds = ("ours", "ours / best", "worst seed"), ("ragged", "ragged / best", "worst seed")
    head("concurrency", "hard", *fixed_widths, *kinds[0], *kinds[1])
    seeds = range(6)
    for concurrency, hard in STEADY:
        fixed = np.array(
            [[steady_mix(Fixed(width), concurrency, hard, seed).rate for seed in seeds] for width in WIDTHS]
        )
        best = fixed[fixed.mean(axis=1).argmax()]
        cells = []
        for ragged in (False, True):
            policies = (adaptive(QUIET, concurrency, seed=seed, ragged=ragged) for seed in seeds)
            runs = [steady_mix(policy, concurrency, hard, seed) for seed, policy in enumerate(policies)]
            ours = np.array([run.rate for run in runs])
            cells += [round(float(ours.mean())), f"{ours.mean() / best.mean():.3f}", f"{(ours / best).min():.3f}"]
        row(concurrency, f"{hard:.0%}", *fixed.mean(axis=1).round().astype(int), *cells)


def told_apart() -> None:
    """Where the draft says more of a proposal than its kind and position do."""
    head("concurrency", "hard", "best fixed", "one width", "ragged", "ragged / best")
    seeds = range(6)
    for concurrency, hard in STEADY:

        def rate(make: Any, concurrency: int = concurrency, hard: float = hard) -> float:
            return float(np.mean([steady_mix(make(seed), concurrency, hard, seed, SPREAD).rate for seed in seeds]))

        def ours(seed: int, ragged: bool = False, concurrency: int = concurrency) -> Any:
            return adaptive(QUIET, concurrency, seed=seed, ragged=ragged)

        fixed = {width: rate(lambda _, width=width: Fixed(width)) for width in WIDTHS}
        best = max(fixed, key=fixed.__getitem__)
        one, each = rate(ours), rate(lambda seed: ours(seed, ragged=True))
        row(
            concurrency,
            f"{hard:.0%}",
            f"{best}: {fixed[best]:.0f}",
            round(one),
            round(each),
            f"{each / fixed[best]:.3f}",
        )


def recorded(machine: Machine) -> None:
    """Of the trained pair: the best fixed shape among chains, trees and ragged steps of so many rows a request."""
    head("concurrency", "best chain", "best shape", "chains", "ragged too", "trees too", "tree 16", "32", "64")
    draft = Recorded()

    def rate(policy: Any, concurrency: int, seed: int, steps: int) -> float:
        server = serve(policy, machine, draft, seed=seed, clock=seed)
        server.run(concurrency, steps=300)
        return server.run(concurrency, steps=steps).rate

    for concurrency in (1, 2, 4, 8, 32, 64, 128):
        shapes = [(str(width), Fixed(width)) for width in WIDTHS]
        trees = [nodes for nodes, most in TREES.items() if concurrency <= most]
        shapes += [(f"tree {nodes}", FixedKind(Kind(16, nodes=nodes))) for nodes in trees]
        for width in (8, 16) if concurrency > 1 else ():
            shapes += [
                (f"ragged {width}, {rows} rows", FixedKind(Kind(width, ragged=True), rows))
                for rows in (2, 3, 4, 5, 6, 8)
                if rows < width
            ]
        steps = max(300, 12_000 // concurrency)
        fixed = {
            name: np.mean([rate(shape, concurrency, seed, steps) for seed in range(2)]) for name, shape in shapes
        }
        best = max(fixed, key=fixed.__getitem__)
        chain = max(map(str, WIDTHS), key=fixed.__getitem__)

        def share(concurrency: int = concurrency, best: float = fixed[best], **served: Any) -> str:
            ours = [
                rate(adaptive(machine, concurrency, seed=seed, **served), concurrency, seed, 1500)
                for seed in SEEDS
            ]
            return f"{np.mean(ours) / best:.3f}"

        of_trees = [f"{fixed[f'tree {n}'] / fixed[chain]:.3f}" if n in trees else "" for n in TREES]
        row(
            concurrency,
            f"{chain}: {fixed[chain]:.0f}",
            f"{best}: {fixed[best]:.0f}",
            share(),
            share(ragged=True),
            share(ragged=True, trees=TREES),
            *of_trees,
        )


def unmixed(machine: Machine) -> None:
    head("accept length", "concurrency", "one width", "ragged", "ragged / one width")
    for name, draft in (("6.4", Draft(GOOD)), ("1.5", Draft(POOR))):
        for concurrency in (1, 8, 32, 64, 128, 256):
            rates = []
            for ragged in (False, True):
                policies = [adaptive(machine, concurrency, seed=seed, ragged=ragged) for seed in range(4)]
                servers = [serve(p, machine, draft, seed=seed, clock=seed) for seed, p in enumerate(policies)]
                rates.append(np.mean([server.run(concurrency, steps=900).rate for server in servers]))
            one, each = rates
            row(name, concurrency, round(float(one)), round(float(each)), f"{each / one:.3f}")


def prefills(machine: Machine) -> None:
    head(
        "answer", "concurrency", "no speculation", "best fixed", "ours", "ours / best",
        "prefills taken for steps / best", "ragged / best",
    )  # fmt: skip
    for answer in ANSWERS:
        for concurrency in (1, 32, 128, 256):

            def rate(make: Any, answer: int = answer, concurrency: int = concurrency) -> float:
                runs = [between_prefills(make(seed), concurrency, answer, seed) for seed in SEEDS]
                return float(np.mean([run.rate for run in runs]))

            def ours(seed: int, ragged: bool = False, concurrency: int = concurrency) -> Any:
                return adaptive(machine, concurrency, seed=seed, ragged=ragged)

            fixed = {width: rate(lambda _, width=width: Fixed(width)) for width in WIDTHS}
            best = max(fixed, key=fixed.__getitem__)
            policies = (ours, lambda seed: heedless(ours(seed)), lambda seed: ours(seed, ragged=True))
            counted, heedlessly, each = (rate(policy) for policy in policies)
            shares = (f"{of / fixed[best]:.3f}" for of in (counted, heedlessly, each))
            row(answer, concurrency, round(fixed[1]), f"{best}: {fixed[best]:.0f}", round(counted), *shares)


def margins() -> None:
    head("margin", "share of the best, 2 % jitter", "changes in 1000 steps", "10 % jitter", "changes")
    loads = [(Draft(GOOD), 0, c) for c in (1, 32, 64, 128)] + [(Draft(EASY, HARD), 0.5, c) for c in (8, 64)]
    usual = choice.MARGIN
    for margin in (0.0, 0.01, 0.02, 0.05, 0.1):
        choice.MARGIN = margin
        cells = []
        for jitter in (0.02, 0.1):
            machine = Machine(jitter=jitter, outliers=0.01)
            runs = [
                serve(adaptive(machine, c, seed=seed), machine, draft, hard=hard, seed=seed).run(c, steps=800)
                for draft, hard, c in loads
                for seed in SEEDS
            ]
            cells += [f"{np.mean([np.mean(run.worth) for run in runs]):.3f}"]
            cells += [round(float(np.mean([run.changes for run in runs])) / 0.8)]
        row(f"{margin:.0%}", *cells)
    choice.MARGIN = usual


def cost() -> None:
    choice.PROBE_BUDGET = 0.0
    head("batch", "choose, us", "verified, us", "choose ragged, us", "its mean", "verified, us")
    for batch in (1, 64, 512, 4096):
        cells = []
        for ragged in (False, True):
            machine = Machine()
            machine.table[:, 1:] = machine.table[:, 1:2]  # a wide block is best: every step has something to learn
            policy = adaptive(machine, batch, ragged=ragged)
            spent: dict[str, list[float]] = {"choose": [], "verified": []}
            server = serve(policy, machine, Draft(EASY, HARD), hard=0.5, delay=1)
            for name in spent:
                setattr(policy, name, timed(getattr(policy, name), spent[name]))
            server.run(batch, steps=300)
            choose, verified = ([time * 1e6 for time in times[20:]] for times in spent.values())
            cells += [np.median(choose), *([np.mean(choose)] if ragged else []), np.median(verified)]
        row(batch, *(round(float(cell)) for cell in cells))


def timed(call: Any, times: list[float]) -> Any:
    def wrapped(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        times.append(time.perf_counter() - start)
        return result

    return wrapped


if __name__ == "__main__":
    throughput(Draft(GOOD), QUIET)
    throughput(Draft(POOR), QUIET)
    changing(QUIET)
    mixes()
    told_apart()
    recorded(QUIET)
    unmixed(QUIET)
    prefills(QUIET)
    margins()
    cost()
