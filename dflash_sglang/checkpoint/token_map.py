"""The tokens that a draft's head is cut down to (--speculative-token-map): the file, read, checked and made."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from dflash_sglang.checkpoint.fields import described

FLAG = "--speculative-token-map"
STRETCH = 1 << 16  # characters that are tokenized in one piece, if nothing stops the cut after them
STRETCHES_AT_A_TIME = 16


class TokenMapError(ValueError):
    """A token map that no head can be cut down to.

    Attributes: ``expected`` and ``fix`` (what to change), both shown in the message, which names the file.
    """

    def __init__(self, path: str, expected: str) -> None:
        self.expected, self.fix = expected, "Make one with `dflash-sglang hot-vocab`."
        super().__init__(f"{FLAG}={path!r}: expected {expected}. {self.fix}")


class TooFewTokens(ValueError):
    """A text without as many different tokens as a map shall have."""


def read_token_map(path: str) -> Tensor:
    """Token ids of a file that `torch.save` wrote a list or a tensor of them to, as SGLang reads it for EAGLE.

    Returns them ascending, [n] int64. Raises TokenMapError for a file that is missing, something else, or has a
    token twice.
    """
    if not Path(path).is_file():
        raise TokenMapError(path, "an existing file")
    try:
        ids = torch.as_tensor(torch.load(path, weights_only=True))
    except Exception as error:  # a file of another kind fails anywhere in the unpickler
        raise TokenMapError(path, f"a list of token ids, saved by torch.save ({described(error)})") from error
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TokenMapError(path, f"integers in one dimension, found {ids.dtype} of shape {list(ids.shape)}")
    ascending = ids.long().sort().values
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(twice):
        raise TokenMapError(path, f"every token once, found {int(twice[0])} twice")
    return ascending


def stretches(text: TextIO) -> Iterator[str]:
    """All of a text, in pieces of about STRETCH characters and never more than twice as many.

    Tokens span line breaks and the blanks beside them, so a piece ends where a line without blanks at its end
    meets a letter or a digit, which tokenizers cut apart, too. Without such a place in as many characters again it
    ends anywhere.
    """
    piece: list[str] = []
    size = 0
    while line := text.readline(STRETCH):
        apart = piece and re.search(r"\S\n\Z", piece[-1]) and line[0].isalnum()
        if size + len(line) > (STRETCH if apart else 2 * STRETCH):
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield "".join(piece)


def most_frequent(tokenizer: Any, pieces: Iterable[str], count: int) -> tuple[list[int], float]:
    """The `count` most frequent tokens of a text, special tokens before all others, and the share of the text's
    tokens that they are. Raises TooFewTokens."""
    counts: Counter[int] = Counter()
    remaining = iter(pieces)
    while batch := list(itertools.islice(remaining, STRETCHES_AT_A_TIME)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            counts.update(ids)
    special = sorted(set(tokenizer.all_special_ids))
    common = [token for token, _ in counts.most_common() if token not in special]
    if len(special) + len(common) < count:
        raise TooFewTokens(
            f"--size {count}: expected at most {len(special) + len(common)}, the different tokens of this text "
            "and the special ones. Give more text, or a smaller size."
        )
    chosen = [*special, *common][:count]
    total = counts.total()
    return chosen, sum(counts[token] for token in chosen) / total if total else 0.0
