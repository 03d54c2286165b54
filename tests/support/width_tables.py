"""Prints the tables of docs/results/width-simulated.md: python -m tests.support.width_tables

The last one is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dflash_sglang.width import decider
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

STEADY = ((32, 0.5), (64, 0.2), (64, 0.5), (128, 0.2))
MOVING = (1, 8, 64, 256, 32, 128, 8, 1)

Make = Callable[[int], Any]  # a policy by its seed


def row(*cells: Any) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|")


def head(*cells: Any) -> None:
    print()
    row(*cells)
    row(*("---" for _ in cells))


def rates(make: Make, run: Callable[[Any, int], Run], seeds: int) -> np.ndarray:
    """[seeds] tokens per second of `run(policy, seed)`."""
    return np.array([run(make(seed), seed).rate for seed in range(seeds)])


def ours(concurrency: int, **served: Any) -> Make:
    return lambda seed: adaptive(QUIET, concurrency, seed=seed, **served)


def best_of(shapes: Iterable[tuple[Any, Make]], run: Callable[[Any, int], Run], seeds: int) -> tuple[Any, Any]:
    """Rates by shape, and the shape of the best mean."""
    found = {name: rates(make, run, seeds) for name, make in shapes}
    return found, max(found, key=lambda name: found[name].mean())


def widths() -> list[tuple[int, Make]]:
    return [(width, lambda _, width=width: Fixed(width)) for width in WIDTHS]


def throughput(draft: Draft) -> None:
    head("concurrency", "no speculation", "4", "8", "16 (built-in)", "best fixed", "ours", "ours / best", "probes")
    for concurrency in (1, 8, 32, 64, 128, 256, 1024, 4096):
        fixed = {w: serve(Fixed(w), QUIET, draft).run(concurrency, steps=60).rate for w in WIDTHS}
        runs = [
            serve(ours(concurrency)(seed), QUIET, draft, seed=seed, clock=seed).run(concurrency, steps=900)
            for seed in range(3)
        ]
        rate, best = float(np.mean([run.rate for run in runs])), max(fixed, key=fixed.__getitem__)
        cells = (*(round(fixed[width]) for width in (1, 4, 8, 16)), f"{best}: {fixed[best]:.0f}", round(rate))
        row(concurrency, *cells, f"{rate / fixed[best]:.3f}", f"{max(run.lost / run.seconds for run in runs):.1%}")


def changing() -> None:
    head(*(f"fixed {width}" for width in WIDTHS), "ours", "oracle", "what changes")

    def rate(policy: Any, loads: Any) -> float:
        server, runs = serve(policy, QUIET, Draft(EASY, HARD), hard=0.5), []
        for concurrency, hard in loads:
            server.ranks[0].hard = hard
            runs.append(server.run(concurrency, seconds=3.0))
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    loads = {
        "load": [(concurrency, 0.5) for concurrency in MOVING],
        "traffic at 32": [(32, hard) for hard in (0.0, 1.0) * 3],
    }
    for name, load in loads.items():
        found = [rate(policy, load) for policy in (*map(Fixed, WIDTHS), adaptive(QUIET, 256), Oracle())]
        row(*(f"{each / found[-2]:.2f}" for each in found), name)


def mixes() -> None:
    """Then where the draft says more of a proposal than its kind and position do."""
    shares = ("ours", "ours / best", "worst seed", "ragged", "ragged / best", "worst seed")
    head("concurrency", "hard", *(f"fixed {width}" for width in WIDTHS), *shares)
    for concurrency, hard in STEADY:
        run = lambda policy, seed, at=(concurrency, hard): steady_mix(policy, *at, seed)  # noqa: E731
        fixed, width = best_of(widths(), run, 6)
        best, cells = fixed[width], []
        for ragged in (False, True):
            found = rates(ours(concurrency, ragged=ragged), run, 6)
            cells += [round(found.mean()), f"{found.mean() / best.mean():.3f}", f"{(found / best).min():.3f}"]
        row(concurrency, f"{hard:.0%}", *(round(of.mean()) for of in fixed.values()), *cells)
    head("concurrency", "hard", "best fixed", "one width", "ragged", "ragged / best")
    for concurrency, hard in STEADY:
        run = lambda policy, seed, at=(concurrency, hard): steady_mix(policy, *at, seed, spread=1.0)  # noqa: E731
        fixed, width = best_of(widths(), run, 6)
        best = fixed[width].mean()
        one, each = (rates(ours(concurrency, ragged=ragged), run, 6).mean() for ragged in (False, True))
        row(concurrency, f"{hard:.0%}", f"{width}: {best:.0f}", round(one), round(each), f"{each / best:.3f}")


def recorded() -> None:
    """Of the trained pair: the best fixed shape among chains, trees and ragged steps of so many rows a request."""
    head("concurrency", "best chain", "best shape", "chains", "ragged too", "trees too", "tree 16", "32", "64")
    draft = Recorded()
    for concurrency in (1, 2, 4, 8, 32, 64, 128):
        shapes: list[tuple[Any, Make]] = [(str(width), make) for width, make in widths()]
        trees = [nodes for nodes, most in TREES.items() if concurrency <= most]
        shapes += [(f"tree {nodes}", lambda _, nodes=nodes: Fixed(16, nodes)) for nodes in trees]
        for width in (8, 16) if concurrency > 1 else ():
            shapes += [
                (f"ragged {width}, {rows} rows", lambda _, of=(width, None, rows): Fixed(*of))
                for rows in (2, 3, 4, 5, 6, 8)
                if rows < width
            ]

        def run(policy: Any, seed: int, concurrency: int = concurrency, steps: int = 1500) -> Run:
            server = serve(policy, QUIET, draft, seed=seed, clock=seed)
            server.run(concurrency, steps=300)
            return server.run(concurrency, steps=steps)

        steps = max(300, 12_000 // concurrency)
        found, best = best_of(shapes, lambda policy, seed, steps=steps, run=run: run(policy, seed, steps=steps), 2)
        fixed = {name: of.mean() for name, of in found.items()}
        chain = max(map(str, WIDTHS), key=fixed.__getitem__)
        kinds: tuple[dict[str, Any], ...] = ({}, dict(ragged=True), dict(ragged=True, trees=TREES))
        shares = [rates(ours(concurrency, **served), run, 3).mean() / fixed[best] for served in kinds]
        of_trees = [f"{fixed[f'tree {n}'] / fixed[chain]:.3f}" if n in trees else "" for n in TREES]
        names = (f"{name}: {fixed[name]:.0f}" for name in (chain, best))
        row(concurrency, *names, *(f"{share:.3f}" for share in shares), *of_trees)


def unmixed() -> None:
    head("accept length", "concurrency", "one width", "ragged", "ragged / one width")
    for name, draft in (("6.4", Draft(GOOD)), ("1.5", Draft(POOR))):
        for concurrency in (1, 8, 32, 64, 128, 256):

            def run(policy: Any, seed: int, draft: Draft = draft, concurrency: int = concurrency) -> Run:
                return serve(policy, QUIET, draft, seed=seed, clock=seed).run(concurrency, steps=900)

            one, each = (rates(ours(concurrency, ragged=ragged), run, 4).mean() for ragged in (False, True))
            row(name, concurrency, round(one), round(each), f"{each / one:.3f}")


def prefills() -> None:
    shares = ("ours / best", "prefills taken for steps / best", "ragged / best")
    head("answer", "concurrency", "no speculation", "best fixed", "ours", *shares)
    for answer in (128, 512):
        for concurrency in (1, 32, 128, 256):
            run = lambda policy, seed, at=(concurrency, answer): between_prefills(policy, *at, seed)  # noqa: E731
            fixed, width = best_of(widths(), run, 3)
            best, usual = fixed[width].mean(), ours(concurrency)
            policies = (usual, lambda seed, usual=usual: heedless(usual(seed)), ours(concurrency, ragged=True))
            found = [rates(make, run, 3).mean() for make in policies]
            cells = (f"{of / best:.3f}" for of in found)
            row(answer, concurrency, round(fixed[1].mean()), f"{width}: {best:.0f}", round(found[0]), *cells)


def margins() -> None:
    head("margin", "share of the best, 2 % jitter", "changes in 1000 steps", "10 % jitter", "changes")
    loads = [(Draft(GOOD), 0, c) for c in (1, 32, 64, 128)] + [(Draft(EASY, HARD), 0.5, c) for c in (8, 64)]
    usual = decider.MARGIN
    for decider.MARGIN in (0.0, 0.01, 0.02, 0.05, 0.1):
        cells = []
        for jitter in (0.02, 0.1):
            machine = Machine(jitter=jitter, outliers=0.01)
            runs = [
                serve(adaptive(machine, c, seed=seed), machine, draft, hard=hard, seed=seed).run(c, steps=800)
                for draft, hard, c in loads
                for seed in range(3)
            ]
            cells += [f"{np.mean([np.mean(run.worth) for run in runs]):.3f}"]
            cells += [round(float(np.mean([run.changes for run in runs])) / 0.8)]
        row(f"{decider.MARGIN:.0%}", *cells)
    decider.MARGIN = usual


def cost() -> None:
    decider.PROBE_BUDGET = 0.0
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
    throughput(Draft(GOOD))
    throughput(Draft(POOR))
    for table in (changing, mixes, recorded, unmixed, prefills, margins, cost):
        table()
