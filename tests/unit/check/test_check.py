"""The parts of `dflash-sglang check` that need no server."""

from __future__ import annotations

import json
import re
import shutil
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.check import arguments, ask, prompts
from dflash_sglang.check.acceptance import Acceptance, acceptance
from dflash_sglang.check.arguments import _pair, divided, settings_of
from dflash_sglang.check.baseline import Baseline, packaged_baseline, read_baseline
from dflash_sglang.check.parting import Likelihood, Parting, first_difference, is_near_tie, margin
from dflash_sglang.check.plot import draw
from dflash_sglang.check.run import bar
from dflash_sglang.check.servers import steps_of
from dflash_sglang.check.table import table
from dflash_sglang.check.verdict import BROKEN_DRAFT, FINE, Judged, verdict
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.cli import _parser, main
from dflash_sglang.demo.server import free_port
from dflash_sglang.observe.alarm import CHANCE, NONE, POSITIONS, STAYS, WINDOW, Alarm, Window
from dflash_sglang.observe.counts import Totals
from dflash_sglang.pair import held_out_prompts, pair_directories
from tests.support.tiny import make_pair

ids = st.lists(st.integers(0, 3), max_size=12)


@given(ids, ids, ids)
def test_the_first_difference_is_where_the_common_beginning_ends(common, one, other):
    a, b = common + one, common + other
    at = first_difference(a, b)
    assert (at is None) == (a == b) and first_difference(b, a) == at
    if at is not None:
        assert at >= len(common) and a[:at] == b[:at] and a[at : at + 1] != b[at : at + 1]


def test_an_output_that_ends_early_parts_where_it_ends():
    assert first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize("one, other, near", [
    (-0.7, -0.70005, {"float32": True, "float16": True, "bfloat16": True}),
    (-0.7, -0.72, {"float32": False, "float16": True, "bfloat16": True}),
    (-0.7, -0.9, {"float32": False, "float16": False, "bfloat16": True}),
    (-0.7, -1.2, {"float32": False, "float16": False, "bfloat16": False}),
    (-6.0, -6.0, {"float32": False, "float16": False, "bfloat16": False}),  # as likely as each other, and unlikely
])  # fmt: skip
def test_a_near_tie_has_both_tokens_within_the_rounding_of_the_likeliest_one(one, other, near):
    distance = margin([Likelihood(one, 1), Likelihood(other, 2)], -0.7)
    assert {dtype: is_near_tie(distance, dtype) for dtype in near} == near
    assert margin([Likelihood(other, 2), Likelihood(one, 1)], -0.7) == distance


def test_a_server_is_asked_for_the_tokens_after_the_prompt_and_ranks_them():
    class Client:
        def generate(self, **request: Any) -> Any:
            assert request["input_ids"] == [5, 6] and request["token_ids_logprob"] == [9, 4]
            return {"meta_info": {
                "output_top_logprobs": [[[-0.5, 4, None], [-1.0, 7, None]]],
                "output_token_ids_logprobs": [[[-0.5, 4, None], [-3.0, 9, None]]],
            }}  # fmt: skip

    assert ask.likelihoods(Client(), [5, 6], [9, 4]) == ([Likelihood(-3.0, None), Likelihood(-0.5, 1)], -0.5)


def test_acceptance_counts_the_bonus_token_and_steps_with_at_least_so_many_proposals():
    found = acceptance([[1, 0, 2], [0, 1]], 4)  # steps with 0, 2, 2 and 1 accepted proposals
    assert found.length.value == pytest.approx(1 + 5 / 4) and found.steps == 4
    assert [one.value for one in found.positions] == [0.75, 0.5, 0]
    assert found.per_request == (pytest.approx(1 + 4 / 3), 2.0)


def test_requests_and_not_their_steps_are_the_sample():
    alike = acceptance([[50, 50]] * 20, 2)
    assert (alike.length.low, alike.length.high) == (1.5, 1.5)  # however different the steps of one request are
    apart = acceptance([[100, 0], [0, 100]] * 10, 2)
    assert apart.length.value == 1.5 and apart.length.low < 1.35 and apart.length.high > 1.65
    assert apart.positions[0].low == pytest.approx(apart.length.low - 1)
    assert acceptance([[100, 0], [0, 100]] * 10, 2) == apart  # seeded


