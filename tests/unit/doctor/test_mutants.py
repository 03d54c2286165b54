"""Over 150 mutated checkpoints: each passes or is refused by the name of what is wrong, without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, mutants

pytestmark = pytest.mark.slow
REFUSED = ("without ", "short ", "with layers", "with odd", "weights cut ")  # what start-up never lets pass


def faults(mutant: Mutant, code: int, said: dict) -> Iterator[str]:
    if code == 2:
        if not said["unreadable"].startswith(("--draft", "--target")) or "\n" in said["unreadable"]:
            yield said["unreadable"]
    elif code == 1:
        texts = [refusal["text"] for refusal in said["refused"]]
        if not texts or said["worker"] is not None:
            yield f"{texts} by {said['worker']}"
        for refusal in said["refused"]:
            text = refusal["text"]
            if not text.startswith(f"{refusal['field']}=") or ": expected " not in text or "\n" in text:
                yield text
        if not any(mutant.field in text or "draft tensor" in text for text in texts):
            yield f"{texts} without {mutant.field}"
    elif code or said["refused"] or said["worker"] not in ("dflash_sglang", "built-in"):
        yield str(said)
    if mutant.name.startswith(REFUSED) and code != 1:
        yield f"passes with {code}"


@pytest.mark.parametrize("part", range(4))  # none takes long
def test_a_mutant_is_refused_by_name_or_passes(
    part: int, tmp_path: Path, examined: Callable[..., tuple[int, dict]]
) -> None:
    them = list(mutants())
    assert len({mutant.name for mutant in them}) == len(them) > 150
    found = {}
    for number, mutant in enumerate(them[part::4]):
        directory = tmp_path / str(number)
        directory.mkdir()
        mutant.write(directory)
        found[mutant.name] = list(faults(mutant, *examined(**{mutant.of: str(directory)})))
    assert not {name: of for name, of in found.items() if of}
