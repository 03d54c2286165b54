"""Runs `dflash-sglang doctor`: reads a launch, lets the checks of start-up judge it, and prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence

from dflash_sglang.doctor import launch


def doctor(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """options: `target`, `draft`, `json`; flags: of the launch. Returns the exit code: 0 fine, 1 refused, 2 cannot
    read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():  # of what SGLang has no kernels for on this machine
            warnings.simplefilter("ignore")
            launch.load_plugins()
            from dflash_sglang.doctor.findings import examine  # imports SGLang

            report = examine(options.target, options.draft, flags)
    except launch.Unreadable as error:
        if options.json:
            print(json.dumps({"target": options.target, "draft": options.draft, "unreadable": str(error)}))
        print(f"dflash-sglang doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_json(), indent=1) if options.json else report.as_page())
    return report.exit_code
