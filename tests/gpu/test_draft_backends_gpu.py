"""Attention backends of drafts on a GPU: what rows of a block see, eagerly and captured, and what is accepted.

Servers of a fixture start at once, so that it takes as long as the slowest of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import ServerFailed
from tests.support import scheduler_hooks
from tests.support.backend_visibility import BACKENDS_ENV, KINDS, RIGHT, answers
from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHARED = {**ON_DEVICE, "mem_fraction_static": 0.6, "max_total_tokens": 20000, "cuda_graph_max_bs_decode": 4}
BACKENDS, PAGES = ("fa3", "flashinfer", "triton", "fa4"), (1, 64)
PROMPT = list("\n".join(held_out_prompts()).encode())[:700]
NEW_TOKENS = 120


def told(directory: Path, names: tuple[str, ...], page: int) -> dict[str, dict[str, str]]:
    """What each backend's rows see, by kind of layer and way of running it."""
    variables = {**DEVICE_ENVIRONMENT, BACKENDS_ENV: ",".join(names)}
    environment = scheduler_hooks.hooked(directory, "", "support.backend_visibility", **variables)
    log = "the server has started"
    try:
        with serve(TARGET, DRAFT, environment=environment, page_size=page, **SHARED):
            pass
    except ServerFailed as error:
        log = str(error)
    found = answers(directory)
    assert found.keys() == set(names), f"{json.dumps(found, indent=1)}\n{log}"
    return found


def steps(draft: Path, backend: str) -> int:
    """Verify steps of one greedy request."""
    with serve(
        TARGET, draft, environment=DEVICE_ENVIRONMENT, speculative_draft_attention_backend=backend, **SHARED
    ) as server:
        (answer,) = server.generate(input_ids=[PROMPT], sampling_params=greedy_params(NEW_TOKENS))
        assert f"draft_attention: {backend}\n" in server.log_text()
        return answer["meta_info"]["spec_verify_ct"]


def all_causal(directory: Path) -> Path:
    """The trained draft with every layer causal; its proposals are still accepted."""
    draft = directory / "causal"
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "is_causal": True}))
    return draft


def at_once(jobs: dict[Any, tuple[Any, ...]]) -> Iterator[Callable[[Any], Any]]:
    """Results by name of functions with their arguments, all running."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = {name: pool.submit(*job) for name, job in jobs.items()}
        yield lambda name: futures[name].result()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Any]]:
    yield from at_once({
        **{page: (told, tmp_path_factory.mktemp(f"page{page}"), BACKENDS, page) for page in PAGES},
        "fa4": (steps, DRAFT, "fa4"),
    })  # fmt: skip


@pytest.fixture(scope="module")
def trtllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Any]]:
    yield from at_once({
        "sees": (told, tmp_path_factory.mktemp("trtllm"), ("trtllm_mha",), 64),
        "steps": (steps, all_causal(tmp_path_factory.mktemp("draft")), "trtllm_mha"),
    })  # fmt: skip


def right(*kinds: str) -> dict[str, str]:
    return {f"{kind}, {way}": RIGHT for way in ("eager", "graph") for kind in kinds}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_block_see_what_each_kind_of_layer_shows_them(found, backend, page):
    """Up to both sides of the window's edge of each row, in layers that are causal and not."""
    assert found(page)[backend] == right(*KINDS)


def test_proposals_of_the_trained_draft_are_accepted_on_fa4(found):
    assert NEW_TOKENS - 1 >= 4 * found("fa4")


def test_trtllm_mha_is_right_but_for_sliding_layers_that_are_not_causal(trtllm):
    seen = trtllm("sees")["trtllm_mha"]
    wrong = right("sliding, not causal").keys()
    assert {name: answer for name, answer in seen.items() if name not in wrong} == right(
        *(kind for kind in KINDS if kind != "sliding, not causal")
    )
    assert all("row 0 does not see -127" in seen[name] for name in wrong), seen


def test_proposals_of_a_causal_draft_are_accepted_on_trtllm_mha(trtllm):
    assert NEW_TOKENS - 1 >= 4 * trtllm("steps")
