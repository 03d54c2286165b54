"""Draft rows in rings: the output is plain decoding's, and acceptance a whole pool's where a ring has the rows.

The trained draft with an imposed window of 32, four running requests, and rings as small as they can be.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import RETRACTING, greedy_params, kept, serve
from tests.support.kits import DRAFT, TARGET
from training.pair import held_out_prompts

pytestmark = [pytest.mark.slow, pytest.mark.full]

TEXT = list("\n".join(held_out_prompts()).encode())
WINDOW, NEW_TOKENS, RUNNING = 32, 60, 4
HIT = 149
FIRST, FURTHER = TEXT[:150], TEXT[2000:2020]  # a prompt, and what a user says next
# Together, then after the conversation: what begins with pieces of one text.
PROMPTS = [TEXT[300 * i : 300 * i + n] for i, n in enumerate((5, 33, 150, 290, 64, 97))]
CUTS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 149)


def ask(server: Server, prompt: list[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    return server.generate(input_ids=prompt, sampling_params=greedy_params(new_tokens))


def conversation(server: Server, turns: int = 3, text: list[int] = FIRST) -> tuple[list[list[int]], list[int]]:
    """Outputs and verify counts of turns, each with the text before it."""
    outputs: list[list[int]] = []
    counts: list[int] = []
    for _ in range(turns):
        answer = ask(server, text)
        outputs.append(answer["output_ids"])
        counts.append(answer["meta_info"].get("spec_verify_ct", 0))
        text = text + outputs[-1] + FURTHER
    return outputs, counts


def everything(server: Server) -> list[list[int]]:
    """Outputs of requests that run beside each other, wait for a row, hit prefixes at many distances, and find
    their rings given to others."""
    outputs = [one["output_ids"] for one in server.generate(input_ids=PROMPTS, sampling_params=greedy_params(40))]
    outputs += conversation(server)[0]
    for cut in CUTS:
        outputs.append(ask(server, FIRST[:cut] + FURTHER, 16)["output_ids"])
    again = [prompt + FURTHER for prompt in PROMPTS]
    outputs += [one["output_ids"] for one in server.generate(input_ids=again, sampling_params=greedy_params(40))]
    outputs += conversation(server, turns=1)[0]
    return outputs


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with kept(TARGET) as server:
        return everything(server)


def hooked(directory: Path, hooks: str, graphs: bool = False, **config: Any) -> dict[str, str]:
    start = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    return start(directory, hooks, **{CONFIG_ENV: json.dumps({"draft_kv": "auto", **config})})


def all_sliding(directory: Path) -> Path:
    """The trained draft with a window of 32 in every layer."""
    shutil.copytree(DRAFT, directory / "draft")
    path = directory / "draft" / "config.json"
    config = json.loads(path.read_text())
    config |= {"layer_types": ["sliding_attention"] * config["num_hidden_layers"], "sliding_window": WINDOW}
    path.write_text(json.dumps(config))
    return directory / "draft"


@pytest.mark.matrix(target="Qwen3", draft="z-lab, rows in rings", kv="model dtype", outcome="works")
@pytest.mark.parametrize(
    ("arguments", "hooks", "config"),
    [
        pytest.param(
            dict(page_size=16, chunked_prefill_size=512, enable_mixed_chunk=True, retraction=True),
            "blindfold",
            {},
            id="pages of 16, mixed chunks, retraction",
        ),
        pytest.param(
            dict(graphs=True, chunked_prefill_size=24, max_running_requests=16),
            "blindfold,widths,shares,trees,host_lengths",
            {"width": {"trees": [16, 32]}},
            id="any rows in recorded graphs",
        ),
        pytest.param(dict(tp_size=2), "blindfold", {}, id="two ranks"),
        pytest.param(
            dict(sliding=True, page_size=64, chunked_prefill_size=64, disable_overlap_schedule=True),
            "blindfold",
            {},
            id="a draft that slides, pages of 64, synchronous",
        ),
    ],
)
def test_the_output_is_plain_decodings(plain, tmp_path, arguments, hooks, config):
    environment = hooked(tmp_path, hooks, arguments.pop("graphs", False), **config)
    environment |= RETRACTING if arguments.pop("retraction", False) else {}
    sliding = arguments.pop("sliding", False)
    draft = all_sliding(tmp_path) if sliding else DRAFT
    if not sliding:
        arguments["speculative_draft_window_size"] = WINDOW
    arguments = {"max_running_requests": RUNNING, **arguments}
    rings = arguments["max_running_requests"] + 16
    with serve(TARGET, draft, environment=environment, **arguments) as server:
        assert everything(server) == plain
        _, steps = conversation(server, text=TEXT[5000:5150])
        assert 2 * sum(steps) < 3 * NEW_TOKENS, "a NaN among the keys leaves no proposal accepted"
        assert "draft_kv: rings of " in server.log_text() and f"GB for {rings} rings of " in server.log_text()


@pytest.fixture(scope="module")
def pools(tmp_path_factory) -> dict[str, Any]:
    """By draft_kv: verify counts of a conversation; of a request whose prefix no ring has any longer, proposals by
    prefix length."""
    found: dict[str, Any] = {}
    for kind in ("auto", "whole"):
        directory = tmp_path_factory.mktemp(kind)
        environment = hooked(directory, "proposals", draft_kv=kind)
        with serve(
            TARGET,
            DRAFT,
            environment=environment,
            speculative_draft_window_size=WINDOW,
            max_running_requests=RUNNING,
        ) as server:
            assert ('whole (draft_kv is "whole")' in server.log_text()) == (kind == "whole")
            _, counts = conversation(server)
            prompt = TEXT[3000:][: HIT + 1]
            ask(server, prompt, 2)
            for other in range(40):  # more than there are rings
                ask(server, TEXT[4000 + 50 * other :][:20], 2)
            time.sleep(0.5)  # a step that was in flight
            before = len(scheduler_hooks.noted(directory, "proposals.jsonl"))
            answer = ask(server, prompt, 100)
            assert answer["meta_info"]["cached_tokens"] == HIT
            found[kind] = counts, dict(scheduler_hooks.noted(directory, "proposals.jsonl")[before:])
    return found


def test_later_turns_of_a_conversation_accept_as_much_as_with_a_whole_pool(pools):
    counts = pools["auto"][0]
    assert counts == pools["whole"][0] and 2 * sum(counts) < 3 * NEW_TOKENS


def test_a_hit_that_no_ring_has_proposes_as_a_whole_pool_does_after_one_window(pools):
    rings, whole = pools["auto"][1], pools["whole"][1]
    both = rings.keys() & whole.keys()
    later = [prefix for prefix in both if prefix >= HIT + WINDOW]
    assert len(later) > 3 and all(rings[prefix] == whole[prefix] for prefix in later)
    assert any(rings[prefix] != whole[prefix] for prefix in both), "a ring still had the prefix"
