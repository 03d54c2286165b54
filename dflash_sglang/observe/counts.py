"""Counters of decode steps, kept from what reaches the host anyway."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN

PLAIN_STEP, RAGGED_STEP, WHOLE_STEP, TREE_STEP = "plain", "ragged", "whole", "tree"
COPY_STEP = "copy"
AT_ONCE = 64  # steps that are added up together
CHOSEN = "chosen"  # by the width policy


class Shape(NamedTuple):
    """The rows that a step verifies: of one width, in one of five forms, for a reason."""

    width: int  # of a tree its nodes, of a chain beyond blocks its rows
    # PLAIN_STEP: the last token only; RAGGED_STEP: a part of each block; WHOLE_STEP: the width of each; COPY_STEP:
    # blocks and more of their copies
    form: str
    reason: str


class Totals(NamedTuple):
    """What steps did so far, or between two moments (`since`).

    `verified` and `accepted` are for each position of a block: in how many request-steps the proposal there was
    among the verified rows, and in how many it was accepted, with all before it. `verified_drafts` and
    `accepted_drafts` leave out the request-steps whose proposals were copied.
    """

    steps: int
    requests: int  # request-steps
    drafted: int  # proposals
    rows: int  # verified, first rows included
    verified: np.ndarray  # [block - 1] int64
    accepted: np.ndarray  # [block - 1] int64
    verified_drafts: np.ndarray  # [block - 1] int64
    accepted_drafts: np.ndarray  # [block - 1] int64

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

    @property
    def drafting_accept_length(self) -> float:
        """The same of the request-steps that verified a proposal; 0 without one."""
        drafting = int(self.verified[:1].sum())
        return 1 + int(self.accepted.sum()) / drafting if drafting else 0.0

    def since(self, before: Totals) -> Totals:
        """What came after `before`."""
        return Totals(*map(operator.sub, self, before))

    def plus(self, other: Totals) -> Totals:
        """Both together."""
        return Totals(*map(operator.add, self, other))


class DoneStep(NamedTuple):
    """A step with n requests that came back."""

    width: int
    accepted: Sequence[int] | np.ndarray  # [n] proposals
    most: np.ndarray  # [n] tokens that a step may commit of each request, which bound what counts as verified
    lens: np.ndarray | None = None  # [n] verified rows of each request; None: the width of each
    whole: str | None = None  # why requests needed whole blocks, None where none did
    nodes: int | None = None  # of each request's tree, whose positions all count as verified
    chain: int | None = None  # rows of each request, where its copy goes on beyond its block
    copied: np.ndarray | None = None  # [n] bool: a copy replaced the draft's proposals; None: of no request

    @property
    def rows(self) -> np.ndarray:
        """[n] verified rows of each request, one of each position of a tree."""
        return np.full(len(self.most), self.chain or self.width) if self.lens is None else self.lens

    @property
    def proposals(self) -> np.ndarray:
        """[n] verified proposals of each request, one of each position of a tree."""
        return np.minimum(self.rows, self.most) - 1


class Counts:
    """Adds up steps, many at a time: a step itself costs an append."""

    def __init__(self, block: int, *, ragged: bool, chooses: bool) -> None:
        """block: rows that a step verifies of a request, at most, trees aside. ragged: steps may verify a part of
        each block. chooses: the width policy has more than one width."""
        self._block, self._ragged, self._chooses = block, ragged, chooses
        self._pending: list[DoneStep] = []
        self._steps = self._requests = self._drafted = self._rows = 0
        # [2, block] request-steps with so many proposals verified, or accepted: of drafts, and of copies
        self._verified, self._accepted = np.zeros((2, block), np.int64), np.zeros((2, block), np.int64)
        self._shapes: defaultdict[Shape, int] = defaultdict(int)  # steps

    def add(self, step: DoneStep) -> None:
        self._pending.append(step)
        if len(self._pending) == AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        steps, self._pending = self._pending, []
        if not steps:
            return
        rows = [step.rows for step in steps]
        self._steps += len(steps)
        for step, of_requests in zip(steps, rows, strict=True):
            requests = len(step.most)
            self._requests += requests
            self._drafted += requests * (step.width - 1)
            self._rows += requests * step.nodes if step.nodes else int(of_requests.sum())
            self._shapes[self._shape(step)] += 1
        verified = np.minimum(np.concatenate(rows), np.concatenate([step.most for step in steps])) - 1
        accepted = np.fromiter(chain.from_iterable(step.accepted for step in steps), np.int64, len(verified))
        copied = np.zeros(len(verified), np.int64)
        if any(step.copied is not None for step in steps):
            of_each = ([False] * len(of.most) if of.copied is None else of.copied for of in steps)
            copied[:] = np.concatenate([*of_each])
        np.add.at(self._verified, (copied, verified), 1)
        np.add.at(self._accepted, (copied, accepted), 1)

    def _shape(self, step: DoneStep) -> Shape:
        if step.width == PLAIN:
            reason = "set" if not self._chooses else CHOSEN if int(step.most.max()) > PLAIN else "max_width"
            return Shape(step.width, PLAIN_STEP, reason)
        if step.chain is not None:
            return Shape(step.chain, COPY_STEP, CHOSEN)
        if step.nodes is not None:
            return Shape(step.nodes, TREE_STEP, CHOSEN if self._chooses else "set")
        if step.lens is not None:
            return Shape(step.width, RAGGED_STEP, CHOSEN)
        return Shape(step.width, WHOLE_STEP, (step.whole or CHOSEN) if self._ragged else "not_ragged")

    @property
    def shapes(self) -> dict[Shape, int]:
        """Steps of each shape since start-up."""
        self._add_up()
        return dict(self._shapes)

    def totals(self) -> Totals:
        """Since start-up."""
        self._add_up()
        # From histograms to how many reached each position.
        both = np.stack([self._verified, self._accepted])
        verified, accepted = both[..., ::-1].cumsum(axis=-1)[..., ::-1][..., 1:]
        counts = self._steps, self._requests, self._drafted, self._rows
        return Totals(*counts, verified.sum(axis=0), accepted.sum(axis=0), verified[0], accepted[0])

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
            "verified_drafts": totals.verified_drafts.tolist(),
            "accepted_drafts": totals.accepted_drafts.tolist(),
            "steps": totals.steps,
            "request_steps": totals.requests,
            "drafted_proposals": totals.drafted,
            "verified_rows": totals.rows,
            "committed_tokens": totals.committed,
            "accept_length": totals.accept_length,
            "drafting_accept_length": totals.drafting_accept_length,
            "accept_rate": totals.accept_rate,
            "shapes": shapes,
        }