def test_ninety_five_of_a_hundred_intervals_hold_the_true_value():
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        shares = rng.beta(4, 2, size=40)  # of each request's steps: mean 2/3
        accepted = rng.binomial(30, shares)
        found = acceptance([[30 - n, n] for n in accepted], 2)
        held += found.length.low <= 1 + 2 / 3 <= found.length.high
    assert 180 <= held <= 198


def test_requests_without_a_step_have_no_accept_length():
    assert acceptance([[], [1, 1]], 2).per_request == (None, 1.5)
    with pytest.raises(ValueError, match="no request had a verify step"):
        acceptance([[], []], 2)
    with pytest.raises(ValueError, match="2 accepted proposals: expected at most 1"):
        acceptance([[0, 0, 1]], 2)


def parting(**changes: Any) -> Parting:
    fields = dict(prompt=3, position=7, plain=1, dflash=2, plain_rank=1, dflash_rank=2, margin=0.01, near_tie=True)
    return Parting(**{**fields, **changes})


WELL, BADLY = Window((0.8, 0.7, 0.6)), Window((0.22, 0.08, 0.04))


def judged(accepted: Acceptance, window: Window = WELL, base: float | None = None, **changes: Any) -> Judged:
    fields = dict(partings=(), speed=None, baseline=base and Baseline("B", base, ()))
    return Judged(**{**fields, **changes}, accepted=accepted, window=window)


@pytest.mark.parametrize("accepted, window, base, speed, partings, name, said", [
    (3.0, WELL, None, None, [], "fine", []),
    (3.0, WELL, None, 1.1, [parting()], "fine", []),
    (3.0, WELL, 3.05, None, [], "fine", []),  # less than 2 % below
    (3.0, WELL, 4.0, None, [], "below baseline", ["25% below the baseline's 4.00"]),
    (3.0, WELL, 2.0, None, [], "fine", []),
    (1.5, WELL, None, 0.75, [], "weak on these prompts", ["break-even, about 2.00: 0.75 times the tokens/s of"]),
    (3.0, WELL, 4.0, 0.5, [], "below baseline", ["25% below", "break-even, about 6.00"]),
    (1.5, BADLY, None, 0.75, [], "broken draft", ["endless block would have 1.38, as of .* .below 1.5."]),
    (1.5, BADLY, 4.0, None, [], "broken draft", ["as of a broken draft", "62% below the baseline's 4.00"]),
    (3.0, WELL, None, None, [parting(), parting(prompt=5, near_tie=False)], "defect",
     ["rounding: 1, .* prompt 5 at token 7"]),
    (1.5, BADLY, None, None, [parting(near_tie=False)], "defect", ["prompt 3 at token 7", "as of a broken draft"]),
])  # fmt: skip
def test_the_verdict_names_the_worst_and_gives_a_reason_for_each(
    accepted, window, base, speed, partings, name, said
):
    steps = [0] * 16
    steps[int(accepted - 1)] = steps[int(accepted - 0.5)] = 10
    found = acceptance([steps] * 8, 16)
    assert found.length.value == accepted
    got = verdict(judged(found, window, base, speed=speed, partings=tuple(partings)))
    assert got.name == name and len(got.reasons) == len(said)
    for reason, expected in zip(got.reasons, said, strict=True):
        assert re.search(expected, reason)
    assert got.poor_acceptance == (name not in ("fine", "defect") or window is BADLY)


def test_an_accept_length_that_may_be_the_baselines_or_break_even_is_not_below_it():
    few = acceptance([[10, 0, 0], [0, 0, 10]], 3)  # 2.0, from 1.0 to 3.0
    assert verdict(judged(few, base=2.5, speed=0.8)).name == "fine"


