"""Writes this checkout's package without what it counts, for `bench.paired` to measure what counting costs.

python -m bench.unobserved DIR

DIR gets a copy of `dflash_sglang` whose steps count nothing, mark no part of their time, and give the alarm, the
log line and the Prometheus series nothing to tell.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import dflash_sglang

WITHOUT = {
    "observe/observer.py": ("Observer", {"verified": "None", "report": "None", "snapshot": "{}"}),
    "observe/step_split.py": ("StepSplit", {"begin": "None", "drafted": "None", "end": "None"}),
}


def write(directory: Path) -> None:
    """directory: is made. Raises FileExistsError where it has the package already, and AttributeError for a class
    without one of the methods."""
    package = Path(dflash_sglang.__file__).parent
    shutil.copytree(package, directory / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (owner, methods) in WITHOUT.items():
        lines = [f"{owner}.{one}  # there\n{owner}.{one} = lambda *_: {of}" for one, of in methods.items()]
        with (directory / package.name / name).open("a") as file:
            file.write("\n\n" + "\n".join(lines) + "\n")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(f"arguments={list(arguments)}: expected a directory. Name one.", file=sys.stderr)
        return 2
    write(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
