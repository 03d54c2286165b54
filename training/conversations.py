"""Conversations that a target held: what a draft is trained on, and what its accept length is counted over."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Conversations:
    """ids: [N], all tokens of all conversations in a row; lengths, prompts: [C], of each and of its prompt.

    The tokens after a prompt are the target's own greedy answer.
    """

    ids: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray

    @staticmethod
    def of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Conversations:
        """pairs: (ids of the prompt, ids of the answer)."""
        return Conversations(
            np.asarray([i for prompt, answer in pairs for i in (*prompt, *answer)], np.int32),
            np.asarray([len(prompt) + len(answer) for prompt, answer in pairs], np.int32),
            np.asarray([len(prompt) for prompt, _ in pairs], np.int32),
        )

    @property
    def starts(self) -> np.ndarray:
        """[C], where each begins in ``ids``."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def save(self, path: Path) -> None:
        """Writes an ``.npz``; ids as 16 bits where they fit."""
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = self.ids.astype(np.uint16) if self.ids.max(initial=0) < 2**16 else self.ids
        np.savez_compressed(path, ids=ids, lengths=self.lengths, prompts=self.prompts)

    @staticmethod
    def load(path: Path, option: str) -> Conversations:
        """Reads what `save` wrote. Raises SystemExit for another file, naming the command line's option."""
        try:
            with np.load(path, allow_pickle=False) as data:
                return Conversations(data["ids"].astype(np.int32), data["lengths"], data["prompts"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise SystemExit(
                f"{option} {path}: expected an .npz file of ids, lengths, prompts ({error}); write it with "
                "`python -m training.answers`"
            ) from error

    def pick(self, indices: np.ndarray) -> Conversations:
        """The conversations at ``indices``, in that order."""
        pieces = np.split(self.ids, np.cumsum(self.lengths)[:-1])
        return Conversations(
            np.concatenate([pieces[i] for i in indices]), self.lengths[indices], self.prompts[indices]
        )

    @staticmethod
    def joined(parts: Sequence[Conversations]) -> Conversations:
        """All conversations of `parts`, in their order."""
        return Conversations(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.prompts for part in parts]),
        )
