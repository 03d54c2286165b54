"""bench/figures.sh: the command of each file in bench/results that a GPU gave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Stands for Python, and writes down the arguments that it gets.
PRINTS = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
"""
# Directories, ports and devices; whether rounds came at once.
WHERE = {"--out", "--logs", "--port", "--gpus", "--target", "--draft", "--before", "--add", "--prompts"}
DEFAULTS = {"--rounds": ["3"], "--output": ["512"]}


def options(arguments: list[str]) -> dict[str, list[str]]:
    """{option: its values}, the last of each counting; without those that are of a machine or the default."""
    found: dict[str, list[str]] = {"module": arguments[:2]}
    for argument in arguments[2:]:
        if argument.startswith("--") and " " not in argument.split("=")[0]:
            name, given, value = argument.partition("=")
            found[name] = [value] if given else []
        else:
            found[name].append(argument)
    return {k: v for k, v in found.items() if k not in WHERE and DEFAULTS.get(k) != v}


def test_the_parts_are_the_commands_of_the_results_that_a_gpu_gave(tmp_path):
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PRINTS)
    python.chmod(0o755)
    for pair in ("pair", "pair-9b"):
        (tmp_path / pair / "target").mkdir(parents=True)
    script = (ROOT / "bench" / "figures.sh").read_text()
    parts = re.findall(r"^    (\w+)\)", script, re.M)
    listed = re.findall(r"^#  (?: on one GPU| on two, \"0,1\")? +(\w.*)$", script, re.M)
    assert sorted(" ".join(listed).split()) == sorted(parts)
    places = dict(
        PYTHON=python,
        CALLS=calls,
        PAIR=tmp_path / "pair",
        LOGS=tmp_path / "logs",
        BEFORE="a3962b5",
        PROMPTS=tmp_path,
    )
    environment = {**os.environ, **{name: str(path) for name, path in places.items()}}
    command = ["bash", "bench/figures.sh", "0,1", *parts]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
    made = [call for line in calls.read_text().splitlines() if "--out" in (call := json.loads(line))]
    by_file = {Path(one[one.index("--out") + 1]).name: options(one) for one in made}
    stored = {path.name: json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*.json")}
    of_a_gpu = {
        name: options(report["command"][1:])
        for name, report in stored.items()
        if report["versions"]["gpu"] != "none" and "soak" not in name and report["command"][2].startswith("bench.")
    }
    assert len(made) == len(by_file) == len(parts)
    assert by_file == of_a_gpu
