"""`dflash-sglang bench --prompts`: sets of prompts by file and by name, what is refused, and a run of two of them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from dflash_sglang.bench import load, prompts, sets, sweep
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from tests.support import engines
from tests.support.bench_runs import settings_of
from training.pair import pair_directories

PAIR = [word for role, path in pair_directories().items() for word in (f"--{role}", path)]
USER = {"role": "user", "content": "u"}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.release
@pytest.mark.slow
def test_each_set_is_measured_by_itself_and_a_conversation_finds_its_turns_in_the_cache(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sweep, "COMPARED_TOKENS", 8)
    code = ["def mean(values):\n    ", "import os\n\n\ndef ", "class Point:\n    def __init__("]
    third = {"messages": [{**USER, "content": code[2]}]}
    texts = write(tmp_path / "texts.jsonl", code[0], {"prompt": code[1]}, third)
    talks = write(tmp_path / "talks.jsonl", {"turns": [code[0] * 8, code[1]]}, {"turns": [code[2] * 8, code[1]]})
    options = ["--prompts", texts, talks, "--concurrency", "2", "--requests", "1", "--rounds", "1"]
    options += ["--output", "24", "--flags=--skip-server-warmup"]
    assert main(["bench", "--out", str(tmp_path / "out"), *PAIR, *options]) == 0, capsys.readouterr().err
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())

    assert [(one["name"], one["prompts"], one["turns"], one["chat"]) for one in measured["sets"]] == [
        (texts, 3, 1, False), (talks, 2, 2, True),
    ]  # fmt: skip
    medians = {(one["prompts"], one["kind"]): one["median"] for one in measured["figures"]}
    assert list(medians) == [(name, kind) for kind in ("plain", "ours") for name in (texts, talks)]
    for (name, kind), median in medians.items():
        assert median["requests"] == (4 if name == texts else 8)  # of each turn one
        assert 4 < median["output_tokens"] <= 24 * median["requests"]
        assert median["accept_length"] > 1 if kind == "ours" else median["accept_length"] == 1
        assert 0 < median["ttft_ms"] <= median["ttft_p99_ms"] and 0 < median["tpot_ms"] <= median["tpot_p99_ms"]
        # The second turn begins with the first one, and each conversation comes twice.
        assert median["cached_share"] > 0.4 or name == texts
    assert [one["prompts"] for one in measured["acceptance"]] == [texts, talks]
    for one in measured["acceptance"]:
        assert 0 < one["accepted"][0] <= one["verified"][0] and len(one["verified"]) == len(one["accepted"])
    outputs = measured["outputs"]
    assert outputs["equal_to_plain"] == {"ours": outputs["prompts"]}
    table = (tmp_path / "out" / "bench.md").read_text()
    for title in (f"{texts}, greedy", f"{talks}, greedy", "Acceptance by position"):
        assert f"\n## {title}\n" in table