@pytest.mark.parametrize("shares, broken", [
    ((0.31, 0.16, 0.08), False), ((0.22, 0.08, 0.04), True), ((0.4, 0.04, 0.0), True),
])  # fmt: skip
def test_check_and_alarm_judge_a_draft_alike_whatever_the_block(shares, broken):
    """The accept length of the first draft is 1.62 at a block of 8 and 1.63 at 16."""
    steps, names, states = 10 * WINDOW, [], []
    for block in (4, 8, 16):
        run = shares[2] / shares[1]
        by_position = [*shares, *(shares[2] * run**more for more in range(1, 16))][: block - 1]
        accepted = [round(share * steps) for share in by_position]
        histogram = [a - b for a, b in zip([steps, *accepted], [*accepted, 0], strict=True)]
        told = acceptance([histogram] * 4, block)
        names.append(verdict(judged(told, Window(one.value for one in told.positions[:POSITIONS]))).name)
        counts = np.full(block - 1, steps), np.array(accepted)
        alarm = Alarm(block)
        for _ in range(STAYS):
            alarm.observe(Totals(100, steps, 0, 0, *counts, *counts), 0, 0.0)
        states.append(alarm.state)
    assert names == [BROKEN_DRAFT if broken else FINE] * 3
    assert states == [CHANCE if broken else NONE] * 3


def test_steps_of_a_server_are_told_apart_by_what_they_verified():
    def server(verified: list[int], accepted: list[int]) -> Any:
        told = {"verified_drafts": verified, "accepted_drafts": accepted}
        state = {"dflash_width": {"steps": {"1": 90, "2": verified[0]}}, "dflash_acceptance": told}
        return SimpleNamespace(get=lambda path: {"internal_states": [state, {}]})

    steps = steps_of(server([30, 8, 0], [15, 4, 0])).since(steps_of(server([10, 0, 0], [5, 0, 0])))
    assert steps.by_width == {2: 20} and steps.window == Window((0.5, 0.5))
    assert not steps_of(server([0, 0, 0], [0, 0, 0])).window
    assert not steps_of(SimpleNamespace(get=lambda path: {"internal_states": [{}]})).by_width


def found(**changes: Any) -> dict[str, Any]:
    shares = [0.5, 0.25]
    return {
        "command": ["dflash-sglang", "check"], "date": "D", "versions": {"sglang": "1"}, "target": "T",
        "draft": "D", "url": None, "worker": "dflash_sglang", "dtype": "bfloat16", "max_new_tokens": 8,
        "concurrency": 1, "verdict": "fine", "reasons": [], "likely_causes": [], "prompts": 4, "equal_outputs": 3,
        "near_ties": 1,
        "largest_near_tie": 0.25, "partings": [], "accept_length": 1.75, "accept_length_interval": [1.5, 2.0],
        "verify_steps": 9, "acceptance_at_position_1_on": shares,
        "speed_over_plain": 1.25, "accept_length_at_break_even": 1.4,
        "acceptance_at_position_1_on_intervals": [[share - 0.1, share + 0.1] for share in shares],
        "baseline": None, **changes,
    }  # fmt: skip


def shown(**changes: Any) -> dict[str, Any]:
    texts = {"text_before": "before", "plain_text": "plain", "dflash_text": "dflash"}
    return {**vars(parting()), **texts, **changes}


def test_the_picture_has_the_curve_with_its_band_and_the_baseline(tmp_path, monkeypatch):
    figure_of = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    monkeypatch.setattr(figure_of.Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    draw(found(baseline={"source": "B", "accept_length": 2.0, "positions": [0.75, 0.5, 0.25]}), tmp_path / "x")
    monkeypatch.undo()
    (axis,) = kept[0].axes
    assert [line.get_xydata().tolist() for line in axis.get_lines()] == [
        [[1, 0.5], [2, 0.25]], [[1, 0.75], [2, 0.5]],
    ]  # fmt: skip
    (band,) = axis.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.round(2).tolist()} == {
        (1, 0.4), (1, 0.6), (2, 0.15), (2, 0.35),
    }  # fmt: skip
    assert axis.get_ylim() == (0, 1)
    draw(found(), tmp_path / "check")
    assert (tmp_path / "check").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_without_matplotlib_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arguments, "can_draw", lambda: False)
    assert main(["check", "--png", str(tmp_path / "x.png")]) == 2
    assert "matplotlib is not installed (pip install 'dflash_sglang[bench]')" in capsys.readouterr().err


