"""Multi-token-prediction layers in steps of every width. Those of width 1 leave their rows to later steps."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.pair import pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_request_fields as fields
from tests.engine import test_slots as slots
from tests.engine.test_mtp import NEW_TOKENS, ask, checkpoint, noted, ours, plain, prompts, wrong_proposals
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import greedy, serve
from tests.zoo.step3p5 import MTP_LAYERS

pytestmark = pytest.mark.slow

WIDTHS = [1, 2, 3, 4]
ROWS = MTP_LAYERS + 1  # of a window
CONFIG: dict[str, Any] = {"width": {"widths": WIDTHS}}
HOOKS = "widths,stretches"


@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype, every width", outcome="works")
@pytest.mark.parametrize(
    ("page_size", "graphs"), [pytest.param(1, False, marks=pytest.mark.release), (64, False), (1, True)]
)
def test_steps_of_every_width_propose_what_the_reference_does(
    page_size: int, graphs: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = dict(config=CONFIG, page_size=page_size, graphs=graphs)
    with ours(tmp_path, f"mtp,{HOOKS}", **settings) as (server, records):
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
    if graphs:
        replayed = [replay for replay in recorded_graphs.replays(records) if replay.role == "draft"]
        assert len(replayed) > len([width for width in widths if width > 1])
        assert {replay.captured > replay.requests for replay in replayed} == {True, False}


@pytest.mark.full
@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.release)])
def test_requests_at_the_context_limit_are_plain_decodings(page_size: int, tmp_path: Path) -> None:
    """Each twice: the cache then has all of its prompt but some tokens, and windows end behind the last one."""
    arguments: dict[str, Any] = dict(context_length=slots.CONTEXT, allow_auto_truncate=True)

    def outline(server: Any, lengths: tuple[int, int]) -> Any:
        return slots.outline(slots.ask(server, *lengths))

    with serve(checkpoint(), **arguments) as server:
        expected = [outline(server, lengths) for lengths in slots.AT_THE_LIMIT]
    with ours(tmp_path, HOOKS, config=CONFIG, page_size=page_size, **arguments) as (server, _):
        for _ in range(2):
            assert [outline(server, lengths) for lengths in slots.AT_THE_LIMIT] == expected
        with ThreadPoolExecutor(len(expected)) as pool:
            assert list(pool.map(lambda lengths: outline(server, lengths), slots.AT_THE_LIMIT)) == expected


@pytest.mark.full
def test_request_fields_act_as_in_plain_decoding_at_every_width(tmp_path: Path) -> None:
    """Seeds, grammars, logprobs, stops, penalties and logit processors, one beside the other."""
    target = shutil.copytree(checkpoint(), tmp_path / "target")
    for file in Path(pair_directories()["target"]).glob("tokenizer*"):
        shutil.copy(file, target)
    environment = scheduler_hooks.hooked(tmp_path, f"seeds,{HOOKS}", **{CONFIG_ENV: json.dumps(CONFIG)})
    arguments: dict[str, Any] = dict(skip_tokenizer_init=None, enable_custom_logit_processor=True)
    asked = {name: requests[:1] for name, requests in {"": fields.base_requests(), **fields.table()}.items()}
    without = {**environment, scheduler_hooks.HOOKS_ENV: "seeds"}
    with serve(target, environment=without, disable_overlap_schedule=True, **arguments) as server:
        expected = {name: [server.generate(**request)] for name, (request,) in asked.items()}
    with serve(target, target, environment=environment, **arguments) as server, ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda requests: [server.generate(**requests[0])], asked.values())
        got = dict(zip(asked, answers, strict=True))
    assert not fields.differences(expected, got)
    assert fields.numbers(got["logprobs"][0]) == pytest.approx(fields.numbers(expected["logprobs"][0]), abs=1e-3)
    same = [name for name in asked if fields.essence(got[name][0]) == fields.essence(got[""][0])]
    assert not {"regex", "json_schema", "ebnf", "sampling_seed", "logit_bias", "n"} & set(same)
