"""bench.paired: which checkout a server is of, and what a claim is made of."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from bench import paired
from dflash_sglang.settings.plugin_config import CONFIG_ENV

ROOT = Path(__file__).parents[2]


def test_a_server_of_another_package_than_its_checkouts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # as figures.sh does; a server inherits it
    (tmp_path / "dflash_sglang").mkdir()
    (tmp_path / "dflash_sglang" / "__init__.py").touch()
    found = paired.candidates(tmp_path, "")
    paired.require_checkouts(found, os.environ)
    unsafe = [dataclasses.replace(one, environment={**one.environment, "PYTHONSAFEPATH": ""}) for one in found]
    with pytest.raises(ValueError, match=f"before: expected the package of {tmp_path}, found {ROOT}"):
        paired.require_checkouts(unsafe, os.environ)
    (tmp_path / "dflash_sglang" / "__init__.py").unlink()
    (tmp_path / "dflash_sglang").rmdir()
    with pytest.raises(ValueError, match=f"before: expected the package of {tmp_path}, found .*dflash_sglang"):
        paired.require_checkouts(found, os.environ)


def test_only_where_acceptance_is_forced_do_servers_simulate_it() -> None:
    for forced in (True, False):
        for one in paired.candidates(ROOT, "", width=8, forced=forced):
            settings = json.loads(one.environment[CONFIG_ENV])
            assert settings["width"] == 8 and ("DFLASH_SGLANG_FORCED" in one.environment) == forced


def test_a_server_without_trees_is_one_more_of_this_checkout() -> None:
    *both, last = paired.candidates(ROOT / "other", "", no_trees=True)
    assert [one.name for one in both] == ["before", "after"] and last.name == "no_trees"
    assert json.loads(last.environment[CONFIG_ENV])["width"] == {"trees": []}
    assert last.environment["PYTHONPATH"] == both[1].environment["PYTHONPATH"]


def test_tokens_are_those_that_steps_of_each_width_commit_in_the_long_run() -> None:
    steps = {"16": [100, 0, 1.0], "1": [50, 2, 0.3]}
    assert paired.rate(steps, 2.0, 8) == pytest.approx(8 * (100 * 6.42 + 50) / 2, rel=0.001)
