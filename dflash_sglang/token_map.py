"""The tokens that a draft's head is cut down to (--speculative-token-map): the file, read, checked and made."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLAG = "--speculative-token-map"
LINES_AT_A_TIME = 1000


class TokenMapError(ValueError):
    """A token map that no head can be cut down to; the message names the file."""


def read_token_map(path: str) -> Tensor:
    """Token ids of a file that `torch.save` wrote a list or a tensor of them to, as SGLang reads it for EAGLE.

    Returns them ascending, [n] int64. Raises TokenMapError for a file that is missing, something else, or has a
    token twice.
    """
    if not Path(path).is_file():
        raise TokenMapError(
            f"{FLAG}={path!r}: expected an existing file. Make one with `dflash-sglang hot-vocab`."
        )
    try:
        ids = torch.as_tensor(torch.load(path, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, EOFError) as error:
        raise TokenMapError(
            f"{FLAG}={path!r}: expected a list of token ids, saved by torch.save: {error}"
        ) from error
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        found = f"{ids.dtype} of shape {list(ids.shape)}"
        raise TokenMapError(f"{FLAG}={path!r}: expected integers in one dimension, found {found}.")
    ascending = ids.long().sort().values
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(twice):
        raise TokenMapError(f"{FLAG}={path!r}: expected every token once, found {int(twice[0])} twice.")
    return ascending


def most_frequent(tokenizer: Any, lines: Iterable[str], count: int) -> tuple[list[int], float]:
    """The `count` most frequent tokens of a text, special tokens before all others, and the share of the text's
    tokens that they are. Raises ValueError where the text has fewer tokens."""
    counts: Counter[int] = Counter()
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == LINES_AT_A_TIME:
            counts.update(_tokens(tokenizer, batch))
            batch = []
    if batch:
        counts.update(_tokens(tokenizer, batch))
    special = sorted(set(tokenizer.all_special_ids))
    common = [token for token, _ in counts.most_common() if token not in special]
    if len(special) + len(common) < count:
        raise ValueError(
            f"--size {count}: expected at most {len(special) + len(common)}, the different tokens of this text "
            "and the special ones. Give more text, or a smaller size."
        )
    chosen = [*special, *common][:count]
    total = counts.total()
    return chosen, sum(counts[token] for token in chosen) / total if total else 0.0


def _tokens(tokenizer: Any, lines: list[str]) -> Iterable[int]:
    for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]:
        yield from ids
