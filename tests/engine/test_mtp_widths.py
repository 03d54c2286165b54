"""Multi-token-prediction layers in steps of every width. Those of width 1 leave their rows to later steps."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.engine.test_mtp import NEW_TOKENS, ask, noted, ours, plain, prompts, wrong_proposals
from tests.support.engines import greedy
from tests.zoo.step3p5 import MTP_LAYERS

pytestmark = pytest.mark.slow

WIDTHS = [1, 2, 3, 4]
ROWS = MTP_LAYERS + 1  # of a window


@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype, every width", outcome="works")
@pytest.mark.parametrize("page_size", [1, 64])
def test_steps_of_every_width_propose_what_the_reference_does(page_size: int, tmp_path: Path) -> None:
    config = {"width": {"widths": WIDTHS}}
    with ours(tmp_path, "mtp,widths,stretches", config=config, page_size=page_size) as (server, records):
        together = greedy(server, prompts(), NEW_TOKENS)
        server.post("/flush_cache?timeout=60")
        answers, texts = ask(server, records)
    assert together == plain()
    assert [answer["output_ids"] for answer in answers] == plain()
    blocks = noted(records)
    assert wrong_proposals(blocks, texts) == 0
    widths = [len(block.chosen) + 1 for block in blocks]
    assert set(widths) == set(WIDTHS)
    stretches = {len(list(steps)) for width, steps in groupby(widths) if width == 1}
    assert len(stretches) > ROWS and max(stretches) > 2 * ROWS, stretches
