"""The parts of `dflash-sglang check` that need no server."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.bench import checkpoints
from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.bench.steps import steps_of
from dflash_sglang.broken import Window
from dflash_sglang.check import arguments, prompts
from dflash_sglang.check.acceptance import Acceptance, acceptance
from dflash_sglang.check.arguments import Settings, divided, settings_of
from dflash_sglang.check.parting import ROUNDING, Parting, first_difference, first_parting
from dflash_sglang.check.report import draw, findings, table
from dflash_sglang.check.servers import Facts
from dflash_sglang.check.verdict import Baseline, Judged, packaged_baseline, read_baseline
from dflash_sglang.cli import _parser, main
from dflash_sglang.demo.server import free_port
from tests.support.tiny import make_pair
from training.pair import pair_directories

ids = st.lists(st.integers(0, 3), max_size=12)


@given(ids, ids, ids)
def test_the_first_difference_is_where_the_common_beginning_ends(common, one, other):
    a, b = common + one, common + other
    at = first_difference(a, b)
    assert (at is None) == (a == b) and first_difference(b, a) == at
    if at is not None:
        assert at >= len(common) and a[:at] == b[:at] and a[at : at + 1] != b[at : at + 1]


@pytest.mark.parametrize("one, other, near", [
    (-0.7, -0.70005, ["float32", "float16", "bfloat16"]), (-0.7, -0.72, ["float16", "bfloat16"]),
    (-0.7, -0.9, ["bfloat16"]), (-0.7, -1.2, []), (-6.0, -6.0, []),  # as likely as each other, and unlikely
])  # fmt: skip
def test_a_near_tie_has_both_tokens_within_the_rounding_of_the_likeliest_one(one, other, near):
    class PlainServer:
        def generate(self, **request: Any) -> Any:
            assert request["input_ids"] == [5, 6, 1] and sorted(request["token_ids_logprob"]) == [4, 9]
            return {"meta_info": {
                "output_top_logprobs": [[[-0.7, 8, None], [-0.8, 4, None]]],
                "output_token_ids_logprobs": [[[one, 4, None], [other, 9, None]]],
            }}  # fmt: skip

    server: Any = PlainServer()
    for dtype in ROUNDING:
        tie = dtype in near
        margin = pytest.approx(-0.7 - min(one, other))
        assert first_parting(server, dtype, 3, [5, 6], [1, 9, 2], [1, 4]) == Parting(
            3, 1, 4, 9, 2, None, margin, tie
        )
        assert first_parting(server, dtype, 3, [5, 6], [1, 4], [1, 9]) == Parting(3, 1, 9, 4, None, 2, margin, tie)
    ended = [first_parting(server, "float32", 0, [5], *both) for both in (([1, 2], [1]), ([1], [1, 2]))]
    assert ended == [Parting(0, 1, *of, None, None, None, False) for of in ((None, 2), (2, None))]
    assert first_parting(server, "float32", 0, [5], [1], [1]) is None


@pytest.fixture(autouse=True)
def small_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged pair is the small one of the tests."""
    monkeypatch.setattr(checkpoints, "pair_directories", pair_directories)


def test_acceptance_counts_the_bonus_token_and_steps_with_at_least_so_many_proposals():
    found = acceptance([[1, 0, 2], [0, 1], []], 4)  # steps with 0, 2, 2 and 1 accepted proposals
    assert found.length.value == pytest.approx(1 + 5 / 4) and found.steps == 4
    assert [one.value for one in found.positions] == [0.75, 0.5, 0]
    assert found.per_request == (pytest.approx(1 + 4 / 3), 2.0, None)
    for histograms, said in (([[], []], "no request had a verify step"), ([[0, 0, 1]], "expected at most 1")):
        with pytest.raises(ValueError, match=said):
            acceptance(histograms, 2)


def test_ninety_five_of_a_hundred_intervals_hold_the_true_value():
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        accepted = rng.binomial(30, rng.beta(4, 2, size=40))  # shares of each request's steps: mean 2/3
        histograms = [[30 - n, n] for n in accepted]
        found = acceptance(histograms, 2)
        held += found.length.low <= 1 + 2 / 3 <= found.length.high
    assert 180 <= held <= 198
    assert acceptance(histograms, 2) == found  # resampled alike
    alike = acceptance([[50, 50]] * 20, 2)
    assert (alike.length.low, alike.length.high) == (1.5, 1.5)  # however different the steps of one request are


def parting(**changes: Any) -> Parting:
    fields = dict(prompt=3, position=7, plain=1, dflash=2, plain_rank=1, dflash_rank=2, margin=0.01, near_tie=True)
    return Parting(**{**fields, **changes})


