"""What acceptance is compared with: the figures of an earlier check, or a record with the same keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang import pair
from dflash_sglang.bench.settings import BadSetting

LENGTH = "accept_length"
POSITIONS = "acceptance_at_position_1_on"


@dataclass(frozen=True)
class Baseline:
    source: str
    accept_length: float
    positions: tuple[float, ...]  # share of the verify steps that accepted proposal 1, 2, ...; or empty


def read_baseline(path: Path) -> Baseline:
    """Reads `accept_length` and, where it is there, `acceptance_at_position_1_on`. Raises BadSetting."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadSetting(f"--baseline {path}: expected what check --json printed ({error})") from error
    return _baseline(str(path), found)


def packaged_baseline() -> Baseline:
    """The record of the packaged pair: its held-out prompts, 128 new tokens, blocks of 16."""
    record = json.loads(pair.RECORD.read_text(encoding="utf-8"))
    return _baseline("the record of the packaged pair", record["evaluation"]["block_16"])


def _baseline(source: str, found: Any) -> Baseline:
    fields: dict[str, Any] = found if isinstance(found, dict) else {}
    length: Any = fields.get(LENGTH)
    positions: Any = fields.get(POSITIONS, [])
    if not _is_number(length) or length < 1:
        raise BadSetting(f"--baseline {source}: {LENGTH} is {length!r}: expected a number of at least 1")
    if not isinstance(positions, list) or not all(_is_number(share) and 0 <= share <= 1 for share in positions):
        raise BadSetting(f"--baseline {source}: {POSITIONS} is {positions!r}: expected a list of shares, 0 to 1")
    return Baseline(source, float(length), tuple(map(float, positions)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
