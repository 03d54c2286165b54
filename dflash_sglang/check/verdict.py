"""The verdict on a pair: fine, weak on these prompts, or what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang import pair
from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.broken import CHANCE_LENGTH, Window
from dflash_sglang.check.acceptance import Acceptance
from dflash_sglang.check.parting import Parting

FINE, DEFECT, BELOW_BASELINE, BROKEN_DRAFT = "fine", "defect", "below baseline", "broken draft"
WEAK = "weak on these prompts"
GOOD = (FINE, WEAK)  # the draft and the outputs are as they should be
TOLERANCE = 0.02  # of the baseline's accept length
LENGTH = "accept_length"
POSITIONS = "acceptance_at_position_1_on"


@dataclass(frozen=True)
class Baseline:
    """What acceptance is compared with: the figures of an earlier check, or a record with the same keys."""

    source: str
    accept_length: float
    positions: tuple[float, ...]  # share of the verify steps that accepted proposal 1, 2, ...; or empty


@dataclass(frozen=True)
class Judged:
    """What was seen of a pair."""

    partings: tuple[Parting, ...]
    accepted: Acceptance
    window: Window  # what the acceptance alarm of a server judges
    speed: float | None  # tokens/s over plain decoding; None where it was not measured
    baseline: Baseline | None

    @property
    def break_even(self) -> float | None:
        """Accept length at which the answers take as long as plain decoding's."""
        return None if self.speed is None else self.accepted.length.value / self.speed

    def verdicts(self) -> Iterator[tuple[str, str]]:
        """Yield the verdicts that hold, the worst first, and a sentence on why. None: `FINE`."""
        if defects := [one for one in self.partings if not one.near_tie]:
            yield (
                DEFECT,
                f"outputs that differ from plain decoding by more than rounding: {len(defects)}, the first of "
                f"prompt {defects[0].prompt} at token {defects[0].position}",
            )
        length, even = self.accepted.length, self.break_even
        if self.window.broken:
            yield (
                BROKEN_DRAFT,
                f"accept length {length.value:.2f}: by its first proposals an endless block would have "
                f"{self.window.accept_length:.2f}, as of a broken draft (below {CHANCE_LENGTH:g})",
            )
        least = 0.0 if self.baseline is None else self.baseline.accept_length
        if length.value < least * (1 - TOLERANCE) and length.high < least:
            below = 1 - length.value / least
            yield BELOW_BASELINE, f"accept length {length} is {below:.0%} below the baseline's {least:.2f}"
        if even is not None and length.high < even and not self.window.broken:
            yield (
                WEAK,
                f"accept length {length} is below break-even, about {even:.2f}: {self.speed:.2f} times the "
                "tokens/s of plain decoding",
            )


def read_baseline(path: Path) -> Baseline:
    """Read `accept_length` and, where it is there, `acceptance_at_position_1_on`. Raises BadSetting."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(f"--baseline {path}: expected what check --json printed ({error})") from error
    return _baseline(str(path), found)


def packaged_baseline() -> Baseline:
    """The record of the packaged pair: its held-out prompts, 128 new tokens at most, blocks of 16."""
    record = json.loads(pair.RECORD.read_text(encoding="utf-8"))
    return _baseline("the record of the packaged pair", record["check"])


def _baseline(source: str, found: Any) -> Baseline:
    fields: dict[str, Any] = found if isinstance(found, dict) else {}
    length: Any = fields.get(LENGTH)
    positions: Any = fields.get(POSITIONS, [])
    if type(length) not in (int, float) or length < 1:
        raise BadSetting(f"--baseline {source}: {LENGTH} is {length!r}: expected a number of at least 1")
    if not isinstance(positions, list) or not all(type(of) in (int, float) and 0 <= of <= 1 for of in positions):
        raise BadSetting(f"--baseline {source}: {POSITIONS} is {positions!r}: expected a list of shares, 0 to 1")
    return Baseline(source, float(length), tuple(map(float, positions)))
