"""A record of acceptance: what a trained draft proposed after every token of some texts, and what came true.

`python -m bench.record` writes one: an `.npz` file of three arrays. A start is a token of a text, taken as the
last committed token before a block.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.plugin_config import FORCED_ENV
from dflash_sglang.settings.schema import PluginConfigError


class AcceptanceRecord(NamedTuple):
    """Starts lie in the order of their texts. Ranks say what any chain or tree of the draft's K likeliest tokens
    commits: it goes on as long as the true token is among its nodes."""

    # [starts, proposals, K] float16: of the K likeliest tokens at each place, likeliest first
    logprobs: np.ndarray
    ranks: np.ndarray  # [starts, proposals] uint8: which of them the target commits there; K: none of them
    prompts: np.ndarray  # [starts] uint8: the prompt whose text it is

    @classmethod
    def load(cls, path: Path, block_size: int = 0) -> AcceptanceRecord:
        """Read a file with proposals for blocks of so many tokens, at least.

        Raises PluginConfigError for a file that is no such record, with what is wrong.
        """
        record = cls(*_arrays(path, cls._fields, "python -m bench.record"))
        shape = record.ranks.shape
        recorded, dtypes = shape[-1] if shape else 0, (record.logprobs.dtype, record.ranks.dtype)
        for wrong, expected, found in (
            (len(shape) != 2 or 0 in shape, "ranks of shape [starts, proposals], one start or more", shape),
            (record.logprobs.shape[:-1] != shape, f"logprobs of shape {[*shape, 'K']}", record.logprobs.shape),
            (record.prompts.shape != shape[:1], f"prompts of shape {[*shape[:1]]}", record.prompts.shape),
            (
                [dtype.kind for dtype in dtypes] != ["f", "u"],
                "logprobs in floating point and ranks as unsigned integers",
                " and ".join(map(str, dtypes)),
            ),
            (
                recorded < block_size - 1,
                f"at least {block_size - 1} proposals, for a block of {block_size}",
                recorded,
            ),
        ):
            if wrong:
                raise _refused(path, expected, found, "python -m bench.record")
        return record

    @property
    def accepted(self) -> np.ndarray:
        """[starts] int64: proposals that come true of a whole block at each start."""
        return (self.ranks == 0).cumprod(axis=1, dtype=np.int64).sum(axis=1)


def tokens_of_texts(path: Path, record: AcceptanceRecord) -> np.ndarray:
    """Read what a file of texts has beside the arrays of its record: tokens [starts], the token of each start.

    Raises PluginConfigError for a file without it, or whose texts are not numbered 0, 1, ... in this order.
    """
    writer, starts = "python -m bench.copies", len(record.prompts)
    [tokens] = _arrays(path, ("tokens",), writer)
    if tokens.shape != (starts,) or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} of shape {tokens.shape}"
        raise _refused(path, f"tokens as integers of shape ({starts},)", found, writer)
    if record.prompts[0] != 0 or not np.isin(np.diff(record.prompts.astype(int)), (0, 1)).all():
        raise _refused(path, "prompts 0, 1, ... in this order", record.prompts, writer)
    return tokens


def _arrays(path: Path, names: tuple[str, ...], writer: str) -> list[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _refused(path, f"an .npz file of {', '.join(names)}", error, writer) from error


def _refused(path: Path, expected: str, found: object, writer: str) -> PluginConfigError:
    return PluginConfigError(
        f"{FORCED_ENV}={str(path)!r}: expected {expected}, found {found}. Write it with `{writer}`."
    )
