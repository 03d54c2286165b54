"""Texts that the target is said to write: measurements of copies without trained weights."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.sglang_names.scheduler import ScheduleBatch, async_h2d
from dflash_sglang.verify.record import OF_TEXTS, AcceptanceRecord, check_width, refused


class SimulatedTexts:
    """What the target commits is a text, what the draft proposes of it is recorded, copies match for real.

    The file is an `AcceptanceRecord` with one array more, `tokens` [starts] integers: the token of each start. The
    first token of a prompt is the number of its text, modulo their number; the prompt is the beginning of this
    text, and the answer its continuation. The first token of an answer is the target's own.
    """

    def __init__(self, path: Path, block_size: int, rows: int, device: str) -> None:
        """rows: of req_to_token, or more. Raises LoadError for another file, or for shorter blocks."""
        record = AcceptanceRecord.load(path, OF_TEXTS)
        check_width(record, block_size, path, OF_TEXTS)
        tokens = _tokens(path, len(record.prompts))
        numbers, firsts = np.unique(record.prompts, return_index=True)
        if numbers.tolist() != list(range(len(numbers))) or (np.diff(record.prompts.astype(int)) < 0).any():
            raise refused(path, "prompts 0, 1, ... in this order", record.prompts, OF_TEXTS)
        self._first_of_text, self._text_of_row = firsts, np.zeros(rows, np.int64)
        self._firsts = torch.zeros(rows, dtype=torch.int64, device=device)  # place where each row's text begins
        self._tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
        self._accepted = torch.from_numpy(record.accepted).to(device)
        likeliest = record.logprobs[:, : block_size - 1, 0]
        self._logprobs = torch.from_numpy(likeliest.astype(np.float32)).to(device)

    def foretell(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Write over tokens and logprobs what the recorded draft proposes: the text as far as it was accepted,
        then other tokens."""
        self._follow(batch)
        places = self._places(block.requests, block.prefix_lens)
        after = torch.arange(1, block.size, device=places.device)
        text = self._text(places[:, None] + after)
        right = after <= self._accepted[places][:, None]
        proposals.tokens[:, 1:] = torch.where(right, text, torch.where(text == 0, 1, text - 1))
        if proposals.logprobs is not None:
            proposals.logprobs.copy_(self._logprobs[places, : block.size - 1])
        return proposals

    def answers(self, rows: Tensor, prefix_lens: Tensor, requests: Tensor, ragged: Ragged | None) -> Tensor:
        """The token of the text after each row, int64 in the shape of rows (as `Acceptor.accept` has them)."""
        places = self._places(requests, prefix_lens)
        if ragged is None:
            return self._text(places[:, None] + 1 + torch.arange(rows.shape[1], device=rows.device))
        starts = ragged.starts[: len(ragged.lens)]
        row = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        request = torch.searchsorted(starts, row, right=True) - 1
        return self._text(places[request] + 1 + row - starts[request])

    def _follow(self, batch: ScheduleBatch) -> None:
        """Rows of req_to_token get the texts of their requests."""
        rows = batch.req_pool_indices_cpu.numpy()
        texts = np.array([req.origin_input_ids[0] for req in batch.reqs]) % len(self._first_of_text)
        other = self._text_of_row[rows] != texts
        if other.any():
            rows, texts = rows[other], texts[other]
            self._text_of_row[rows] = texts
            places = [rows.tolist(), self._first_of_text[texts].tolist()]
            on_device, firsts = async_h2d(places, dtype=torch.int64, device=self._firsts.device)
            self._firsts[on_device] = firsts

    def _places(self, requests: Tensor, prefix_lens: Tensor) -> Tensor:
        """[bs] of the last committed tokens."""
        return (self._firsts[requests.long()] + prefix_lens.long()) % len(self._tokens)

    def _text(self, places: Tensor) -> Tensor:
        return self._tokens[places % len(self._tokens)]


def _tokens(path: Path, starts: int) -> np.ndarray:
    """[starts] of the file. Raises LoadError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens = np.asarray(arrays["tokens"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise refused(path, "an array of tokens beside those of a record", error, OF_TEXTS) from error
    if tokens.shape != (starts,) or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} of shape {tokens.shape}"
        raise refused(path, f"tokens as integers of shape ({starts},)", found, OF_TEXTS)
    return tokens
