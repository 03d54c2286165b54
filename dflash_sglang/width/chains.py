"""Whether the next step pays for more rows than a block: where copies of its requests' text came true lately."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_sglang.verify.rows import Shape

# Chosen on the texts of bench/copies.py: smaller prices gain on edits, and cost ordinary text.
PRICE = 0.1  # of the tokens of a step, that more rows have to give; by themselves 64 take 1.07 of the time of 16
KEPT = 0.9  # of what is known of a request, from one of its steps to the next
KEPT_OF_ALL = 0.99  # of what is known of all, which new requests begin with


class Chains:
    """What long chains commit beyond the block, by request: a fading mean over its steps.

    A step of long chains tells it. A step of blocks tells it where the copy came true to the end of a block: a
    chain would have gone on as far as the copy promised.
    """

    def __init__(self, block: int, slots: int, chains: Mapping[int, int]) -> None:
        """chains: {rows: most requests of a step}, if any, beyond the block. slots: as `Requests` has them."""
        self._block, self.longest = block, max([block, *chains])
        self.most_requests = max(chains.values(), default=0)  # of a step
        # Tokens of a step within the block and beyond it: of each request, and of all.
        self._tokens, self._usual = np.tile([1.0, 0.0], (slots, 1)), np.array([1.0, 0.0])

    def __bool__(self) -> bool:
        return self.longest > self._block

    def admit(self, slots: np.ndarray) -> None:
        """New requests take these slots [n]."""
        self._tokens[slots] = self._usual

    def pay(self, slots: np.ndarray) -> bool:
        """Whether the next step of these requests [n] should verify long chains."""
        within, beyond = self._tokens[slots].sum(axis=0)
        return bool(beyond > PRICE * within)

    def observe(self, slots: np.ndarray, shape: Shape, accepted: np.ndarray, promised: np.ndarray) -> None:
        """A step of this shape came back, with requests [n] of which so many proposals were accepted. promised
        [n]: see `Proposals`."""
        beyond = np.maximum(accepted + 1.0 - self._block, 0.0)
        if shape.chain is None and promised.any():
            further = promised[:, None] ** np.arange(1, self.longest - self._block + 1)
            beyond = np.where(accepted == shape.width - 1, further.sum(axis=1), 0.0)
        seen = np.stack([np.minimum(accepted + 1, self._block), beyond], axis=1)
        self._tokens[slots] += (1 - KEPT) * (seen - self._tokens[slots])
        for of_request in seen:
            self._usual += (1 - KEPT_OF_ALL) * (of_request - self._usual)
