"""`dflash-sglang bench --prompts`: sets by file and by name, what is refused, and a run of two of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from dflash_sglang.bench import load, prompts, sets, sweep
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from tests.support import engines
from tests.support.bench_runs import PAIR, settings_of

USER = {"role": "user", "content": "u"}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


LINES = [
    5, ["a"], {"text": "a"}, {"prompt": "a", "turns": ["b"]}, {"prompt": " "}, {"prompt": ["a"]}, {"turns": []},
    {"turns": "ab"}, {"turns": ["a", 3]}, {"messages": []}, {"messages": [{"role": "user"}]},
    {"messages": [USER, {**USER, "role": "assistant"}]},
]  # fmt: skip


def refused(capsys, *options):
    """The one line that `dflash-sglang bench` says of options that it cannot measure."""
    assert main(["bench", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("dflash-sglang bench: ")


def test_a_file_of_prompts_that_cannot_be_read_is_refused_by_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [json.dumps(line) for line in LINES] + ["no json", json.dumps({"turns": ["a" * 60, 3]})]
    for text in texts:
        (tmp_path / "p.jsonl").write_text(f'"good"\n{text}\n')
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        assert refused(capsys, "--prompts", "p.jsonl") == (
            f"--prompts p.jsonl: has the line {shown}: expected {sets.LINE}"
        )
    (tmp_path / "p.jsonl").write_text("\n")
    for value, reason in (
        ("p.jsonl", "p.jsonl has no line of text"),
        ("no", "[Errno 2] No such file or directory"),
    ):
        said = f"--prompts {value}: expected a file with prompts, or one of {', '.join(sets.DATA_SETS)} ({reason}"
        assert refused(capsys, "--prompts", value).startswith(said)


def test_prompts_that_the_target_does_not_take_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    talks = write(tmp_path / "talks.jsonl", {"turns": ["a", "b"]})
    assert refused(capsys, *PAIR, "--prompts", talks, "--input", "64") == (
        f"--input 64: expected prompts of one text each, and --prompts {talks} has conversations; "
        "leave one of them out"
    )
    target = tmp_path / "target"
    shutil.copytree(PAIR[1], target)
    (target / "chat_template.jinja").unlink()
    pair = ["--target", str(target), *PAIR[2:]]
    for option, asked in (("--chat", ["--chat"]), (f"--prompts {talks}", ["--prompts", talks])):
        said = (
            f"{option}: expected a target with a chat template, and {target} has none. Leave out {option}, or put "
        )
        assert refused(capsys, *pair, *asked).startswith(said)
    (target / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    prompts.tokenizer_of.cache_clear()
    assert refused(capsys, *pair, "--prompts", talks) == (
        f"--prompts {talks}: expected what the tokenizer of {target} takes (TemplateError: no system role)"
    )
    lengths = {
        "texts": "word\n" * 3 + "x y " * 1100,
        "talks.jsonl": json.dumps({"turns": ["x y " * 900, "b"] * 2}),
    }
    for name, content in lengths.items():
        (tmp_path / name).write_text(content)
        said = refused(capsys, *PAIR, "--prompts", name, "--output", "96")
        assert (
            said.startswith(f"--prompts {name}: the longest takes ") and "96 new ones a turn: expected at " in said
        )
        assert said.endswith(f"at most 4096, the context of {PAIR[1]}; shorten it or lower --output")


def test_a_data_set_is_loaded_by_name_or_says_what_is_missing(monkeypatch, capsys):
    row = dict(question="q", problem="q", prompt="p", instruction="i", input="")
    asked = []

    def load_dataset(*where, split):
        asked.append((*where, split))
        return [{**row, "prompt": ["a", "b"]}] * 2500 if "mt_bench_prompts" in where[0] else [row]

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said = {name: [[one["content"] for (one,) in turns] for turns in sets.read(name, False).prompts]
            for name in sets.DATA_SETS}  # fmt: skip
    assert asked[0] == ("openai/gsm8k", "main", "test")
    assert (
        said["mt-bench"] == [["a", "b"]] * 834 and said["alpaca"] == [["i"]] and said["humaneval"] == said["mbpp"]
    )
    assert said["gsm8k"][0][0].startswith("q\nPlease reason") and said["math500"][0][0].endswith("\\boxed{}.")
    assert said["mbpp"][0][0].endswith("passes the tests:\n```python\np\n```")
    assert sets.read("gsm8k", False).chat

    def offline(*_, **__):
        raise ConnectionError("no 'openai/gsm8k'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    remedy = "or give the prompts of openai/gsm8k as a .jsonl file"
    assert refused(capsys, "--prompts", "gsm8k") == (
        "--prompts gsm8k: expected openai/gsm8k from the hub or its cache (ConnectionError: no 'openai/gsm8k' on "
        f"the Hub): go online, {remedy}"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = refused(capsys, "--prompts", "gsm8k")
    assert line.startswith("--prompts gsm8k: expected the library that loads it (")
    assert line.endswith(f"): pip install datasets, {remedy}")


def test_a_load_asks_turns_as_token_ids_and_each_of_a_small_set_once(tmp_path):
    texts = write(tmp_path / "texts.jsonl", "a", {"prompt": "b"})
    talks = write(
        tmp_path / "talks.jsonl", {"turns": ["c", "d"]}, {"messages": [{**USER, "role": "system"}, USER]}
    )
    settings = settings_of("--prompts", texts, talks, texts, "--concurrency", "1")
    assert [(one.name, one.chat) for one in settings.sets] == [(texts, False), (talks, True)]
    assert [settings.requests_of(cell) for cell in settings.cells] == [2, 2]
    written = tmp_path / "asked"
    flags, ids = prompts.load_of(settings, settings.cells[1], 2, written)
    assert flags[1] == "agentic-trace" and flags[-1] == "--disable-ignore-eos"
    first, second = json.loads(written.read_text())["conversations"]
    assert [turn["messages"][0]["content"] for turn in first] == ["c", "d"] and len(second[0]["messages"]) == 2

    @dataclasses.dataclass
    class Asked:
        prompt: object
        extra_request_body: dict[str, object]

    async def client(asked, pbar=None):
        assert asked == Asked(ids([USER]), {})
        return SimpleNamespace(success=True, generated_text="", output_len=512, ttft=0.0, latency=0.5)

    done: list[int] = []
    serving = SimpleNamespace(ASYNC_REQUEST_FUNCS={"sglang": client}, MULTI_TURN_BACKENDS={"chat"})
    with load._recorded(serving, ids, done.append) as answers:
        assert "sglang" in serving.MULTI_TURN_BACKENDS
        asyncio.run(
            serving.ASYNC_REQUEST_FUNCS["sglang"](request_func_input=Asked([USER], {"stream_options": {}}))
        )
    assert (answers[0].output_len, answers[0].ttft, done) == (1, 0.5, [1])  # no text: its first token ends it
    assert serving.ASYNC_REQUEST_FUNCS["sglang"] is client and serving.MULTI_TURN_BACKENDS == {"chat"}


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
        (texts, 3, 1, True), (talks, 2, 2, True),
    ]  # fmt: skip
    medians = {(one["prompts"], one["kind"]): one["median"] for one in measured["figures"]}
    assert list(medians) == [(name, kind) for kind in ("plain", "ours") for name in (texts, talks)]
    for (name, kind), median in medians.items():
        assert median["requests"] == (3 if name == texts else 4)  # one a turn
        assert 4 < median["output_tokens"] <= 24 * median["requests"]
        assert median["accept_length"] > 1 if kind == "ours" else median["accept_length"] == 1
        assert 0 < median["ttft_ms"] <= median["ttft_p99_ms"] and 0 < median["tpot_ms"] <= median["tpot_p99_ms"]
        # Only second turns begin with what the server had before.
        assert 0.2 < median["cached_share"] < 0.6 if name == talks else median["cached_share"] < 0.1
    assert [one["prompts"] for one in measured["acceptance"]] == [texts, talks]
    for one in measured["acceptance"]:
        assert 0 < one["accepted"][0] <= one["verified"][0] and len(one["verified"]) == len(one["accepted"])
    outputs = measured["outputs"]
    assert outputs["equal_to_plain"] == {"ours": outputs["prompts"]}
    table = (tmp_path / "out" / "bench.md").read_text()
    for title in (f"{texts}, greedy", f"{talks}, greedy", "Acceptance by position"):
        assert f"\n## {title}\n" in table