WELL, BADLY = Window((0.8, 0.7, 0.6)), Window((0.22, 0.08, 0.04))


def judged(accepted: Acceptance, window: Window = WELL, base: float | None = None, **changes: Any) -> Judged:
    fields = dict(partings=(), speed=None, baseline=base and Baseline("B", base, ()))
    return Judged(**{**fields, **changes}, accepted=accepted, window=window)


VERDICTS = [  # accept length, window, the baseline's, speed, partings, verdicts with what their reasons say
    (3.0, WELL, None, None, [], []),
    (3.0, WELL, None, 1.1, [parting()], []),
    (3.0, WELL, 3.05, None, [], []),  # less than 2 % below
    (3.0, WELL, 4.0, None, [], [("below baseline", "25% below the baseline's 4.00")]),
    (1.5, WELL, None, 0.75, [], [("weak on these prompts", "break-even, about 2.00: 0.75 times the tokens/s of")]),
    (3.0, WELL, 4.0, 0.5, [], [("below baseline", "25% below"), ("weak on these prompts", "even, about 6.00")]),
    (1.5, BADLY, 4.0, None, [], [("broken draft", "broken draft"), ("below baseline", "62% below the")]),
    (3.0, WELL, None, None, [parting(), parting(prompt=5, near_tie=False)],
     [("defect", "rounding: 1, .* prompt 5 at token 7")]),
    (1.5, BADLY, None, None, [parting(near_tie=False)], [("defect", "prompt 3 at"), ("broken draft", "1.38")]),
]  # fmt: skip


@pytest.mark.parametrize("accepted, window, base, speed, partings, said", VERDICTS)
def test_the_verdict_names_the_worst_and_gives_a_reason_for_each(accepted, window, base, speed, partings, said):
    steps = [0] * 16
    steps[int(accepted - 1)] = steps[int(accepted - 0.5)] = 10
    told = acceptance([steps] * 8, 16)
    assert told.length.value == accepted
    got = list(judged(told, window, base, speed=speed, partings=tuple(partings)).verdicts())
    assert [name for name, _ in got] == [name for name, _ in said]
    assert all(re.search(expected, reason) for (_, reason), (_, expected) in zip(got, said, strict=True))
    few = acceptance([[10, 0, 0], [0, 0, 10]], 3)  # 2.0, from 1.0 to 3.0: perhaps the baseline's, or break-even
    assert not list(judged(few, base=2.5, speed=0.8).verdicts())


def test_steps_of_a_server_are_told_apart_by_what_they_verified():
    def server(verified: list[int], accepted: list[int]) -> Any:
        told = {"verified_drafts": verified, "accepted_drafts": accepted}
        state = {"dflash_width": {"steps": {"1": 90, "2": verified[0]}}, "dflash_acceptance": told}
        return SimpleNamespace(get=lambda path: {"internal_states": [state, {}]})

    steps = steps_of(server([30, 8, 0], [15, 4, 0])).since(steps_of(server([10, 0, 0], [5, 0, 0])))
    assert steps.by_width == {2: 20} and steps.window == Window((0.5, 0.5))
    assert not steps_of(server([0, 0, 0], [0, 0, 0])).window
    assert not steps_of(SimpleNamespace(get=lambda path: {"internal_states": [{}]})).by_width


def found(tmp_path: Path, window: Window = WELL, **changes: Any) -> dict[str, Any]:
    """Findings on two prompts of the packaged pair, the second with other outputs; changes: of `Judged`."""
    options = _parser().parse_args(["check"])
    settings = settings_of(options, ["--tp-size", "1"], gpu=False)
    settings = Settings(**{**vars(settings), "prompts": [[65, 66], [67]], "baseline": changes.get("baseline")})
    accepted = acceptance([[1, 0, 2], [1, 0, 2]], 3)
    fields = dict(partings=(parting(prompt=1, position=1),), speed=1.25, baseline=None)
    seen = Judged(**{**fields, **changes}, accepted=accepted, window=window)
    outputs = [([68], [68]), ([69, 70], [69, 71])]
    return findings(settings, Facts("bfloat16", 3, True, {}), {2: 5, 16: 3}, outputs, seen)


