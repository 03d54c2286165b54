"""Over 150 mutated checkpoints: each passes or is refused by the name of what is wrong, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, mutants

pytestmark = pytest.mark.slow
MUTANTS = list(mutants())


def test_there_are_enough_of_them_and_no_two_alike() -> None:
    assert len(MUTANTS) >= 150 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_refused_by_name_or_passes(
    mutant: Mutant, tmp_path: Path, examined: Callable[..., tuple[int, dict]]
) -> None:
    mutant.write(tmp_path)
    code, said = examined(**{mutant.of: str(tmp_path)})
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
