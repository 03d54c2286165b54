"""Over 150 mutated configs: each passes or is refused by the name of what is wrong, without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mutants import Mutant, mutants


def faults(mutant: Mutant, code: int, said: dict) -> Iterator[str]:
    if code == 2:
        if not said["unreadable"].startswith(("--draft", "--target")) or "\n" in said["unreadable"]:
            yield said["unreadable"]
    elif code == 1:
        texts = [refusal["text"] for refusal in said["refused"]]
        if not any(mutant.field in text or "draft tensor" in text for text in texts) or said["worker"] is not None:
            yield f"{texts} by {said['worker']}, without {mutant.field}"
        for field, text in ((refusal["field"], refusal["text"]) for refusal in said["refused"]):
            if not text.startswith(f"{field}=") or ": expected " not in text or "\n" in text:
                yield text
    elif code or said["refused"] or said["worker"] not in ("dflash_sglang", "built-in"):
        yield str(said)


@pytest.mark.slow
def test_a_mutant_is_refused_by_name_or_passes(tmp_path: Path, examined: Callable[..., tuple[int, dict]]) -> None:
    found = {}
    for number, mutant in enumerate(mutants()):
        directory = tmp_path / str(number)
        directory.mkdir()
        mutant.write(directory)
        found[mutant.name] = list(faults(mutant, *examined(**{mutant.of: str(directory)})))
    assert len(found) == number + 1 > 150 and not {name: of for name, of in found.items() if of}