def test_the_table_shows_where_outputs_part_and_what_that_is():
    text = table(found(
        verdict="defect", reasons=["why"], likely_causes=["first", "second"],
        partings=[shown(), shown(near_tie=False, margin=3.0, dflash_rank=None), shown(dflash=None, margin=None)],
    ))  # fmt: skip
    lines = text.splitlines()
    assert lines[0].split() == ["outputs", "equal", "3", "of", "4", "prompts,", "bfloat16"]
    assert "1.75 (95 %: 1.50 to 2.00), 9 verify steps" in lines[1]
    assert lines[2].endswith("1.25 times plain decoding's; break-even at accept length 1.40")
    assert lines[3].split()[1:] == ["1", "2"] and lines[4].split()[2:] == ["50", "25"]
    assert "a near-tie: plain 1 (rank 1), DFLASH 2 (rank 2), margin 0.01; bfloat16 explains 0.25" in lines[5]
    assert "a defect: plain 1 (rank 1), DFLASH 2 (rank above 20), margin 3;" in lines[6]
    assert lines[7].endswith("a defect: the output with DFLASH has ended, the other goes on")
    assert lines[-3:] == ["likely causes, in this order:", "  1. first", "  2. second"]


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize("name, text", [
    ("p.json", '["ab", [1, 2]]'), ("p.jsonl", '"ab"\n\n[1, 2]\n'), ("p.txt", "ab\n\n\x01\x02\n"),
])  # fmt: skip
def test_prompts_are_texts_or_token_ids(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert prompts.tokens(prompts.read(tmp_path / name), Bytes(), 128, None) == [[97, 98], [1, 2]]


def test_chat_gives_texts_the_template_and_leaves_token_ids_as_they_are():
    class Chatty(Bytes):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*[1] * add_special_tokens, *text.encode()]

        def apply_chat_template(self, turns: Any, add_generation_prompt: bool, tokenize: bool) -> str:
            assert add_generation_prompt and not tokenize
            return "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns) + "<a>"

    asked = ["ab", [3]]
    assert prompts.tokens(asked, Chatty(), 128, None, chat=True) == [list(b"<u>ab<a>"), [3]]
    assert prompts.tokens(asked, Chatty(), 128, None) == [[1, 97, 98], [3]]


def test_chat_asks_for_a_template_and_the_record_of_texts_is_no_baseline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = _parser().parse_args(["check", "--chat"])
    found, plain = (settings_of(options, [], gpu=False) for options.chat in (True, False))
    assert found.baseline is None and plain.baseline == packaged_baseline()
    for role, path in pair_directories().items():
        shutil.copytree(path, tmp_path / role, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "p").write_text("text")
    template = tmp_path / "target" / "chat_template.jinja"
    template.write_text("<{{ messages[0]['content'] }}>")
    options = _parser().parse_args(["check", "--chat", "--target", "target", "--draft", "draft", "--prompts", "p"])
    assert settings_of(options, [], gpu=False).prompts == (list(b"<text>"),)
    template.unlink()
    with pytest.raises(BadSetting, match="--chat: expected a target with a chat template"):
        settings_of(options, [], gpu=False)


@pytest.mark.parametrize("text, said", [
    ("[]", "expected a .json list"), ("{", "expected a .json list"), ('{"a": 1}', "it is no list"),
    ("[[1, 128]]", "prompt 0 is .*from 0 to 127"), ('["a", []]', "prompt 1 is "), ("[[1.0]]", "prompt 0"),
    ("[[true]]", "prompt 0"), ('["a", 3]', "prompt 1 is 3: expected a text"), ('[""]', 'prompt 0 is ""'),
])  # fmt: skip
def test_other_prompts_are_refused(tmp_path, text, said):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadSetting, match=said):
        prompts.tokens(prompts.read(path), Bytes(), 128, path)