def test_findings_and_their_table_show_where_outputs_part_and_what_that_is(tmp_path):
    partings = [parting(prompt=1), parting(prompt=1, near_tie=False, margin=3.0, dflash_rank=None)]
    partings += [parting(prompt=1, dflash=None, margin=None, near_tie=False)]
    told = found(tmp_path, BADLY, partings=tuple(partings))
    assert json.loads(json.dumps(told))["verdict"] == "defect" and told["near_ties"] == 1
    lines = table(told).splitlines()
    assert lines[2].endswith("1.25 times plain decoding's; break-even at accept length 1.87")
    assert lines[3].split()[1:] == ["1", "2"] and lines[4].split()[2:] == ["67", "67"]
    for line, expected in (
        (5, "a near-tie: plain 1 (rank 1), DFLASH 2 (rank 2), margin 0.01; bfloat16 explains 0.25"),
        (6, "a defect: plain 1 (rank 1), DFLASH 2 (rank above 20), margin 3;"),
        (7, "a defect: the output with DFLASH has ended, the other goes on"),
    ):
        assert expected in lines[line]
    at = lines.index("likely causes, in this order:")
    assert lines[at + 1].startswith(
        "  1. width: 5 of 8 steps verified less than the block of 16; compare drafts at"
    )
    assert lines[at + 2].startswith("  2. target_layer_ids=[0, 2, 4] of 5: ") and lines[-1].startswith(
        "  8. the te"
    )
    defect, one = found(tmp_path, partings=tuple(partings[1:2])), found(tmp_path, speed=None)
    assert (defect["verdict"], defect["likely_causes"]) == ("defect", [])  # acceptance is as it should be
    assert (one["verdict"], one["reasons"], one["likely_causes"], one["equal_outputs"]) == ("fine", [], [], 1)
    texts = [one["partings"][0][name] for name in ("text_before", "plain_text", "dflash_text")]
    assert texts == ["CE", "G", "F"] and "not measured" in table(one)


def test_the_picture_has_the_curve_and_the_baseline(tmp_path, monkeypatch):
    figure_of = pytest.importorskip("matplotlib.figure")
    kept, save = list[Any](), figure_of.Figure.savefig
    monkeypatch.setattr(
        figure_of.Figure, "savefig", lambda figure, *of, **more: (kept.append(figure), save(figure, *of, **more))
    )
    draw(found(tmp_path, baseline=Baseline("B", 2.0, (0.75, 0.5, 0.25))), tmp_path / "check")
    (axis,) = kept[0].axes
    lines = [line.get_xydata().round(2).tolist() for line in axis.get_lines()]
    assert lines == [[[1, 0.67], [2, 0.67]], [[1, 0.75], [2, 0.5]]] and len(axis.collections) == 1
    assert (tmp_path / "check").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


class Chatty:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*[1] * add_special_tokens, *text.encode()]

    def apply_chat_template(self, turns: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns) + "<a>"


def test_prompts_are_texts_or_token_ids_and_chat_gives_texts_the_template(tmp_path):
    for name, text, second in (
        ("p.json", '["ab", [1, 2]]', [1, 2]),
        ("p.jsonl", '"ab"\n\n[1, 2]\n', [1, 2]),
        ("p.txt", "ab\n\n\x01\x02\n", [1, 1, 2]),
    ):
        (tmp_path / name).write_text(text)
        asked = prompts.read(tmp_path / name)
        assert prompts.tokens(asked, Chatty(), 128, None) == [[1, 97, 98], second], name
    assert prompts.tokens(["ab", [3]], Chatty(), 128, None, chat=True) == [list(b"<u>ab<a>"), [3]]


def test_chat_asks_for_a_template_and_the_record_of_texts_is_no_baseline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = _parser().parse_args(["check"])
    packaged = settings_of(options, [], gpu=False)
    assert packaged.chat and packaged.baseline == packaged_baseline() and len(packaged.prompts) == 24
    for role, path in pair_directories().items():
        shutil.copytree(path, tmp_path / role, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "p").write_text("text")
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text("<{{ messages[0]['content'] }}>")
    options = _parser().parse_args(["check", "--chat", "--target", "target", "--draft", "draft", "--prompts", "p"])
    assert settings_of(options, [], gpu=False).prompts == [list(b"<text>")]
    template.unlink()
    with pytest.raises(BadSetting, match="--chat: expected a target with a chat template"):
        settings_of(options, [], gpu=False)


OTHER_PROMPTS = {
    "[]": "expected a .json list", "{": "expected a .json list", '{"a": 1}': "it is no list",
    "[[1, 128]]": "prompt 0 is .*from 0 to 127", '["a", []]': "prompt 1 is ", "[[true]]": "prompt 0",
}  # fmt: skip
OTHER_BASELINES = {
    "": "expected what check --json printed", "[]": "accept_length is None",
    '{"accept_length": 0.5}': "accept_length is 0.5: expected a number of at least 1",
    '{"accept_length": 2, "acceptance_at_position_1_on": [2]}': "expected a list of shares",
}  # fmt: skip


