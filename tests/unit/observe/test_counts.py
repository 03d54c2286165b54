"""Counters of steps against counting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.observe.counts import Counts, DoneStep, Shape

BLOCK, LONGEST = 8, 12  # rows of a block, and of a chain with a copy


@st.composite
def steps(draw: st.DrawFn) -> list[DoneStep]:
    """Steps of requests with a `max_width`: blocks of some width, parts of them, trees, or chains beyond them; of
    copies and of drafts."""
    out = []
    for _ in range(draw(st.integers(1, 6))):
        width, n = draw(st.integers(1, BLOCK)), draw(st.integers(1, 4))
        more = dict[str, Any]()
        if width > 1 and (form := draw(st.sampled_from(["whole", "lens", "nodes", "chain"]))) != "whole":
            lens = np.array([draw(st.integers(1, width)) for _ in range(n)])
            more = {form: {"lens": lens, "nodes": 32, "chain": LONGEST}[form]}
        if draw(st.booleans()):
            more["copied"] = np.array([draw(st.booleans()) for _ in range(n)])
        most = np.array([draw(st.integers(1, LONGEST if "chain" in more else BLOCK)) for _ in range(n)])
        rows = [min(a, b) for a, b in zip(most, more.get("lens", [more.get("chain", width)] * n), strict=True)]
        out.append(DoneStep(width, [draw(st.integers(0, int(row) - 1)) for row in rows], most, **more))
    return out


@given(steps())
def test_a_proposal_counts_as_verified_where_its_request_could_commit_it(served: list[DoneStep]) -> None:
    counts = Counts(LONGEST, ragged=True, chooses=True)
    by_position = np.zeros((2, 2, LONGEST - 1), int)  # verified and accepted, of all and of drafts
    rows = committed = drafted = 0
    for step in served:
        counts.add(step)
        for i, done in enumerate(step.accepted):
            length = step.chain or step.width if step.lens is None else int(step.lens[i])
            rows, committed = rows + (step.nodes or length), committed + done + 1
            drafted += step.width - 1
            of_draft = step.copied is None or not step.copied[i]
            for at in range(1, LONGEST):
                reached = at < min(length, step.most[i]), at <= done
                by_position[:, :, at - 1] += np.outer(reached, (True, of_draft))
    told, requests = counts.snapshot(), sum(len(step.most) for step in served)
    names = (("verified", "verified_drafts"), ("accepted", "accepted_drafts"))
    assert [[told[name] for name in of] for of in names] == by_position.tolist()
    verified, accepted = by_position[:, 0].sum(axis=1).tolist()
    assert told | {
        "steps": len(served), "request_steps": requests, "verified_rows": rows, "committed_tokens": committed,
        "drafted_proposals": drafted, "accept_length": committed / requests,
        "accept_rate": accepted / verified if verified else 0.0,
        "drafting_accept_length": 1 + accepted / first if (first := by_position[0, 0, 0]) else 0.0,
    } == told  # fmt: skip
    assert sum(counts.shapes.values()) == len(served)


def test_a_step_has_a_form_and_a_reason() -> None:
    lens, wide, narrow = np.array([3]), np.array([16]), np.array([1])
    one: dict[str, Any] = dict(accepted=[0], most=wide)
    reasons = {  # by (ragged, chooses) of the server
        (True, True): [
            (DoneStep(4, **one), Shape(4, "whole", "chosen")),
            (DoneStep(4, whole="adjusted", **one), Shape(4, "whole", "adjusted")),
            (DoneStep(4, lens=lens, **one), Shape(4, "ragged", "chosen")),
            (DoneStep(1, **one), Shape(1, "plain", "chosen")),
            (DoneStep(1, [0], narrow), Shape(1, "plain", "max_width")),
            (DoneStep(8, nodes=32, **one), Shape(32, "tree", "chosen")),
            (DoneStep(8, chain=16, **one), Shape(16, "copy", "chosen")),
        ],
        (False, False): [
            (DoneStep(1, **one), Shape(1, "plain", "set")),
            (DoneStep(4, whole="adjusted", **one), Shape(4, "whole", "not_ragged")),
            (DoneStep(8, nodes=32, **one), Shape(32, "tree", "set")),
        ],
    }
    for (ragged, chooses), cases in reasons.items():
        counts = Counts(16, ragged=ragged, chooses=chooses)
        for step, _ in cases:
            counts.add(step)
        assert counts.shapes == {shape: 1 for _, shape in cases}
    assert counts.snapshot()["shapes"] == {"plain": {"set": 1}, "whole": {"not_ragged": 1}, "tree": {"set": 1}}
