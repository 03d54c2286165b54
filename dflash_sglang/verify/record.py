"""A record of acceptance: what a trained draft proposed after every token of some texts, and what came true.

`python -m bench.record` writes one: an `.npz` file of three arrays. A start is a token of a text, taken as the
last committed token before a block.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_sglang.startup.facts import LoadError

SETTING, OF_TEXTS = "simulated_acceptance.record", "simulated_acceptance.texts"
_WRITERS = {SETTING: "python -m bench.record", OF_TEXTS: "python -m bench.copies"}


class AcceptanceRecord(NamedTuple):
    """Starts lie in the order of their texts. Ranks say what any chain or tree of the draft's K likeliest tokens
    commits: it goes on as long as the true token is among its nodes."""

    # [starts, proposals, K] float16: of the K likeliest tokens at each place, likeliest first
    logprobs: np.ndarray
    ranks: np.ndarray  # [starts, proposals] uint8: which of them the target commits there; K: none of them
    prompts: np.ndarray  # [starts] uint8: the prompt whose text it is

    @classmethod
    def load(cls, path: Path, setting: str = SETTING) -> AcceptanceRecord:
        """setting: that names the path. Raises LoadError for a file that is no record, with what is wrong."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                record = cls(*(arrays[field] for field in cls._fields))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise refused(path, f"an .npz file of {', '.join(cls._fields)}", error, setting) from error
        shape = record.ranks.shape
        if len(shape) != 2 or 0 in shape:
            raise refused(path, "ranks of shape [starts, proposals], one start or more", shape, setting)
        if record.logprobs.ndim != 3 or record.logprobs.shape[:2] != shape:
            raise refused(path, f"logprobs of shape {[*shape, 'K']}", record.logprobs.shape, setting)
        if record.prompts.shape != shape[:1]:
            raise refused(path, f"prompts of shape {[*shape[:1]]}", record.prompts.shape, setting)
        if record.logprobs.dtype.kind != "f" or record.ranks.dtype.kind != "u":
            types = f"{record.logprobs.dtype} and {record.ranks.dtype}"
            raise refused(path, "logprobs in floating point and ranks as unsigned integers", types, setting)
        return record

    @property
    def accepted(self) -> np.ndarray:
        """[starts] int64: proposals that come true of a whole block at each start."""
        return (self.ranks == 0).cumprod(axis=1, dtype=np.int64).sum(axis=1)


def check_width(record: AcceptanceRecord, block_size: int, path: Path, setting: str = SETTING) -> None:
    """Raises LoadError for a record of fewer proposals than a block has."""
    recorded, proposals = record.ranks.shape[1], block_size - 1
    if recorded < proposals:
        raise LoadError(
            f"{setting}={str(path)!r}: expected at least {proposals} proposals, for a block of {block_size}, "
            f"found {recorded}. Write one with a draft whose blocks are as wide, or lower the block size."
        )


def refused(path: Path, expected: str, found: object, setting: str) -> LoadError:
    """Of a file that is no record."""
    return LoadError(
        f"{setting}={str(path)!r}: expected {expected}, found {found}. Write it with `{_WRITERS[setting]}`."
    )
