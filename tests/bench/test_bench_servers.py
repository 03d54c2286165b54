"""`dflash-sglang bench`: its servers, the proof of which worker ran, and the outcome of a load."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang import __version__
from dflash_sglang.bench import load, profile, sweep
from dflash_sglang.bench.load import LoadFailed, Outcome
from dflash_sglang.bench.steps import no_steps
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server, ServerFailed
from tests.support.bench_runs import PAIR
from tests.unit.demo.test_demo import SERVES, fake_server, streaming, wait_until_ended

OURS_LINE = f"[12:00:00] dflash_sglang {__version__} worker active: draft=x"
BUILT_IN_LINE = "[12:00:00] Initialized DFLASH draft runner. attention_backend=fa3"
# As SGLang's launcher logs a scheduler that could not start.
FAILED = """
print("[12:00:01] Scheduler hit an exception: Traceback (most recent call last):")
print('  File "scheduler.py", line 1, in run')
print("RuntimeError: Not enough memory; increase --mem-fraction-static")
print("[12:00:02] Received sigquit from a child process")
raise SystemExit(1)
"""


def test_a_log_proves_one_kind_of_worker():
    other, older = BUILT_IN_LINE.replace("DFLASH", "DSpark"), OURS_LINE.replace(__version__, "0.0.1")
    proven = {
        "plain": {"": None, BUILT_IN_LINE: "has", OURS_LINE: "has"},
        "built_in": {BUILT_IN_LINE: None, "": "lacks", OURS_LINE: "lacks", other: None},
        "ours": {OURS_LINE: None, "": "lacks", BUILT_IN_LINE: "has", older: "lacks"},
    }
    for kind, logs in proven.items():
        for log, verb in logs.items():
            said = f"{kind}: another worker runs than expected, the log {verb} "
            with pytest.raises(ServerFailed, match=said) if verb else contextlib.nullcontext():
                launch.assert_worker(kind, log)


class Fake(Server):
    """Runs `program` in place of SGLang, as every server of a run; knows the processes it started."""

    program = ""
    pids: list[int] = []

    def __init__(self, command: list[str], **rest: Any):
        port = command[command.index("--port") + 1]
        super().__init__([sys.executable, "-c", self.program, port], **rest)

    def __enter__(self) -> Server:
        super().__enter__()
        self.pids.append(self.process.pid)
        return self


@pytest.fixture
def fake(monkeypatch):
    """The class of the servers that a run starts; no load generator is imported."""
    monkeypatch.setattr(launch, "Server", Fake)
    monkeypatch.setattr(load, "generator", lambda: None)
    monkeypatch.setattr(sweep, "steps_of", lambda server: no_steps())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Fake, "pids", [])
    return Fake


def test_a_run_ends_where_another_worker_answers(fake, tmp_path, capsys):
    fake.program = f"print({BUILT_IN_LINE!r}, flush=True)\n{SERVES}"
    assert main(["bench", *PAIR, "--out", str(tmp_path), "--servers", "ours"]) == 1
    error = capsys.readouterr().err
    assert f"the log has {launch.SIGNATURE['built_in']!r} ({tmp_path}/logs/ours.log)" in error
    assert wait_until_ended(fake.pids) == [] and len(fake.pids) == 1
    assert not (tmp_path / "bench.json").exists()


def test_a_server_that_does_not_start_is_reported_by_its_own_error(fake, tmp_path, capsys):
    fake.program = FAILED
    assert main(["bench", *PAIR, "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    log = tmp_path / "logs" / "plain.log"
    assert lines[0] == (
        f"dflash-sglang bench: plain: RuntimeError: Not enough memory; increase --mem-fraction-static ({log})"
    )
    assert lines[-1] == "where memory is short, --in-turn runs one server at a time"
    assert "Received sigquit" in log.read_text()


def test_a_server_that_dies_before_the_first_token_of_a_profile_ends_it_at_once_with_its_log(tmp_path):
    server, progress = fake_server(tmp_path, streaming([], dies=True)), Progress(io.StringIO())
    with server:
        server.wait_ready(60)
        begin = time.monotonic()
        with pytest.raises(ServerFailed) as failed, server.reported("ours"):
            profile.take_apart(server, "ours", [{"text": "x"}, {"text": "y"}], tmp_path / "traces", progress)
        assert time.monotonic() - begin < profile.TIMEOUT / 4
    lines = str(failed.value).splitlines()
    assert lines[1] == lines[-1] == "RuntimeError: the reason" and lines[0].startswith("ours: ")


def test_ctrl_c_ends_the_servers_and_says_so(fake, monkeypatch, tmp_path, capsys):
    fake.program = SERVES

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "run", interrupted)
    assert main(["bench", *PAIR, "--out", str(tmp_path), "--servers", "plain"]) == 130
    assert capsys.readouterr().err.endswith("interrupted, servers ended\n")
    grandchild = int((tmp_path / "logs" / "plain.log").read_text().split()[1])
    assert wait_until_ended([*fake.pids, grandchild]) == []


def answer(tokens: int, accept_length: float) -> SimpleNamespace:
    return SimpleNamespace(
        output_len=tokens, spec_accept_length=accept_length, prompt_len=40, cached_tokens=tokens
    )


RESULT = dict(
    errors=["", ""], completed=2, output_throughput=100.0, median_tpot_ms=4.0, median_ttft_ms=30.0,
    duration=0.41, p99_ttft_ms=50.0, p99_tpot_ms=6.0,
)  # fmt: skip


def test_an_outcome_counts_the_steps_of_the_load_and_none_of_the_warm_up():
    found = load.outcome(RESULT, [answer(8, 8.0), answer(25, 5.0), answer(16, 4.0)], speculative=True)
    # 41 tokens, of which the prefills gave two, in 5 + 4 steps
    assert found == Outcome(100.0, 250.0, 30.0, 50.0, 4.0, 6.0, 39 / 9, 41 / 80, 2, 41, 0.41)
    assert load.outcome(RESULT, [answer(8, 0.0)] * 3, speculative=False).accept_length == 1.0
    # an answer of one token has no step
    assert load.outcome(RESULT, [answer(1, 0.0), answer(9, 4.5)], speculative=True).accept_length == 8 / 2
    with pytest.raises(LoadFailed, match="each of 2 answers ended at its first token"):
        load.outcome(RESULT, [answer(1, 0.0)] * 2, speculative=True)
    with pytest.raises(LoadFailed, match="1 of 2 requests failed; the first: .'Bad Request: too long'"):
        load.outcome({**RESULT, "errors": ["", "Bad Request: too long"], "completed": 1}, [], speculative=True)
