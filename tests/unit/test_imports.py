"""Who may import whom: import-linter's contracts in pyproject.toml, and that each of them catches something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

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


def broken(root: Path) -> tuple[list[str], str]:
    """The rules that the package in `root` breaks, and what import-linter says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    rules = re.findall(r"^(.*) BROKEN\b", done.stdout, re.M)
    assert (done.returncode != 0) == bool(rules), done.stdout + done.stderr
    return rules, done.stdout


def test_a_wrong_import_fails_with_the_rules_name_and_its_own_and_so_does_a_folder_without_a_place(
    tmp_path: Path,
) -> None:
    """`make lint` shows that the package itself has none."""
    assert set(WRONG) == {rule["name"] for rule in RULES["contracts"]}
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in RULES["root_packages"]:
        for path in (ROOT / package).rglob("*.py"):
            to = tmp_path / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    for path, statement in WRONG.values():
        (tmp_path / "dflash_sglang" / path).open("a").write(statement + "\n")
    rules, said = broken(tmp_path)
    assert sorted(rules) == sorted(WRONG)
    for path, _ in WRONG.values():
        assert f"dflash_sglang.{path.removesuffix('.py').replace('/', '.')}" in said
        (tmp_path / "dflash_sglang" / path).unlink(missing_ok=True)
    (tmp_path / "dflash_sglang" / "unplaced.py").touch()
    rules, said = broken(tmp_path)
    assert rules == ["folders import downwards"] and "unplaced" in said
