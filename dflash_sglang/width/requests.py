"""What is known of each request: what it allows, how many of its proposals come true, what its copies give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.verify.rows import Shape

# Chosen in the simulation (docs/results/width-simulated.md).
PRIOR_ACCEPTANCE = 0.8  # of a proposal, before anything was drafted
USUAL = 16.0  # requests that this is worth
NEW = 2.0  # steps by which a new request counts as an average one
# Steps of a request after which what was drafted of it weighs 1/e; of the whole batch, for the average.
KEPT = 32.0
WEIGHED = 256  # requests of a batch that are weighed one by one; of more, every second, third, ...
# Chosen on the texts of bench/copies.py: smaller prices gain on edits, and cost ordinary text.
# Of the tokens of a step, that more rows have to give; by themselves 64 take 1.07 of the time of 16.
CHAIN_PRICE = 0.1
CHAINS_KEPT = 0.9  # of what is known of a request, from one of its steps to the next
CHAINS_KEPT_OF_ALL = 0.99  # of what is known of all, which new requests begin with


class Requests:
    """A state per slot, which a new request resets (`admit`)."""

    def __init__(self, block: int, slots: int, longest: int | None = None):
        """block: width of the widest blocks. longest: rows of the longest chain, by default a block's. Live
        requests have slots in [0, `slots`)."""
        self.block, self.longest = block, longest or block
        self._usual, self._averaged = PRIOR_ACCEPTANCE ** np.arange(1.0, block), USUAL
        # [slots, positions] mean chance that a proposal is accepted, with all before it
        self._chance = np.tile(self._usual, (slots, 1))
        self._seen = np.zeros(slots)
        self._most = np.full(slots, self.longest, np.int64)
        self._floor = np.full(slots, PLAIN, np.int64)
        self._since = np.zeros(slots, np.int64)

    def admit(
        self,
        slots: np.ndarray,
        step: int,
        max_widths: Sequence[int] | None = None,
        min_widths: Sequence[int] | None = None,
    ) -> None:
        """New requests take these slots; results of steps before `step` belong to others."""
        self._most[slots] = self.longest if max_widths is None else np.minimum(max_widths, self.longest)
        self._floor[slots] = PLAIN if min_widths is None else np.minimum(min_widths, self.block)
        self._seen[slots] = 0.0
        self._chance[slots] = self._usual * (np.arange(1, self.block) < self._most[slots, None])
        self._since[slots] = step

    def most(self, slots: np.ndarray) -> np.ndarray:
        """[n] tokens that a step may commit of each of these requests: their `max_width`, or the longest
        chain's."""
        return self._most.take(slots)

    def cap(self, slots: np.ndarray) -> int:
        """The largest `max_width` of these requests, up to a block; 1 without requests."""
        return min(int(self.most(slots).max(initial=PLAIN)), self.block)

    def floor(self, slots: np.ndarray) -> int:
        """The largest `min_width` of these requests."""
        return int(self._floor.take(slots).max(initial=PLAIN))

    def are_in(self, slots: np.ndarray, step: int) -> np.ndarray:
        """[n] whether the requests that have these slots now are those that step had."""
        return self._since.take(slots) <= step

    def observe(self, slots: np.ndarray, chances: np.ndarray) -> None:
        """chances [k, n, steps]: of the proposals drafted in k steps of these requests, each with all before it;
        one or more.

        Positions beyond those that were drafted keep their chance given the ones before."""
        k, chances = len(chances), chances.mean(axis=0)
        seen = np.minimum(self._seen.take(slots) + k, KEPT)
        self._seen[slots] = seen
        self._chance[slots] = _moved(self._chance[slots], chances, (k / (seen + NEW))[:, None])
        free = self.most(slots) >= self.block
        if n := int(free.sum()):
            self._averaged = min(self._averaged + k * n, KEPT * n)
            self._usual = _moved(self._usual[None], chances[free].sum(axis=0) / n, k * n / self._averaged)[0]

    def steps_needed(
        self, slots: np.ndarray, held: tuple[int, float], widths: np.ndarray, shares: np.ndarray
    ) -> np.ndarray:
        """[m] steps of one request that commit what arrives while one step of these requests [n] runs, if each
        accepts `shares` [m] times the proposals that a chain of `widths` [m] rows does. held: width and share of
        the steps that the server has.

        The batch of a held shape holds easy requests less often than they arrive, because they end sooner: by as
        much as a step commits more of them. So every request counts by what is committed of it."""
        some = slots[:: -(-len(slots) // WEIGHED) or 1]
        accepted = np.zeros((len(some), self.block))
        np.cumsum(self._chance[some], axis=1, out=accepted[:, 1:])
        width, share = held
        tokens = (1.0 + accepted[:, width - 1] * share) * (len(slots) / max(len(some), 1))
        return tokens @ (1.0 / (1.0 + accepted[:, widths - 1] * shares))


def _moved(table: np.ndarray, towards: np.ndarray, by: np.ndarray | float) -> np.ndarray:
    """table [n, positions], moved by a part of the way towards [n or none, steps]."""
    out, steps = table.copy(), towards.shape[-1]
    out[:, :steps] += (towards - table[:, :steps]) * by
    if steps < table.shape[1]:
        before = table[:, steps - 1 : steps]
        out[:, steps:] *= out[:, steps - 1 : steps] / np.maximum(before, 1e-9)
    return out


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
        return bool(beyond > CHAIN_PRICE * within)

    def observe(self, slots: np.ndarray, shape: Shape, accepted: np.ndarray, promised: np.ndarray) -> None:
        """Steps of this shape came back, k of n requests, of which so many proposals [k, n] were accepted.
        promised [k, n]: see `Proposals`."""
        beyond = np.maximum(accepted + 1.0 - self._block, 0.0)
        if shape.chain is None and promised.any():
            further = promised[..., None] ** np.arange(1, self.longest - self._block + 1)
            beyond = np.where(accepted == shape.width - 1, further.sum(axis=-1), 0.0)
        seen = np.stack([np.minimum(accepted + 1, self._block), beyond], axis=-1)  # [k, n, 2]
        weights = (1 - CHAINS_KEPT) * CHAINS_KEPT ** np.arange(len(seen))[::-1]
        self._tokens[slots] *= CHAINS_KEPT ** len(seen)
        self._tokens[slots] += np.tensordot(weights, seen, 1)
        self._usual += (1 - CHAINS_KEPT_OF_ALL**accepted.size) * (seen.mean(axis=(0, 1)) - self._usual)
