"""The reports that measurements leave in `bench/results`: figures with their command, versions and claims."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.versions import versions


def claim(what: str, value: Any, bound: str, ok: bool) -> dict[str, Any]:
    return {"what": what, "value": value, "bound": bound, "ok": bool(ok)}


def at_most(what: str, value: float, bound: float) -> dict[str, Any]:
    return claim(what, value, f"<= {bound}", value <= bound)


def at_least(what: str, value: float, bound: float) -> dict[str, Any]:
    return claim(what, value, f">= {bound}", value >= bound)


def finish(module: str, out: Path | None, claims: Sequence[Mapping[str, Any]], **more: Any) -> int:
    """Prints the claims, writes a report to `out` where given; returns the exit status: 0 where every claim holds.

    `module` was run with this process's arguments; `more`: what else the report holds, figures first.
    """
    report = {
        "command": ["python", "-m", module, *sys.argv[1:]],
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        **more,
        "claims": claims,
    }
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(claims, indent=1))
    return 0 if all(one["ok"] for one in claims) else 1
