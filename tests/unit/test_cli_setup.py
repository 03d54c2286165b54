"""`make setup`: the Python that it takes, and environments that it makes again. Options have their whole names."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dflash_sglang import SGLANG_VERSION

ROOT = Path(__file__).parents[2]
CODE = ("dflash_sglang", "bench", "tests", "training")
# A Python that runs what it is given as 3.13 would.
OTHER_VERSION = f"""#!/bin/sh
exec {sys.executable} -c 'import sys; sys.version_info = (3, 13, 0); exec(sys.argv[1])' "$2"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the Makefile and what it reads, and `python3.13`, which does not fit."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python3.13").write_text(OTHER_VERSION)
    (tmp_path / "python3.13").chmod(0o755)
    return tmp_path


def setup(project: Path, pythons: str) -> subprocess.CompletedProcess[str]:
    """What `make setup` would run, without running it; of these Pythons the first that fits."""
    command = ["make", "--dry-run", "setup", f"PYTHON={pythons}"]
    apart = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # from `make test`
    return subprocess.run(command, cwd=project, env=apart, capture_output=True, text=True, timeout=60)


def test_the_first_python_that_fits_makes_the_environment(project: Path) -> None:
    planned = setup(project, f"no-such-python {project / 'python3.13'} {sys.executable} python3")
    assert planned.stdout.splitlines()[0] == f"{sys.executable} -m venv --clear .venv", planned.stderr


def test_the_environment_gets_the_one_sglang_that_is_tested_and_a_plain_install_keeps_a_later_one(
    project: Path,
) -> None:
    planned = setup(project, sys.executable).stdout
    assert "--requirement pyproject.toml" in planned and f'"sglang=={SGLANG_VERSION}"' in planned
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dependencies"] == [f"sglang>={SGLANG_VERSION}"]


def test_without_a_python_that_fits_one_sentence_says_what_to_do(project: Path) -> None:
    planned = setup(project, f"no-such-python {project / 'python3.13'}")
    assert planned.returncode == 2 and planned.stdout == ""
    [said] = planned.stderr.splitlines()
    assert f"No Python 3.11 or 3.12 that can make a virtual environment (no-such-python {project}" in said
    assert "install one, its venv package included, or name it: make PYTHON=/path/to/python3.12" in said


def test_an_environment_without_pip_is_made_again_and_a_whole_one_is_kept(project: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=project, check=True, timeout=60)
    assert setup(project, sys.executable).stdout.splitlines()[0] == f"{sys.executable} -m venv --clear .venv"
    [packages] = (project / ".venv").glob("lib/python*/site-packages")
    (packages / "pip.py").touch()
    assert setup(project, "no-such-python").stdout.splitlines()[0] == ".venv/bin/python -m pip install --quiet uv"


def test_no_parser_takes_abbreviated_options() -> None:
    for file in (file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "ArgumentParser":
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert given.get("allow_abbrev") is False, file
