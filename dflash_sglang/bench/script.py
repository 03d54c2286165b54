"""The parser of a script's options."""

from __future__ import annotations

import argparse


def script_parser(docstring: str | None, conflict_handler: str = "error") -> argparse.ArgumentParser:
    """`--help` shows the script's docstring as it is written; options have their whole names."""
    return argparse.ArgumentParser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler=conflict_handler,
        allow_abbrev=False,
    )