def test_a_baseline_is_an_earlier_check_or_a_record_and_what_is_neither_or_no_prompts_is_refused(tmp_path):
    path = tmp_path / "b.json"
    for text, said in OTHER_PROMPTS.items():
        path.write_text(text)
        with pytest.raises(BadSetting, match=f"^--prompts {path}: .*{said}"):
            prompts.tokens(prompts.read(path), Chatty(), 128, path)
    for text, said in OTHER_BASELINES.items():
        path.write_text(text)
        with pytest.raises(BadSetting, match=f"^--baseline {path}: .*{said}"):
            read_baseline(path)
    for earlier, positions in ((found(tmp_path), (0.6667, 0.6667)), ({"accept_length": 2.3333}, ())):
        path.write_text(json.dumps(earlier))
        assert read_baseline(path) == Baseline(str(path), 2.3333, positions)
    assert packaged_baseline().accept_length > 2 and len(packaged_baseline().positions) == 15


def test_flags_of_speculation_are_for_the_server_with_dflash_only():
    flags = ["--tp-size", "2", "--speculative-token-map", "F", "--x=1", "--speculative-a=b", "--list", "1", "-2"]
    assert divided(flags) == (
        ("--tp-size", "2", "--x=1", "--list", "1", "-2"), ("--speculative-token-map", "F", "--speculative-a=b"),
    )  # fmt: skip


def test_options_that_cannot_be_checked_end_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(json.dumps([[65] * 4000]))
    for options, said in (
        (["--port=1"], "--port: is set by check"), (["stray"], "stray: expected an option"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1: expected at least 2"),
        (["--concurrency", "0"], "--concurrency 0: expected at least 1"),
        (["--url", "localhost:1"], "--url localhost:1: expected the address"),
        (["--url", "http://x", "--speculative-token-map", "F"], "--speculative-token-map: is for a server that"),
        (["--target", "T", "--draft", "D"], "--prompts: expected a file"),
        (["--draft", "D"], "--draft D: a target and its draft belong together"),
        (["--baseline", "nothing"], "--baseline nothing: expected what check --json printed"),
        (["--png", "no/file"], "--png no/file: expected a file that can be written"),
        (["--prompts", "p.json"], "--prompts p.json: 4000 tokens and 128 new ones: expected at most 4096 "),
    ):  # fmt: skip
        assert main(["check", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"dflash-sglang check: {said}")
    monkeypatch.setattr(arguments, "can_draw", lambda: False)
    assert main(["check", "--png", str(tmp_path / "x.png")]) == 2
    assert "matplotlib is not installed (pip install 'dflash_sglang[bench]')" in capsys.readouterr().err


def test_a_longer_context_takes_longer_prompts_and_a_server_that_is_not_there_ends_with_1(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(json.dumps([[65] * 4000]))
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["check", "--url", url, "--prompts", "p.json", "--context-length=5000"]) == 1
    said = capsys.readouterr().err
    assert f"dflash-sglang check: --url {url}: " in said and "4000 tokens" not in said
    assert len(list(tmp_path.iterdir())) == 1


@contextmanager
def answering(body: bytes | None) -> Iterator[str]:
    """The address of a service with this answer to one request, None: not found."""

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *of: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join()


def test_a_block_that_no_config_has_is_the_running_servers(tmp_path):
    target, draft = map(str, make_pair(tmp_path, draft={"block_size": None}))
    (tmp_path / "p.json").write_text("[[1]]")
    options = _parser().parse_args(
        ["check", "--target", target, "--draft", draft, "--prompts", f"{tmp_path}/p.json"]
    )
    told = b'{"speculative_num_draft_tokens": 6, "speculative_draft_window_size": null}'
    with answering(told) as options.url:
        assert arguments._pair(options, arguments.NO_FLAGS).spec.block_size == 6
    for options.url in (None, f"http://127.0.0.1:{free_port()}"):
        with pytest.raises(BadSetting, match="block_size=None: expected .* Set --speculative-dflash-block-size"):
            settings_of(options, [], gpu=False)


def test_another_service_is_told_from_a_server_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for body in (b"[]", b"\xff", b'{"speculative_algorithm":"DFLASH"}', None):
        with answering(body) as url:
            assert main(["check", "--url", url]) == 2
        assert capsys.readouterr().err == (
            f"dflash-sglang check: --url {url}: expected an SGLang server, whose /server_info has model_path. "
            "Give its address without /v1.\n"
        )


def test_words_that_other_commands_do_not_take_are_named(capsys):
    for words, said in (
        (["demo", "--prompts", "0"], "argument --prompts: 0: expected 1 to 6\n"),
        (["pair", "--tp-size", "2"], "unrecognized arguments: --tp-size 2"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2 and said in capsys.readouterr().err
