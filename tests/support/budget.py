"""The weight of this repository beside what `tests/budget.toml` allows: python -m tests.support.budget [--lower]

Prints every row with its limit, the nearest to it first; `--lower` lowers the limits to today's values and takes
out rows that are gone. A limit is raised, and a row added, by hand, in a commit that says why.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dflash_sglang.bench.script import script_parser
from dflash_sglang.observe import series
from dflash_sglang.patches.table import PATCHES
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.settings.width import WidthConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "budget.toml"
HEAD = """# What each part of this repository may weigh: lines of Python, words of pages. A unit test holds it.
# `python -m tests.support.budget` prints what is near its limit, `--lower` lowers limits to today's values.
"""
APART = ("bench", "demo", "pair")  # folders of the package that its total leaves out
ROUNDED = {"counts": 1, "words": 100}  # up to a multiple

Weights = dict[str, dict[str, int]]  # by table and row


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def by_folder(top: Path) -> dict[str, int]:
    """Lines of each folder of `top`, and of the modules beside them under the name of `top`."""
    found: Counter[str] = Counter()
    for path in sorted(top.rglob("*.py")):
        folder, *beneath = path.relative_to(top).parts
        found[folder if beneath else top.name] += lines([path])
    return dict(sorted(found.items()))


def weights(root: Path = ROOT) -> Weights:
    package, tests = (by_folder(root / name) for name in ("dflash_sglang", "tests"))
    core = sum(of for folder, of in package.items() if folder not in APART)
    pages = [root / "README.md", *root.glob("docs/**/*.md")]
    return {
        "package": {**package, "without bench, demo, pair": core},
        "tests": {**tests, "all": sum(tests.values())},
        "bench": {"bench": lines(root.glob("bench/**/*.py"))},
        "words": {"docs with README": sum(len(page.read_text().split()) for page in pages)},
        "counts": {
            "result files": len([*root.glob("bench/results/*")]),
            "patches": len(PATCHES),
            "settings keys": len(dataclasses.fields(PluginConfig)) + len(dataclasses.fields(WidthConfig)),
            "Prometheus series": len(series.COUNTERS) + len(series.GAUGES),
        },
    }


def faults(
    found: Weights, limits: Weights, file: str = FILE.name, command: str = "tests.support.budget"
) -> list[str]:
    """A line for each row above its limit in the file, without one, or gone. command: lowers the limits."""
    out = []
    for table in sorted({*found, *limits}):
        now, allowed = found.get(table, {}), limits.get(table, {})
        for row in sorted({*now, *allowed}):
            name = f"{file}: {table}, {row!r}"
            if row not in now:
                out.append(f"{name} is gone: python -m {command} --lower takes its limit out")
            elif row not in allowed:
                out.append(f"{name} = {now[row]} has no limit: give it one in a commit that says why")
            elif now[row] > allowed[row]:
                what = f"{name} = {now[row]}: expected at most {allowed[row]}"
                out.append(f"{what}; make it less, or edit the budget in a commit that says why")
    return out


def nearest(found: Weights, limits: Weights) -> list[str]:
    """A line for each row with a limit, the least room first."""
    rows = [
        (allowed - found[table][row], f"{table}, {row}: {found[table][row]} of {allowed}")
        for table, of in limits.items()
        for row, allowed in of.items()
        if row in found[table]
    ]
    return [line for _, line in sorted(rows)]


def lowered(found: Weights, limits: Weights, multiple: int = 10) -> Weights:
    """multiple: that limits are rounded up to, where `ROUNDED` has no other."""

    def limit(table: str, row: str, allowed: int) -> int:
        step = ROUNDED.get(table, multiple)
        return min(allowed, -(-found[table][row] // step) * step)

    return {
        table: {row: limit(table, row, allowed) for row, allowed in of.items() if row in found[table]}
        for table, of in limits.items()
        if table in found
    }


def read() -> Weights:
    return tomllib.loads(FILE.read_text())


def text(limits: Weights, head: str = HEAD) -> str:
    tables = [
        f"\n[{table}]\n" + "".join(f'"{row}" = {allowed}\n' for row, allowed in of.items())
        for table, of in limits.items()
    ]
    return head + "".join(tables)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--lower", action="store_true")
    found, limits = weights(), read()
    if parser.parse_args().lower:
        limits = lowered(found, limits)
        FILE.write_text(text(limits))
    wrong = faults(found, limits)
    print(*nearest(found, limits), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
