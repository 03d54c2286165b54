"""`dflash-sglang bench` from start to end: settings, measurement, and the files that it leaves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_sglang.bench import plot, sweep, table
from dflash_sglang.bench.arguments import settings_of
from dflash_sglang.bench.document import document
from dflash_sglang.bench.settings import BadSetting, Served, Settings
from dflash_sglang.bench.trace import TraceError
from dflash_sglang.bench.versions import versions
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import ServerFailed


def bench(options: argparse.Namespace) -> int:
    """The exit code: 0, or 1 when float32 outputs differ.

    Raises BadSetting for settings that cannot be measured; ServerFailed or TraceError where a server, a load or a
    trace failed, or another worker ran.
    """
    import torch

    if options.redraw is not None:
        write(_read(options.redraw), options.out)
        return 0
    return measure(settings_of(options, torch.cuda.is_available()))


def _read(path: Path) -> dict[str, Any]:
    try:
        measured = json.loads(path.read_text())
        if isinstance(measured, dict) and all(isinstance(measured.get(key), list) for key in ("figures", "sets")):
            return measured
        reason = "it has no figures, or those of another version"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise BadSetting(f"--redraw {path}: expected a bench.json of an earlier run ({reason})")


def measure(settings: Settings) -> int:
    """Measures and writes; what was measured before a failure or Ctrl-C is written too, and called incomplete."""
    progress = Progress(sys.stdout)
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSetting(f"--out {settings.out}: expected a directory to write to ({error})") from error
    ran_on = versions()
    for kind, reason in settings.skipped:
        progress.text(f"without the {kind.replace('_', '-')} worker: {reason}\n")
    order = "up together" if settings.together else "one after the other"
    progress.text(f"servers {order} ({settings.together_reason}); logs in {settings.out / 'logs'}\n")
    if not plot.can_draw():
        progress.text(f"{plot.MISSING}\n")
    results = {served: sweep.Measured(served) for served in settings.served}
    try:
        sweep.measure(settings, results, progress)
    except (ServerFailed, TraceError, KeyboardInterrupt) as error:
        if any(one.rounds for one in results.values()):
            _save(settings, results, ran_on, str(error) or "interrupted")
        raise
    measured = _save(settings, results, ran_on, None)
    outputs = measured["outputs"]
    if settings.dtype == "float32" and outputs:
        unequal = [name for name, equal in outputs["equal_to_plain"].items() if equal < outputs["prompts"]]
        if unequal:
            print(f"dflash-sglang bench: outputs differ from plain decoding: {unequal}", file=sys.stderr)
            return 1
    return 0


def _save(
    settings: Settings, results: Mapping[Served, sweep.Measured], ran_on: Mapping[str, str], incomplete: str | None
) -> dict[str, Any]:
    command = ["dflash-sglang", *sys.argv[1:]]
    measured = document(settings, list(results.values()), command, ran_on, incomplete)
    figures = settings.out / "bench.json"
    figures.write_text(json.dumps(measured, indent=1) + "\n")
    write(measured, settings.out, figures)
    return measured


def write(measured: dict[str, Any], out: Path, *before: Path) -> None:
    """Writes the table and, with matplotlib, the plot; prints the table and what is written, `before` first."""
    out.mkdir(parents=True, exist_ok=True)
    written = [*before, out / "bench.md"]
    text = table.markdown(measured)
    written[-1].write_text(text)
    print(f"\n{text}")
    if plot.can_draw():
        plot.draw(table.groups(measured), out / "bench.png", plot.subject(measured))
        written.append(out / "bench.png")
    else:
        print(plot.MISSING)
    print("written: " + ", ".join(str(path) for path in written))
