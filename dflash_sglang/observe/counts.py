"""Counters of decode steps, kept from what reaches the host anyway."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN

if TYPE_CHECKING:
    from dflash_sglang.width.decider import Decision

PLAIN_STEP, RAGGED_STEP, WHOLE_STEP = "plain", "ragged", "whole"
CHOSEN = "chosen"  # by the width policy


class Shape(NamedTuple):
    """The rows that a step verifies: of one width, in one of three forms, for a reason."""

    width: int
    form: str  # PLAIN_STEP: the last token only; RAGGED_STEP: a part of each block; WHOLE_STEP: the width of each
    reason: str


class Totals(NamedTuple):
    """What steps did so far, or between two moments (`since`).

    `verified` and `accepted` are for each position of a block: in how many request-steps the proposal there was
    among the verified rows, and in how many it was accepted, with all before it.
    """

    steps: int
    requests: int  # request-steps
    drafted: int  # proposals
    rows: int  # verified, first rows included
    verified: np.ndarray  # [block - 1] int64
    accepted: np.ndarray  # [block - 1] int64

    @property
    def committed(self) -> int:
        """Accepted proposals, and one token more of each request-step."""
        return self.requests + int(self.accepted.sum())

    @property
    def accept_length(self) -> float:
        """Committed tokens of a request-step; 0 without one."""
        return self.committed / self.requests if self.requests else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted over verified proposals; 0 without one."""
        verified = int(self.verified.sum())
        return int(self.accepted.sum()) / verified if verified else 0.0

    def since(self, before: Totals) -> Totals:
        """What came after `before`."""
        return Totals(*map(operator.sub, self, before))

    def plus(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(*map(operator.add, self, other))


class Counts:
    """Adds up steps. A step costs two histograms of its requests; positions are added up in `totals`."""

    def __init__(self, block: int, *, ragged: bool, chooses: bool) -> None:
        """block: width of the widest blocks. ragged: steps may verify a part of each block. chooses: the width
        policy has more than one width."""
        self._block, self._ragged, self._chooses = block, ragged, chooses
        self._steps = self._requests = self._drafted = self._rows = 0
        # [block] request-steps with so many proposals verified, or accepted
        self._verified, self._accepted = np.zeros(block, np.int64), np.zeros(block, np.int64)
        self.shapes: defaultdict[Shape, int] = defaultdict(int)  # steps

    def add(
        self,
        decision: Decision,
        accepted: Sequence[int] | np.ndarray,
        most: np.ndarray,
        lens: np.ndarray | None = None,
        whole: str | None = None,
    ) -> None:
        """A step with requests came back.

        accepted [n]: proposals. most [n]: tokens that a step may commit of each request, which bound what counts
        as verified. lens [n]: verified rows of each request; None: the width of each. whole: why requests needed
        whole blocks, None where none did.
        """
        requests, width = len(accepted), decision.width
        rows = most.clip(max=width) if lens is None else np.minimum(most, lens)
        self._steps += 1
        self._requests += requests
        self._drafted += requests * (width - 1)
        self._rows += requests * width if lens is None else int(lens.sum())
        self._verified += np.bincount(rows - 1, minlength=self._block)
        self._accepted += np.bincount(accepted, minlength=self._block)
        if width == PLAIN:
            why = "set" if not self._chooses else CHOSEN if int(most.max()) > PLAIN else "max_width"
            shape = Shape(width, PLAIN_STEP, why)
        elif lens is not None:
            shape = Shape(width, RAGGED_STEP, CHOSEN)
        else:
            shape = Shape(width, WHOLE_STEP, (whole or CHOSEN) if self._ragged else "not_ragged")
        self.shapes[shape] += 1

    @staticmethod
    def chosen_plain(shapes: Mapping[Shape, int]) -> int:
        """How many of these steps drafted nothing because plain decoding was estimated to be faster."""
        return sum(steps for shape, steps in shapes.items() if shape[1:] == (PLAIN_STEP, CHOSEN))

    def totals(self) -> Totals:
        """Since start-up."""
        # From a histogram to how many reached each position.
        verified, accepted = (of[::-1].cumsum()[::-1][1:] for of in (self._verified, self._accepted))
        return Totals(self._steps, self._requests, self._drafted, self._rows, verified, accepted)

    def snapshot(self) -> dict[str, Any]:
        """`dflash_acceptance` of /server_info."""
        totals = self.totals()
        shapes: dict[str, dict[str, int]] = {}
        for shape, steps in self.shapes.items():
            of_form = shapes.setdefault(shape.form, {})
            of_form[shape.reason] = of_form.get(shape.reason, 0) + steps
        return {
            "verified": totals.verified.tolist(),
            "accepted": totals.accepted.tolist(),
            "steps": totals.steps,
            "request_steps": totals.requests,
            "drafted_proposals": totals.drafted,
            "verified_rows": totals.rows,
            "committed_tokens": totals.committed,
            "accept_length": totals.accept_length,
            "accept_rate": totals.accept_rate,
            "shapes": shapes,
        }
