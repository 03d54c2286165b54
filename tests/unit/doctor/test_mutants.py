"""Over 150 mutated checkpoints: each passes or is refused by the name of what is wrong, without a traceback."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_sglang import hooks
from dflash_sglang.doctor import launch, run
from dflash_sglang.pair import pair_directories
from tests.support.mutants import Mutant, mutants

PAIR = pair_directories()


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Without SGLang's plugins and the table of patches, which are the same for all."""
    from dflash_sglang.doctor import findings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load_plugins", lambda: None)
        patch.setattr(launch, "plugin_refusal", lambda: None)
        patch.setattr(findings, "states", dict)
        patch.setattr(hooks, "_resolved", None)
        for variable in ("DFLASH_SGLANG_REQUIRE", "DFLASH_SGLANG_CONFIG", "SGLANG_PLATFORM"):
            patch.delenv(variable, raising=False)
        yield


def examined(mutant: Mutant, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """(exit code, JSON) of the pair with this mutant."""
    mutant.write(directory)
    paths = {**PAIR, mutant.of: str(directory)}
    code = run.doctor(argparse.Namespace(**paths, json=True), [])
    return code, json.loads(capsys.readouterr().out)


MUTANTS = list(mutants())


def test_there_are_enough_of_them_and_no_two_alike() -> None:
    assert len(MUTANTS) >= 150 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_refused_by_name_or_passes(
    mutant: Mutant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = examined(mutant, tmp_path, capsys)
    if code == 2:
        assert said["unreadable"].startswith(("--draft", "--target")) and "\n" not in said["unreadable"]
    elif code == 1:
        assert said["worker"] is None and said["refused"]
        for refusal in said["refused"]:
            assert refusal["text"].startswith(f"{refusal['field']}=") and ": expected " in refusal["text"]
            assert "\n" not in refusal["text"]
        texts = " ".join(refusal["text"] for refusal in said["refused"])
        assert mutant.field in texts or "draft tensor" in texts, texts
    else:
        assert code == 0 and said["worker"] in ("dflash_sglang", "built-in") and not said["refused"]
    if mutant.name.startswith(("without ", "short ", "with layers", "with odd", "weights cut ")):
        assert code == 1, said