def test_a_baseline_is_an_earlier_check_or_a_record(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(json.dumps(found()))
    assert read_baseline(path) == Baseline(str(path), 1.75, (0.5, 0.25))
    path.write_text('{"accept_length": 3}')
    assert read_baseline(path) == Baseline(str(path), 3.0, ())
    assert packaged_baseline().accept_length == pytest.approx(5.94, abs=0.01)
    assert len(packaged_baseline().positions) == 15


@pytest.mark.parametrize("text, said", [
    ("", "expected what check --json printed"), ("[]", "accept_length is None"),
    ('{"accept_length": 0.5}', "accept_length is 0.5: expected a number of at least 1"),
    ('{"accept_length": 2, "acceptance_at_position_1_on": [2]}', "expected a list of shares"),
])  # fmt: skip
def test_another_baseline_is_refused(tmp_path, text, said):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(BadSetting, match=said):
        read_baseline(tmp_path / "b.json")


def test_flags_of_speculation_are_for_the_server_with_dflash_only():
    flags = ["--tp-size", "2", "--speculative-token-map", "F", "--x=1", "--speculative-a=b", "--list", "1", "-2"]
    assert divided(flags) == (
        ("--tp-size", "2", "--x=1", "--list", "1", "-2"), ("--speculative-token-map", "F", "--speculative-a=b"),
    )  # fmt: skip


@pytest.mark.parametrize("options, said", [
    (["--port=1"], "--port: is set by check"), (["stray"], "stray: expected an option"),
    (["--max-new-tokens", "1"], "--max-new-tokens 1: expected at least 2"),
    (["--url", "localhost:1"], "--url localhost:1: expected the address"),
    (["--url", "http://x", "--speculative-token-map", "F"], "--speculative-token-map: is for a server that"),
    (["--target", "T", "--draft", "D"], "--prompts: expected a file"),
    (["--draft", "D"], "--draft D: a target and its draft belong together"),
    (["--baseline", "nothing"], "--baseline nothing: expected what check --json printed"),
    (["--png", "no/file"], "--png no/file: expected a file that can be written"),
    (["--prompts", "p.json"], "--prompts p.json: 4000 tokens and 128 new ones: expected at most 4096 together"),
])  # fmt: skip
def test_options_that_cannot_be_checked_end_with_2_and_one_line(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(json.dumps([[65] * 4000]))
    assert main(["check", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dflash-sglang check: {said}")


@pytest.mark.parametrize("flag", [["--context-length", "5000"], ["--context-length=5000"]])
def test_a_longer_context_that_is_asked_for_takes_longer_prompts(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(json.dumps([[65] * 4000]))
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["check", "--url", url, "--prompts", "p.json", *flag]) == 1  # no server is there
    assert "4000 tokens" not in capsys.readouterr().err


def test_a_running_server_that_does_not_answer_ends_with_1_and_its_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["check", "--url", url]) == 1
    assert f"dflash-sglang check: --url {url}: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_block_that_no_config_has_is_the_running_servers(tmp_path):
    class Running(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"speculative_num_draft_tokens": 6, "speculative_draft_window_size": null}')

        def log_message(self, *of: Any) -> None:
            pass

    target, draft = map(str, make_pair(tmp_path, draft={"block_size": None}))
    with HTTPServer(("127.0.0.1", 0), Running) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert _pair(Namespace(target=target, draft=draft, url=url), Flags()).spec.block_size == 6
        thread.join()
    for url in (None, f"http://127.0.0.1:{free_port()}"):
        with pytest.raises(BadSetting, match="block_size=None: expected .* Set --speculative-dflash-block-size"):
            _pair(Namespace(target=target, draft=draft, url=url), Flags())


@pytest.mark.parametrize("body", [
    b"[]", b"", b"{", b"\xff", b'{"speculative_algorithm":"DFLASH"}', None,
])  # fmt: skip
def test_another_service_is_told_from_a_server_in_one_line(body, tmp_path, monkeypatch, capsys):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *of: Any) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["check", "--url", url]) == 2
        thread.join()
    assert capsys.readouterr().err == (
        f"dflash-sglang check: --url {url}: expected an SGLang server, whose /server_info has model_path. "
        "Give its address without /v1.\n"
    )


@pytest.mark.parametrize("text", ["abc", "0"])
def test_a_number_of_prompts_that_is_none_names_the_range(text, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--prompts", text])
    assert f"argument --prompts: {text}: expected 1 to {len(held_out_prompts())}\n" in capsys.readouterr().err


def test_the_options_of_other_commands_are_no_launch_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["pair", "--tp-size", "2"])
    assert caught.value.code == 2 and "unrecognized arguments: --tp-size 2" in capsys.readouterr().err


def test_the_progress_bar_fills():
    assert [bar(share).count("#") for share in (0, 0.5, 1)] == [0, 12, 24] and len(bar(0.3)) == 26
