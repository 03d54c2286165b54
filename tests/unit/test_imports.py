"""Who may import whom: import-linter's contracts in pyproject.toml, and that each of them catches something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

# By rule a module of the package, which need not exist, and what it must not import.
WRONG = {
    "folders import downwards": ("width/wrong.py", "import dflash_sglang.worker"),
    "a draft and its settings are read without SGLang": ("checkpoint/wrong.py", "import sglang.srt.server_args"),
    "Triton is imported in kernels only": ("verify/wrong.py", "import triton"),
    "demo and bench start servers and reach into none": ("demo/wrong.py", "import dflash_sglang.verify.verifier"),
    "tests, benches and training stand on the package": ("verify/wrong.py", "import training.data"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's Python and its contracts."""
    root = tmp_path_factory.mktemp("imports")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in RULES["root_packages"]:
        for path in (ROOT / package).rglob("*.py"):
            to = root / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    return root


@pytest.fixture
def added(copy: Path) -> Iterator[list[Path]]:
    """Files that end with the test."""
    files: list[Path] = []
    yield files
    for path in files:
        path.unlink()


def broken(root: Path) -> tuple[list[str], str]:
    """The rules that the package in `root` breaks, and what import-linter says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    rules = re.findall(r"^(.*) BROKEN\b", done.stdout, re.M)
    assert (done.returncode != 0) == bool(rules), done.stdout + done.stderr
    return rules, done.stdout


def test_no_import_of_this_package_is_wrong(copy: Path) -> None:
    assert broken(copy)[0] == []


def test_every_rule_has_a_wrong_import() -> None:
    assert set(WRONG) == {rule["name"] for rule in RULES["contracts"]}


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_import_fails_with_the_rules_name_and_its_own(rule: str, copy: Path, added: list[Path]) -> None:
    path, statement = WRONG[rule]
    added.append(copy / "dflash_sglang" / path)
    added[0].write_text(statement + "\n")
    rules, said = broken(copy)
    assert rules == [rule]
    assert f"dflash_sglang.{path.removesuffix('.py').replace('/', '.')}" in said


def test_a_folder_without_a_place_fails(copy: Path, added: list[Path]) -> None:
    added.append(copy / "dflash_sglang" / "unplaced.py")
    added[0].write_text("")
    rules, said = broken(copy)
    assert rules == ["folders import downwards"] and "unplaced" in said
