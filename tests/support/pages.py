"""Pages of the docs that a module of `tests.support` writes: `python -m tests.support.NAME [--check]`."""

from __future__ import annotations

import argparse
from pathlib import Path


def written(page: Path, now: str, module: str) -> int:
    """Write the page, or with `--check` say whether it is what it would be. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        page.write_text(now)
    elif page.read_text() != now:
        print(f"{page.name} is not what it should be: run python -m {module}")
        return 1
    return 0
