"""Ranks of tensor parallelism over gloo verify one shape in every step, chains, ragged ones and trees: their rows
and outputs are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import continuations
from tests.engine.test_width_serving import DRAFT, TARGET, ask, prompts, request
from tests.support import scheduler_hooks
from tests.support.engines import serve

pytestmark = [pytest.mark.slow, pytest.mark.full]

RANKS, REQUESTS, NEW_TOKENS = 2, 6, 160
FORMS = ("chain", "ragged", "tree")
SETTINGS = '{"width": {"trees": [16, 32, 64]}}'


def assert_same_rows(directory: Path, forms: Collection[str], at_least: int) -> None:
    """Both ranks noted the same steps, under the hook "shapes", and of each of these forms so many."""
    first, second = (scheduler_hooks.noted(directory, f"shapes.{rank}.jsonl") for rank in range(RANKS))
    assert abs(len(first) - len(second)) <= 1  # one of them may be in a step now
    differing = [number for number, (one, other) in enumerate(zip(first, second, strict=False)) if one != other]
    assert not differing, (len(first), first[differing[0]], second[differing[0]])
    counts = Counter(form for form, *_ in first)
    print(f"{len(first)} steps on both ranks: {dict(counts)}")
    assert all(counts[form] >= at_least for form in forms), counts


def test_both_ranks_verify_the_same_rows_in_every_step(tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "widths,shares,trees,shapes", **{CONFIG_ENV: SETTINGS})
    texts = prompts()[:REQUESTS]
    with serve(
        TARGET, DRAFT, environment=environment, tp_size=RANKS, mem_fraction_static=0.3, max_total_tokens=6000
    ) as server:
        asked = [request(text, NEW_TOKENS) for text in texts]
        answers = [*ask(server, asked), *ask(server, asked[:2])]
    plain = continuations(TARGET, texts, NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == [*plain, *plain[:2]]
    assert_same_rows(tmp_path, FORMS, at_least=10)
