"""What copies give in a loop over the texts of bench.copies, by the package's own gate: `python -m
tests.support.copy_loop` prints the table of docs/guide/copies.md.

One request at a time; the draft accepts what `bench.copies --inside better` records; a step of 64 rows takes 1.07
times as long as one of 16. The host chooses one step late.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.copies import KINDS, Texts
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.kernels.block import find_copy as kernels
from dflash_sglang.startup.copying import CHAINS
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.requests import Chains

BLOCK, LONG = 16, 64
SECONDS = {BLOCK: 1.0, LONG: 1.07}
ANSWER = 512
SLOT = np.array([1])


class Request:
    """A request whose answer is a text, and its record of copies."""

    def __init__(self, text: Sequence[int], prompt: int, accepted: np.ndarray, said: np.ndarray) -> None:
        """accepted [tokens]: proposals of the draft that come true after each; said [tokens]: what a step commits
        there by the draft's own probabilities."""
        self._text, self.committed, self._accepted, self._said = text, prompt + 1, accepted, said
        self._seen: dict[tuple[int, ...], list[int]] = {}
        self._noted = kernels.LEAST - 1
        self._copies = [0.0, 0.0]

    def _note(self) -> None:
        """The places after what stood before the last token."""
        for after in range(self._noted + 1, self.committed):
            self._seen.setdefault(tuple(self._text[after - kernels.LEAST : after]), []).append(after)
        self._noted = max(self._noted, self.committed - 1)

    def _match(self) -> tuple[int, int]:
        """(length, place after it) of the longest; length 0 below the least that is copied."""
        self._note()
        text, end, best = self._text, self.committed, (0, 0)
        for after in self._seen.get(tuple(text[end - kernels.LEAST : end]), ()):
            length = kernels.LEAST
            while length < min(after, kernels.LONGEST) and text[after - 1 - length] == text[end - 1 - length]:
                length += 1
            best = max(best, (length, after))
        return best

    def step(self, rows: int, copies: bool) -> tuple[int, float]:
        """Commits. Returns how many proposals were accepted, and `Proposals.promised`."""
        text, end, (length, after) = self._text, self.committed, self._match()
        prior = next((chance for least, chance in reversed(kernels._CHANCES) if least <= length), 0.0)
        level = (self._copies[0] + kernels.FIRST_FAILED) / (self._copies[1] + kernels.FIRST_EXPECTED)
        right = 1 - min(1.0, level * prior)
        promised = sum(right**n for n in range(BLOCK))
        used = copies and length > 0 and promised >= kernels.GAIN * self._said[end - 1]
        true, most = 0, (rows if used else BLOCK) - 1
        while length and true < most and text[after + true % (end - after)] == text[end + true]:
            true += 1
        accepted = true if used else min(int(self._accepted[end - 1]), BLOCK - 1)
        told = min(true, accepted + 1)
        failed = told < min(most, accepted + 1)
        if length and told + failed:
            seen = failed, prior * (told + failed)
            self._copies = [kernels.FADE * of + new for of, new in zip(self._copies, seen, strict=True)]
        self.committed += accepted + 1
        return accepted, right if used else 0.0


def rates(copy: str, texts: Texts, draft: Sequence[np.ndarray], each: int) -> dict[str, float]:
    """Tokens a second of each kind, of so many texts; a step of a block takes a second. copy: off, block or 64;
    draft: `accepted` and `said` of `Request`, of all texts."""
    starts = np.cumsum([0, *map(len, texts.tokens)])
    out = {}
    for kind, prompts in texts.prompts.items():
        gate, tokens, seconds = Chains(BLOCK, 2, CHAINS), 0, 0.0
        for prompt in prompts[:each]:
            number = prompt[0]
            request = Request(texts.tokens[number], len(prompt), *(of[starts[number] :] for of in draft))
            gate.admit(SLOT)
            late: list[tuple[Shape, int, float]] = []
            while request.committed < len(prompt) + ANSWER:
                chain = LONG if copy == "64" and gate.pay(SLOT) else None
                late.append((Shape(BLOCK, chain=chain), *request.step(chain or BLOCK, copy != "off")))
                seconds += SECONDS[chain or BLOCK]
                if len(late) > 1:  # what the step before has shown
                    shape, accept, promised = late.pop(0)
                    gate.observe(SLOT, shape, np.array([accept]), np.array([promised]))
            tokens += request.committed - len(prompt) - 1
        out[kind] = tokens / seconds
    return out


def gains(each: int) -> dict[str, dict[str, float]]:
    """{copy: {kind: tokens a second over those without copies}}"""
    texts = Texts(KINDS, 1536, ANSWER + 2 * LONG, range(1000, 100_000))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "texts.npz"
        texts.write(path, "better")
        record = AcceptanceRecord.load(path)
    logprobs = record.logprobs[:, : BLOCK - 1, 0].astype(np.float64)
    draft = record.accepted, 1 + np.exp(logprobs.cumsum(axis=1)).sum(axis=1)
    without = rates("off", texts, draft, each)
    found = {copy: rates(copy, texts, draft, each) for copy in ("block", "64")}
    return {copy: {kind: of[kind] / without[kind] for kind in of} for copy, of in found.items()}


if __name__ == "__main__":
    for copy, of_kind in gains(32).items():
        print(f"| `{copy}` | {' | '.join(f'{gain:.2f}' for gain in of_kind.values())} |")
