"""How many tokens a step verifies."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from dflash_sglang.sglang_names.scheduler import get_parallel
from dflash_sglang.width import decider, startup
from dflash_sglang.width.decider import Choice
from tests.support.scheduler_hooks import note
from tests.support.seam import around, decide_every_step


def widths() -> None:
    """Every decode step's blocks have a width of its own, where the policy is on. A rank that decided by itself
    would draw others than rank 0."""
    startup.PASSES, startup.MOST_SECONDS = 1, 1.0  # nothing follows from the times
    take_a_second()
    draws = cache(lambda: random.Random(get_parallel().tp_rank))

    def some(_: Any, self: Any, bucket: int, allowed: Sequence[int], *load: Any) -> Choice:
        return Choice(draws().choice(allowed), "gain")

    decide_every_step()
    around("kind", some)


def take_a_second() -> None:
    """Steps of trees that nobody measured, which the policy would not choose: their time is infinite."""
    around("step times", lambda filled, self, base: np.nan_to_num(filled(self, base), posinf=1.0))


def stretches() -> None:
    """Behind widths: some steps of width 1 are followed by up to 11 others."""
    draws, left = random.Random(2), [0]

    def stretched(choose: Any, self: Any, bucket: int, allowed: Sequence[int], *load: Any) -> Choice:
        if left[0] == 0:
            choice = choose(self, bucket, allowed, *load)
            left[0] = draws.randrange(12) if choice.kind == 0 else 0
            return choice
        left[0] -= 1
        return Choice(0, "gain")

    around("kind", stretched)


def probes() -> None:
    """Widths that look worse are tried for a tenth of the time."""
    decider.PROBE_BUDGET = 0.1


def shares() -> None:
    """How many tokens a step verifies together is drawn, and what the draft thinks of its proposals.

    Ragged steps are likelier than others.
    """
    draws, generator = random.Random(1), torch.Generator().manual_seed(2)

    def some(_: Any, self: Any, options: Any, rates: Any) -> dict[int, int]:
        of_kind: dict[int, list[int]] = {}
        for at, kind in enumerate(options.kind.tolist()):
            of_kind.setdefault(kind, []).append(at)
        return {kind: draws.choice(of) for kind, of in of_kind.items()}

    def of_no_draft(read: Any, self: Any, bs: int, steps: int, padded: int) -> Any:
        logprobs, best = read(self, bs, steps, padded)
        return -torch.rand((bs, steps), generator=generator).to(logprobs.device), best

    def ragged_more_often(allowed: Any, self: Any, *load: Any) -> list[int]:
        kinds = allowed(self, *load)
        return kinds + 2 * [kind for kind in kinds if self.kinds[kind].ragged]

    decide_every_step()
    around("options", some)
    around("kinds", ragged_more_often)
    around("logprobs", of_no_draft)


def shapes() -> None:
    """Of every step with requests, its form and a hash of its rows go to shapes.RANK.jsonl: ids, positions, slots,
    of ragged chains how many a request has, of trees the parents. Then the block's width, and of ragged chains the
    rows of each request by its rid."""

    def noting(verify: Any, self: Any, batch: Any, block: Any, proposals: Any, rows: Any, *arguments: Any) -> Any:
        parts, lens = [*rows.rows], dict[str, int]()
        if rows.ragged is not None:
            parts.append(rows.ragged.lens)
            lens = dict(zip([req.rid for req in batch.reqs], rows.ragged.lens.tolist(), strict=False))
        if rows.paths is not None:
            parts.append(rows.paths.tree.parents)
        form = "ragged" if rows.ragged is not None else "chain" if rows.paths is None else "tree"
        digest = hashlib.sha256(str([of.tolist() for of in parts]).encode()).hexdigest()
        note(
            f"shapes.{get_parallel().tp_rank}.jsonl", [form, len(batch.reqs), rows.size, digest, block.size, lens]
        )
        return verify(self, batch, block, proposals, rows, *arguments)

    around("verify", noting)
