"""`bench.json`: everything that a run measured, as one object, from which the table and the plot are drawn."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_sglang.bench import servers
from dflash_sglang.bench.load import Outcome
from dflash_sglang.bench.settings import Served, Settings
from dflash_sglang.bench.steps import Steps, no_steps
from dflash_sglang.bench.sweep import Measured
from dflash_sglang.demo.launch import PLAIN

FIGURES = tuple(field.name for field in dataclasses.fields(Outcome))
NOT_SETTINGS = ("target", "draft", "kinds", "skipped", "out", "sets")  # told elsewhere, or long


def document(
    settings: Settings,
    results: Sequence[Measured],
    command: Sequence[str],
    versions: Mapping[str, str],
    incomplete: str | None = None,
) -> dict[str, Any]:
    """``figures``: per server and cell each round's `Outcome`, and its medians by name; ``outputs``: how many
    greedy outputs equal the plain server's, null where accept lengths are forced or no plain server ran;
    ``widths``: steps of all rounds by width, null where the server does not choose; ``acceptance``: per set of
    prompts and server of this package, how many proposals at position 1, 2, ... were verified and accepted, each
    with all before it; ``incomplete``: what ended the run early, or null."""
    told = {key: value for key, value in vars(settings).items() if key not in NOT_SETTINGS}
    return {
        "command": list(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": dict(versions),
        "target": settings.target,
        "draft": settings.draft,
        "settings": {**told, "dtype": settings.dtype},
        "sets": [
            {"name": one.name, "prompts": len(one.prompts), "turns": one.turns, "chat": one.chat}
            for one in settings.sets
        ],
        "servers": [
            {
                "server": str(one.served),
                **_names(one.served),
                "worker": one.worker,
                "flags": servers.flags(settings, one.served),
                "environment": servers.environment(settings, one.served),
            }
            for one in results
        ],
        "skipped": [{"kind": kind, "reason": reason} for kind, reason in settings.skipped],
        "incomplete": incomplete,
        "figures": [
            {
                "server": str(one.served),
                **_names(one.served),
                **dataclasses.asdict(cell),
                "rounds": [dataclasses.asdict(outcome) for outcome in outcomes],
                "median": medians(outcomes),
                "widths": one.widths(cell),
            }
            for one in results
            for cell, outcomes in one.rounds.items()
        ],
        "acceptance": [found for one in results for found in _acceptance(one)],
        "outputs": _equal_outputs(results),
        "profile": [{"server": str(one.served), **step} for one in results for step in one.steps],
    }


def medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The median of the rounds, of each figure by itself."""
    return {name: statistics.median(getattr(one, name) for one in outcomes) for name in FIGURES}


def _names(served: Served) -> dict[str, Any]:
    return {"kind": served.kind, "width": served.width}


def _acceptance(one: Measured) -> list[dict[str, Any]]:
    """By set of prompts, where a step verified a proposal of the draft."""
    found: dict[str, Steps] = {}
    for cell, steps in one.counted.items():
        found[cell.prompts] = found.get(cell.prompts, no_steps()).plus(steps)
    return [
        {
            "server": str(one.served),
            "prompts": name,
            "verified": [steps.verified[at] for at in sorted(steps.verified)],
            "accepted": [steps.accepted[at] for at in sorted(steps.verified)],
        }
        for name, steps in found.items()
        if steps.verified
    ]


def _equal_outputs(results: Sequence[Measured]) -> Mapping[str, Any] | None:
    plain = next((one.outputs for one in results if one.served.kind == PLAIN and one.outputs), None)
    if plain is None:
        return None
    return {
        "prompts": len(plain),
        "new_tokens": len(plain[0]),
        "equal_to_plain": {
            str(one.served): sum(a == b for a, b in zip(one.outputs, plain, strict=True))
            for one in results
            if one.served.kind != PLAIN and one.outputs
        },
    }
