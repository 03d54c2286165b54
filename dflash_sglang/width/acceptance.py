"""How many proposals a width will have accepted: estimated per request, width and position.

The chance that the proposal at position k of a request is rejected, given that those before it were accepted, is
taken as `level[request] * factor[width] * hazard[k]` (proportional hazards, with a gamma prior of mean one on the
first two factors; "Breslow" estimate of the third). One number per request then says how hard it is, at
whatever width it was seen, and positions beyond the width that is served keep what was last known of them.

A verify of width w that accepted all w - 1 proposals says nothing about later positions: a position counts as
tried only if all before it were accepted and it lies inside of the width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from dflash_sglang.settings.width import PLAIN

NODES = 24  # levels at which what a step commits is tabulated; between them they are interpolated
TABULATE_AT_FIRST, TABULATE_EVERY = 16, 4  # observed steps: the tables cost half of an observation
KNOWN = 0.5  # expected rejections after which a request counts as drafted for
AGE = 512  # steps without a trial after which what is known of a position weighs half, and of a width:
WIDTH_AGE = 16_384  # it is the draft's, whatever the traffic
LEAST_TRIALS = 256.0  # what a position remembers, or
STEPS_KEPT = 8.0  # steps of the whole batch, if those are more trials
POSITION_PRIOR = 8.0  # trials that a position's likeness to the one before it is worth
WIDTH_KEPT = 8192.0  # rejections that a width remembers, or so many steps, if those are more
WIDTH_PRIOR = 512.0  # rejections that a width's likeness to the others is worth


class Acceptance:
    """Estimates from verified results; state per slot, which a new request resets (`admit`)."""

    def __init__(
        self, widths: Sequence[int], slots: int, prior_acceptance: float, prior_strength: float, memory: int
    ):
        """`widths` ascending; `slots`: rows of live requests, [0, slots)."""
        self.widths = list(widths)
        self.block = self.widths[-1]
        self._prior = prior_strength
        self._keep = 1.0 - 1.0 / memory
        self._rejected = np.zeros(slots)
        self._expected = np.zeros(slots)
        self._place = np.full(slots, 0.5)  # level / (1 + level), in [0, 1)
        self._cap = np.full(slots, self.block, np.int64)
        self._floor = np.full(slots, PLAIN, np.int64)
        self._since = np.zeros(slots, np.int64)
        self._capped = self._floored = 0
        self._admitted, self._observed = 0, 0
        self.tabulated = 0  # how often `survival` was estimated anew

        positions = self.block - 1
        self._trials, self._rejections = [0.0] * positions, [0.0] * positions
        self._tried_at = [0] * positions
        self._first_hazard = 1.0 - prior_acceptance
        self._hazard = np.full(positions, self._first_hazard)
        self._width_rejected, self._width_expected = [0.0] * len(widths), [0.0] * len(widths)
        self._width_at = [0] * len(widths)
        self.factor = [1.0] * len(widths)

        place = np.arange(NODES) / (NODES - 1)
        place[-1] = 1.0 - 1e-9
        self._node_level = place / (1.0 - place)
        inside = np.arange(positions)[:, None, None] < np.array(self.widths)[:, None] - 1
        self._inside = inside.astype(np.float64)
        # [position, width, node] chance that the proposals up to a position are accepted, 0 outside of the width;
        # and [width, node], with the token that follows them, what a step commits.
        self.survival = np.zeros((positions, len(widths), NODES))
        self._chain = list(pairwise(self.survival))
        self._committed = np.zeros((len(widths), NODES))
        self._exposure = np.zeros((self.block, len(widths)))
        self._tabulate()

    @property
    def hazard(self) -> np.ndarray:
        """[block - 1] chance of a rejection at each position, of a request of level one at an average width."""
        return self._hazard

    def level(self, slot: int) -> float:
        """How hard a request is: 1 is average, less is easier."""
        return float((self._rejected[slot] + self._prior) / (self._expected[slot] + self._prior))

    def cap(self, slots: np.ndarray) -> int:
        """The largest width that any of these requests allows."""
        return int(self._cap[slots].max()) if self._capped and len(slots) else self.block

    def floor(self, slots: np.ndarray) -> int:
        """The width that every one of these requests is to have at least."""
        return int(self._floor[slots].max()) if self._floored and len(slots) else PLAIN

    def unknown(self, slots: np.ndarray) -> float:
        """How many of these requests were drafted for too little to tell them from others."""
        return float(np.count_nonzero(self._expected.take(slots) < KNOWN))

    def admit(
        self,
        slots: np.ndarray,
        step: int,
        max_widths: Sequence[int] | None = None,
        min_widths: Sequence[int] | None = None,
    ) -> None:
        """New requests take these slots; results of steps before `step` belong to others."""
        self._rejected[slots] = 0.0
        self._expected[slots] = 0.0
        self._place[slots] = 0.5
        self._since[slots] = self._admitted = step
        self._capped -= int((self._cap[slots] < self.block).sum())
        self._cap[slots] = self.block if max_widths is None else np.minimum(max_widths, self.block)
        self._capped += int((self._cap[slots] < self.block).sum())
        self._floored -= int((self._floor[slots] > PLAIN).sum())
        self._floor[slots] = PLAIN if min_widths is None else np.minimum(min_widths, self.block)
        self._floored += int((self._floor[slots] > PLAIN).sum())

    def steps_needed(self, slots: np.ndarray, held: int) -> list[float]:
        """Steps of one request, of each width, that commit what a step at `widths[held]` commits of these [n].

        The batch of a held width holds easy requests less often than they arrive, because they end sooner: by as
        much as such a step commits more of them. So this counts every request by what is committed of it.
        """
        if self._capped:
            caps = self._cap[slots]
            if caps.min(initial=self.block) < self.block:
                return self._steps_needed_capped(slots, caps, held)
        return (self._committed[held] / self._committed @ self._histogram(slots)).tolist()

    def steps_needed_by_a_new_request(self) -> list[float]:
        """Steps of a request of which nothing is known, of each width, for one token."""
        return (1.0 / self._committed[:, NODES // 2 - 1 : NODES // 2 + 1]).mean(axis=1).tolist()

    def _steps_needed_capped(self, slots: np.ndarray, caps: np.ndarray, held: int) -> list[float]:
        total = np.zeros(len(self.widths))
        for cap in np.unique(caps).tolist():
            committed = self.committed(cap)
            total += committed[held] / committed @ self._histogram(slots[caps == cap])
        return total.tolist()

    def committed(self, cap: int) -> np.ndarray:
        """[widths, nodes] tokens of a step of requests that allow blocks of `cap` tokens."""
        if cap == self.block:
            return self._committed
        return self.survival[: cap - 1].sum(axis=0, initial=1.0)

    def levels(self, slots: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Requests [nodes] at each node among these slots [n], for each of the widest blocks that they allow."""
        for cap, among in self.caps(slots):
            yield cap, self._histogram(slots[among])

    def caps(self, slots: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray]]:
        """Each of the widest blocks that these requests [n] allow, and which of them do."""
        if not self._capped:
            yield self.block, slice(None)
            return
        caps = self._cap.take(slots)
        for cap in np.unique(caps).tolist():
            yield cap, caps == cap

    def between_nodes(self, slots: np.ndarray, values: np.ndarray) -> np.ndarray:
        """values [nodes] -> [n] at the levels of these requests."""
        place = self._place.take(slots)
        place *= NODES - 1
        node = place.astype(np.intp)
        place -= node
        below = values.take(node)
        node += 1
        place *= values.take(node) - below
        place += below
        return place

    def _histogram(self, slots: np.ndarray) -> np.ndarray:
        """[nodes] requests at each node, shared between the two nodes that a level lies between."""
        place = self._place.take(slots)
        place *= NODES - 1
        node = place.astype(np.intp)
        place -= node
        upper = np.bincount(node, place, NODES)
        histogram = np.bincount(node, minlength=NODES) - upper
        histogram[1:] += upper[:-1]
        return histogram

    def observe(
        self, step: int, slots: np.ndarray, width: int, accepted: np.ndarray, lens: np.ndarray | None = None
    ) -> None:
        """A verified step: `accepted` [n] proposals of the requests in `slots` [n] at `widths[width]`, of which
        `lens` [n] tokens were verified, or all."""
        if step < self._admitted:
            live = self._since.take(slots) <= step
            slots, accepted = slots[live], accepted[live]
            lens = None if lens is None else lens[live]
        positions = self.widths[width] - 1
        if positions == 0 or not len(slots):
            return
        open_positions: np.ndarray | int = positions if lens is None else lens - 1
        if self._capped:
            open_positions = np.minimum(self._cap.take(slots) - 1, open_positions)
        failed = accepted < open_positions
        tried = np.minimum(accepted + 1, open_positions)
        rejected, expected = self._rejected.take(slots), self._expected.take(slots)
        level = (rejected + self._prior) / (expected + self._prior)
        at_risk = np.bincount(tried, level, positions + 1)[:0:-1].cumsum()[::-1]
        rejections = np.bincount(tried * failed, minlength=positions + 1)[1:]
        exposure = self._exposure[:, width].take(tried)

        self._update_positions(step, self.factor[width], at_risk.tolist(), rejections.tolist())
        self._update_width(step, width, at_risk, rejections)
        self._observed += 1
        if self._observed <= TABULATE_AT_FIRST or self._observed % TABULATE_EVERY == 0:
            self._tabulate()

        rejected *= self._keep
        rejected += failed
        expected *= self._keep
        expected += exposure
        self._rejected[slots] = rejected
        self._expected[slots] = expected
        rejected += self._prior
        expected += self._prior
        expected += rejected
        self._place[slots] = rejected / expected

    def _update_width(self, step: int, width: int, at_risk: np.ndarray, rejections: np.ndarray) -> None:
        expected = float(at_risk @ self._hazard[: len(at_risk)])
        keep = WIDTH_AGE / (WIDTH_AGE + step - self._width_at[width])
        self._width_at[width] = step
        total = self._width_expected[width] * keep + expected
        over = min(1.0, max(WIDTH_KEPT, STEPS_KEPT * expected) / max(total, 1e-9))
        self._width_rejected[width] = (self._width_rejected[width] * keep + float(rejections.sum())) * over
        self._width_expected[width] = total * over
        self.factor[width] = (self._width_rejected[width] + WIDTH_PRIOR) / (total * over + WIDTH_PRIOR)

    def _update_positions(self, step: int, factor: float, at_risk: list[float], rejections: list[int]) -> None:
        before = self._first_hazard
        hazard = self._hazard.tolist()
        trials, rejected, tried_at = self._trials, self._rejections, self._tried_at
        for position in range(self.block - 1):
            if position < len(at_risk) and at_risk[position] > 0:
                now = at_risk[position] * factor
                keep = AGE / (AGE + step - tried_at[position])
                tried_at[position] = step
                total = trials[position] * keep + now
                over = min(1.0, max(LEAST_TRIALS, STEPS_KEPT * now) / total)
                trials[position] = total * over
                rejected[position] = (rejected[position] * keep + rejections[position]) * over
            estimate = (rejected[position] + POSITION_PRIOR * before) / (trials[position] + POSITION_PRIOR)
            hazard[position] = before = min(estimate, 1.0)
        self._hazard[:] = hazard

    def _tabulate(self) -> None:
        """Committed tokens of every width at every node, and what a request of level one is exposed to."""
        self.tabulated += 1
        hazard = np.multiply.outer(self._hazard, self.factor)
        np.minimum(hazard, 1.0, out=hazard)
        np.cumsum(hazard, axis=0, out=self._exposure[1:])
        survival = self.survival
        np.multiply(hazard[:, :, None], self._node_level, out=survival)
        np.minimum(survival, 1.0, out=survival)
        np.subtract(self._inside, survival, out=survival)
        np.maximum(survival, 0.0, out=survival)
        for before, row in self._chain:  # several times faster than multiply.accumulate
            np.multiply(before, row, out=row)
        np.add.reduce(survival, axis=0, out=self._committed, initial=1.0)
