"""Runs `dflash-sglang doctor`: reads a launch, lets the checks of start-up judge it, and prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from dflash_sglang.doctor import launch
from dflash_sglang.doctor.page import page


def doctor(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """options: `target`, `draft`, `json`; flags: of the launch. Returns the exit code: 0 fine, 1 refused, 2 cannot
    read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():  # of what SGLang has no kernels for on this machine
            warnings.simplefilter("ignore")
            launch.load_plugins()
            from dflash_sglang.doctor.findings import examine  # imports SGLang

            found = examine(options.target, options.draft, _without_command(flags))
    except launch.Unreadable as error:
        if options.json:
            print(json.dumps({"target": options.target, "draft": options.draft, "unreadable": str(error)}))
        print(f"dflash-sglang doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if options.json else page(found))
    return 1 if found["refused"] else 0


def _without_command(words: Sequence[str]) -> Sequence[str]:
    """The flags of a pasted command, which may begin with `python -m sglang.launch_server` or `sglang serve`."""
    if list(words[:2]) == ["sglang", "serve"]:
        return words[2:]
    python, module = Path(words[0]).name if words else "", "sglang.launch_server"
    if python == module:
        return words[1:]
    return words[3:] if python.startswith("python") and list(words[1:3]) == ["-m", module] else words
