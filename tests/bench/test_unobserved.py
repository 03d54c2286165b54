"""The package that counts nothing: the rest is the same, and its steps go on."""

from __future__ import annotations

import filecmp
import importlib.util
from pathlib import Path

import dflash_sglang
from bench.unobserved import WITHOUT, main, write


def test_the_copy_differs_in_what_counts_alone_and_counts_nothing(tmp_path):
    write(tmp_path)
    package, copy = Path(dflash_sglang.__file__).parent, tmp_path / "dflash_sglang"
    files = [path.relative_to(package) for path in package.rglob("*.py")]
    differing = {str(file) for file in files if not filecmp.cmp(package / file, copy / file, shallow=False)}
    assert differing == set(WITHOUT)
    for file, (owner, methods) in WITHOUT.items():
        spec = importlib.util.spec_from_file_location(file.replace("/", "_")[:-3], copy / file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        of_nothing = object.__new__(getattr(module, owner))
        for method, gives in methods.items():
            assert getattr(of_nothing, method)(1, 2, 3) == {"None": None, "{}": {}}[gives]


def test_a_missing_directory_is_named(capsys):
    assert main([]) == 2
    assert "expected a directory" in capsys.readouterr().err
