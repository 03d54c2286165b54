"""The width policy in a server: output equals plain decoding while widths change, what it tells, what requests
ask for."""

from __future__ import annotations

import json
import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.settings.width import DEFAULT_TREES
from tests.support import scheduler_hooks
from tests.support.engines import accepted_proposals, greedy_params, kept, serve
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
WIDTHS = (1, 2, 4, 6, 8, 12, 16)
BUCKETS = (1, 2, 4, 8, 16, 32, 48)
MANY = 12


def prompts() -> list[list[int]]:
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[700 * i : 700 * i + 20 + 13 * i]) for i in range(MANY)]


def request(prompt: list[int], new_tokens: int, max_width: Any = None, min_width: Any = None) -> dict[str, Any]:
    params, asked = greedy_params(new_tokens), dict(min_width=min_width, max_width=max_width)
    asked = {name: width for name, width in asked.items() if width is not None}
    if asked:
        params["custom_params"] = {"dflash": asked}
    return dict(input_ids=prompt, sampling_params=params)


def ask(server: Server, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: server.generate(**one), asked))


def told(server: Server) -> dict[str, Any]:
    (state,) = server.get("/server_info")["internal_states"]
    return state["dflash_width"]


def assert_all_shapes_are_drawn(server: Server, prompts: list[list[int]]) -> None:
    """Of six requests that run at once, on a server without others: chains, ragged ones and trees have a third
    of the steps each."""
    before = told(server)["shapes"]
    ask(server, [request(prompt, 300) for prompt in prompts[:6]])
    steps = {shape: count - before[shape] for shape, count in told(server)["shapes"].items()}
    of_form = {form: sum(steps[shape] for shape in steps if shape.startswith(form)) for form in ("ragged", "tree")}
    assert sum(steps.values()) > 30
    assert all(0.1 < count / sum(steps.values()) < 0.8 for count in of_form.values()), steps
    assert all(count for shape, count in steps.items() if shape in ("tree 16", "tree 32")), steps


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with kept(TARGET) as server:
        return [answer["output_ids"] for answer in ask(server, [request(prompt, 160) for prompt in prompts()])]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(server, directory of its records)"""
    records, config = tmp_path_factory.mktemp("records"), json.dumps({"width": {"highest_min_width": 16}})
    environment = scheduler_hooks.hooked(records, "rehearsals,probes", **{CONFIG_ENV: config})
    arguments = dict(enable_metrics=True, decode_log_interval=1)
    with serve(TARGET, DRAFT, environment=environment, **arguments) as server:
        yield server, records
        print(server.log_tail(40))


def test_start_up_measures_every_width_and_leaves_no_trace(ours):
    server, records = ours
    ran, table = json.loads((records / "rehearsed").read_text())  # there once nothing was found changed
    base, variances = np.array(table)
    kinds = 2 * len(WIDTHS) - 1 + len(DEFAULT_TREES)  # chains, ragged ones of all widths but 1, trees
    assert base.shape == (len(BUCKETS), kinds)
    measured = variances < 1
    between = slice(
        len(WIDTHS) + 1, 2 * len(WIDTHS) - 2
    )  # of ragged steps the narrowest and the widest are measured
    assert np.delete(measured[0], between).all() and not measured[:, between].any()
    assert len(ran["seconds"]) >= measured.sum()
    assert (base > 0).all() and (base[-1] > base[0]).all()
    assert f"dflash_sglang verify widths: {WIDTHS}" in server.log_text()
    assert re.search(r"cells measured in [\d.]+ s; ms of a step by shape: 1 requests 1: ", server.log_text())


def test_output_equals_plain_decoding_while_load_and_width_change(ours, plain):
    server, _ = ours
    before = told(server)["steps"]
    for count in (1, MANY, 1):
        asked = [request(prompt, 160 if count > 1 else 80) for prompt in prompts()[:count]]
        for answer, expected in zip(ask(server, asked), plain, strict=False):
            assert answer["output_ids"] == expected[: len(answer["output_ids"])]
    after = told(server)
    steps = {int(width): count - before[width] for width, count in after["steps"].items()}
    assert tuple(steps) == WIDTHS
    assert sum(count > 0 for count in steps.values()) >= 3, steps
    assert sum(after["probes"].values()) >= 1 and after["changes"] >= 1
    assert after["last_change"] in ("load", "gain", "limit")
    assert after["estimated_over_block"] > 0 and after["left_out"] == 0
    gauge = re.search(r"^sglang:spec_num_draft_tokens\{.*\} ([\d.]+)$", server.text("/metrics"), re.MULTILINE)
    assert gauge and float(gauge[1]) in WIDTHS


def test_a_request_is_drafted_for_no_further_than_it_allows_and_others_are_not_held_back(ours, plain):
    server, _ = ours
    widest = {0: 1, 3: 3, 5: 1000}
    asked = [request(prompt, 160, widest.get(number)) for number, prompt in enumerate(prompts())]
    answers = ask(server, asked)
    assert [answer["output_ids"] for answer in answers] == plain
    assert accepted_proposals(answers[:1]) == {0: 159}
    assert 0 < max(accepted_proposals(answers[3:4])) < 3
    assert max(accepted_proposals(answers[4:])) >= 3
    infos = [answer["meta_info"] for answer in answers]
    proposed = [info["spec_num_proposed_drafts"] for info in infos]
    assert proposed[0] == 0 and "spec_accept_rate" not in infos[0]
    assert proposed[3] <= 2 * infos[3]["spec_verify_ct"]
    for info, of in zip(infos[1:], proposed[1:], strict=True):
        assert 0 < info["spec_num_correct_drafts"] <= of
        assert info["spec_accept_rate"] == info["spec_num_correct_drafts"] / of and "spec_cap_length" not in info


def test_a_width_that_no_request_may_have_is_refused_and_others_go_on(ours, plain):
    server, _ = ours
    good = [request(prompt, 40) for prompt in prompts()[:3]]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(ask, server, good)
        for most, least, said in (
            *((value, None, "max_width") for value in (0, "4", 1.5, True)),
            (None, 17, "min_width=17: expected at most 16 on this server"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.generate(**request(prompts()[4], 40, most, least))
            assert refused.value.code == 400, (most, least)
            assert said in refused.value.read().decode()
        assert [answer["output_ids"] for answer in others.result()] == [ids[:40] for ids in plain[:3]]
