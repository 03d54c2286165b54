"""How many proposals a width will have accepted: estimated per request, position and width.

The chance that the proposal at position k is rejected, once those before it were accepted, is taken as
`level[request] * factor[width] * hazard[k]`. This is a model of proportional hazards with Breslow's estimate of
the hazard (Breslow 1972); level and factor have gamma priors of mean one. The level says how hard a request is, at
whatever width it was served. Positions beyond the width that is served keep what was last known of them.

A verify of width w that accepted all w - 1 proposals says nothing about later positions. A position counts as
tried only if all before it were accepted and it lies inside of the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN

# Chosen in the simulation (docs/results/width-simulated.md).
PRIOR_ACCEPTANCE = 0.8  # of a proposal, before anything was verified
LEVEL_PRIOR = 2.0  # rejections by which a new request counts as an average one
LEVEL_MEMORY = 64  # verify steps of a request after which its history weighs 1/e
POSITION_PRIOR = 8.0  # trials that a position's likeness to the one before it is worth
POSITION_MEMORY = 256.0  # trials that a position remembers,
STEPS_REMEMBERED = 8.0  # or those of so many steps of the whole batch, if these are more
WIDTH_PRIOR = 1024.0  # rejections that a width's likeness to the others is worth
WIDTH_MEMORY = 8192.0  # rejections that a width remembers: its factor is the draft's, whatever the traffic
NODES = 49  # levels at which the tokens of a step are tabulated, 1 in the middle; a request counts at the nearest
TABULATE_AT_FIRST, TABULATE_EVERY = 16, 4  # observed steps: a table costs half of an observation


class Work(NamedTuple):
    """Tokens that arrive while one step runs, and what a step commits of one of their requests."""

    committed: np.ndarray  # [widths, nodes]
    tokens: np.ndarray  # [nodes] of all requests at a node


def steps_needed(work: Sequence[Work]) -> np.ndarray:
    """[widths] steps of one request that commit the work, with full blocks of each width."""
    return sum((1.0 / of.committed) @ of.tokens for of in work)


def ragged_steps_needed(work: Sequence[Work], width: int, shares: np.ndarray) -> np.ndarray:
    """[n] steps of one request that commit the work, at `width` (an index) with these shares [n] of what comes
    true verified."""
    return sum((1.0 / (1.0 + (of.committed[width] - 1.0) * shares[:, None])) @ of.tokens for of in work)


class Acceptance:
    """Estimates from verified results, with a state per slot that a new request resets (`admit`)."""

    def __init__(self, widths: Sequence[int], slots: int):
        """`widths` ascending; live requests have slots in [0, `slots`)."""
        self.widths = list(widths)
        self.block = self.widths[-1]
        self._rejected, self._expected = np.zeros(slots), np.zeros(slots)
        self._node = np.full(slots, NODES // 2, np.intp)  # of the level
        self._cap = np.full(slots, self.block, np.int64)
        self._floor = np.full(slots, PLAIN, np.int64)
        self._since = np.zeros(slots, np.int64)
        self._admitted = self._observed = 0

        positions = self.block - 1
        self._trials, self._rejections = np.zeros(positions), np.zeros(positions)
        self.hazard = np.full(positions, 1.0 - PRIOR_ACCEPTANCE)  # of a request of level one at an average width
        self._width_rejected, self._width_expected = np.zeros(len(widths)), np.zeros(len(widths))
        self.factor = np.ones(len(widths))

        place = (np.arange(NODES) + 0.5) / NODES  # level / (1 + level)
        self._node_level = place / (1.0 - place)
        self._inside = np.arange(positions)[:, None] < np.array(self.widths) - 1  # [position, width]
        # [position, width, node] chance that the proposals up to a position are accepted, 0 outside of the width;
        # [width, node], with the token that follows them, the tokens of a step.
        self._survival = np.zeros((positions, len(widths), NODES))
        self._committed = np.zeros((len(widths), NODES))
        self._exposure = np.zeros((self.block, len(widths)))
        self._tabulate()

    def level(self, slot: int) -> float:
        """How hard a request is: 1 is average, less is easier."""
        return float((self._rejected[slot] + LEVEL_PRIOR) / (self._expected[slot] + LEVEL_PRIOR))

    def most(self, slots: np.ndarray) -> np.ndarray:
        """[n] tokens that a step may commit of each of these requests: their `max_width`, or the block."""
        return self._cap.take(slots)

    def cap(self, slots: np.ndarray) -> int:
        """The largest `max_width` of these requests; 1 without requests."""
        return int(self._cap.take(slots).max(initial=PLAIN))

    def floor(self, slots: np.ndarray) -> int:
        """The largest `min_width` of these requests."""
        return int(self._floor.take(slots).max(initial=PLAIN))

    def admit(
        self,
        slots: np.ndarray,
        step: int,
        max_widths: Sequence[int] | None = None,
        min_widths: Sequence[int] | None = None,
    ) -> None:
        """New requests take these slots; results of steps before `step` belong to others."""
        self._rejected[slots] = self._expected[slots] = 0.0
        self._node[slots] = NODES // 2
        self._since[slots] = self._admitted = step
        self._cap[slots] = self.block if max_widths is None else np.minimum(max_widths, self.block)
        self._floor[slots] = PLAIN if min_widths is None else np.minimum(min_widths, self.block)

    # ---- What a step will commit -------------------------------------------------------------------------

    def work(self, slots: np.ndarray, held: int, share: float = 1.0) -> list[Work]:
        """What arrives at a server that serves these requests [n] at `widths[held]`, with this share of what comes
        true verified; one `Work` for each `max_width` among them.

        The batch of a held width holds easy requests less often than they arrive, because they end sooner: by as
        much as a step commits more of them. So every request counts by what is committed of it.
        """
        caps, nodes = self._cap.take(slots), self._node.take(slots)
        if caps.min(initial=self.block) == self.block:
            groups = [(self._committed, nodes)]
        else:
            groups = [
                (self._survival[: cap - 1].sum(axis=0, initial=1.0), nodes[caps == cap])
                for cap in np.unique(caps).tolist()
            ]
        return [
            Work(committed, np.bincount(of, minlength=NODES) * (1.0 + (committed[held] - 1.0) * share))
            for committed, of in groups
        ]

    # ---- What a step has committed -----------------------------------------------------------------------

    def observe(
        self, step: int, slots: np.ndarray, width: int, accepted: np.ndarray, lens: np.ndarray | None = None
    ) -> None:
        """A step came back: `accepted` [n] proposals of the requests in `slots` [n] at `widths[width]`.

        lens [n]: how many tokens of each were verified; None: the whole width."""
        if step < self._admitted:
            live = self._since.take(slots) <= step
            slots, accepted = slots[live], accepted[live]
            lens = None if lens is None else lens[live]
        positions = self.widths[width] - 1
        if positions == 0 or not len(slots):
            return
        allowed = np.minimum(self._cap.take(slots) - 1, positions if lens is None else lens - 1)
        failed = accepted < allowed
        tried = np.minimum(accepted + 1, allowed)
        rejected, expected = self._rejected.take(slots), self._expected.take(slots)
        level = (rejected + LEVEL_PRIOR) / (expected + LEVEL_PRIOR)
        # [positions] the levels that tried one, and the rejections at it
        at_risk = np.bincount(tried, level, positions + 1)[:0:-1].cumsum()[::-1]
        rejections = np.bincount(tried * failed, minlength=positions + 1)[1:]
        exposure = self._exposure[:, width].take(tried)

        self._learn_positions(at_risk * self.factor[width], rejections)
        self._learn_width(width, float(at_risk @ self.hazard[:positions]), float(rejections.sum()))
        self._observed += 1
        if self._observed <= TABULATE_AT_FIRST or self._observed % TABULATE_EVERY == 0:
            self._tabulate()

        keep = 1.0 - 1.0 / LEVEL_MEMORY
        self._rejected[slots] = rejected = rejected * keep + failed
        self._expected[slots] = expected = expected * keep + exposure
        place = (rejected + LEVEL_PRIOR) / (rejected + expected + 2.0 * LEVEL_PRIOR)
        self._node[slots] = (place * NODES).astype(np.intp)

    def _learn_positions(self, trials: np.ndarray, rejections: np.ndarray) -> None:
        """trials, rejections [positions of the width]"""
        n = len(trials)
        self._trials[:n] += trials
        self._rejections[:n] += rejections
        most = np.maximum(POSITION_MEMORY, STEPS_REMEMBERED * trials)
        over = most / np.maximum(self._trials[:n], most)
        self._trials[:n] *= over
        self._rejections[:n] *= over
        before, hazard = 1.0 - PRIOR_ACCEPTANCE, []
        for rejected, tried in zip(self._rejections.tolist(), self._trials.tolist(), strict=True):
            before = min((rejected + POSITION_PRIOR * before) / (tried + POSITION_PRIOR), 1.0)
            hazard.append(before)
        self.hazard[:] = hazard

    def _learn_width(self, width: int, expected: float, rejections: float) -> None:
        self._width_expected[width] += expected
        self._width_rejected[width] += rejections
        most = max(WIDTH_MEMORY, STEPS_REMEMBERED * expected)
        over = most / max(float(self._width_expected[width]), most)
        self._width_expected[width] *= over
        self._width_rejected[width] *= over
        self.factor[width] = (self._width_rejected[width] + WIDTH_PRIOR) / (
            self._width_expected[width] + WIDTH_PRIOR
        )

    def _tabulate(self) -> None:
        """The tokens of a step of every width at every node, and what a request of level one is exposed to."""
        hazard = np.minimum(np.multiply.outer(self.hazard, self.factor), 1.0)
        np.cumsum(hazard, axis=0, out=self._exposure[1:])
        survival = self._survival
        np.multiply(hazard[:, :, None], self._node_level, out=survival)
        np.subtract(self._inside[:, :, None], survival, out=survival)
        np.maximum(survival, 0.0, out=survival)
        for position in range(1, len(survival)):  # several times faster than multiply.accumulate
            np.multiply(survival[position - 1], survival[position], out=survival[position])
        np.add.reduce(survival, axis=0, out=self._committed, initial=1.0)
