"""The demo: what it starts, what it reports, and that nothing it started outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_sglang import cli
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from dflash_sglang.demo.measure import Run, stream_answer
from dflash_sglang.demo.report import Compared, Comparison
from dflash_sglang.demo.run import Setup
from dflash_sglang.demo.server import Server, ServerFailed, free_port
from tests.support import engines
from training.pair import pair_directories

WORKER_LINE = launch.SIGNATURE["ours"]
CPU = Setup(target="T", draft="D", gpu=False)
GPU = Setup(target="T", draft="D", gpu=True)

# Starts a grandchild that ignores SIGTERM, prints its pid, and then answers every GET with 200.
SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000"])
print("grandchild", child.pid, flush=True)
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""

# Presents our worker, answers every GET, and streams SENT to a POST; dies after that where it DIES, and before any
# answer to the POST where SENT is None.
STREAMS = """
import http.server, os, sys
print(WORKER, flush=True)
def die():
    print("Traceback (most recent call last):\\nRuntimeError: the reason", flush=True)
    os._exit(3)
class Streams(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if SENT is None:
            die()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in SENT:
            data = ("data: " + line + "\\n\\n").encode()
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
        if DIES:
            die()
        self.wfile.write(b"0\\r\\n\\r\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Streams).serve_forever()
"""
BROKEN_OFF = "the server broke off its answer"


def streaming(sent: list[str] | None, dies: bool) -> str:
    """The program of a server that streams so, and dies then or ends its answer."""
    return f"SENT, DIES, WORKER = {sent!r}, {dies}, {WORKER_LINE!r}\n{STREAMS}"


def fake_server(tmp_path: Path, program: str) -> Server:
    port = free_port()
    command = [sys.executable, "-c", program, str(port)]
    return Server(command, port=port, environment=dict(os.environ), log=tmp_path / "server.log")


def is_running(pid: int) -> bool:
    """True for a process that has not ended; a zombie that nobody waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_ended(pids: list[int], seconds: float = 15) -> list[int]:
    """The pids that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def comparison(last: int, dtype: str = "float32") -> Comparison:
    def run(ids: list[int], seconds: float, *accepted: int) -> Run:
        return Run([ids], seconds, *(accepted or (0, 0)))

    first = Compared("maths", run([1, 2, 3, 4], 2.0), run([1, 2, 3, 4], 0.5, 2, 4))
    second = Compared("list", run([5, 6, 7, 8], 2.0), run([5, 6, 7, last], 0.5, 2, 6))
    return Comparison("dflash_sglang 9.9", "cpu", dtype, 4, [first, second])


def test_the_servers_differ_in_speculation_and_use_the_cpu_platform_only_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for setup, dtype in ((CPU, "float32"), (GPU, "bfloat16")):
        speculation = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "D"]
        assert setup.flags("ours") == setup.flags("plain") + speculation and dtype in setup.flags("plain")
    monkeypatch.setenv("A", "b")
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # a user's
    on_cpu, on_gpu = (setup.server("ours", tmp_path).environment for setup in (CPU, GPU))
    assert on_cpu["DFLASH_SGLANG_REQUIRE"] == on_gpu["DFLASH_SGLANG_REQUIRE"] == "1" and on_cpu["A"] == "b"
    assert on_cpu["SGLANG_PLATFORM"] == "dflash_cpu" and on_cpu["OMP_NUM_THREADS"] == "3"
    assert "SGLANG_PLATFORM" not in on_gpu


def test_the_report_counts_identical_prompts_and_accepted_tokens() -> None:
    same, other = comparison(8), comparison(9)
    assert (same.all.identical, other.all.identical) == (True, False)
    told = other.as_json()
    assert told["worker"] == "dflash_sglang 9.9" and told["identical_prompts"] == 1 and told["speedup"] == 4.0
    assert told["accept_length"] == 3.5  # 10 proposals and 4 bonus tokens in 4 verify steps
    assert told["tokens_per_second"] == 8.0 and told["baseline_tokens_per_second"] == 2.0
    assert [one["accept_length"] for one in told["prompts"]] == [3.0, 4.0]
    rows = [row.split() for row in other.as_table().splitlines()]
    assert rows[1:4] == [
        ["maths", "2.0", "8.0", "4.00x", "3.00", "yes"],
        ["list", "2.0", "8.0", "4.00x", "4.00", "no"],
        ["all", "2.0", "8.0", "4.00x", "3.50", "no"],
    ]
    assert "ties may fall either way" in comparison(9, "bfloat16").as_table()


def test_a_server_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with fake_server(tmp_path, "print('the reason'); raise SystemExit(3)") as server:
        with pytest.raises(ServerFailed, match="exit code 3(.|\n)*the reason"):
            server.wait_ready(60)


def test_a_stream_gives_its_events_and_has_failed_where_it_does_not_end_with_done(tmp_path: Path) -> None:
    a, ab, done = '{"text": "a"}', '{"text": "ab"}', "[DONE]"
    for sent, dies in (([a], True), ([a], False), ([a, ab, done], False)):
        said = f"{BROKEN_OFF}: expected a stream that ends with .DONE."
        events: list[str] = []
        with fake_server(tmp_path, streaming(sent, dies)) as server:
            server.wait_ready(60)
            with nullcontext() if done in sent else pytest.raises(ServerFailed, match=said):
                events += (json.dumps(event) for event in server.stream(text="x"))
        assert done not in sent or events == [a, ab]


def test_a_demo_whose_server_dies_ends_with_its_name_its_error_and_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it answers; `test_bench_servers` has one that dies while it streams."""
    programs = {"plain": streaming(None, dies=True).replace(WORKER_LINE, ""), "ours": streaming(None, dies=True)}
    logs = {kind: tmp_path / kind for kind in programs}
    for log in logs.values():
        log.mkdir()
    monkeypatch.setattr(Setup, "server", lambda self, kind, _: fake_server(logs[kind], programs[kind]))
    monkeypatch.setattr(cli, "pair_directories", pair_directories)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    said = "Remote end closed connection without response"
    assert lines[0].startswith(f"dflash-sglang demo: the plain server: {said}")
    assert lines[1] == "RuntimeError: the reason" and lines[-1] == "RuntimeError: the reason"
    assert lines[2].startswith("--- the last lines of ")


def test_leaving_the_block_by_an_error_ends_the_server_and_its_children(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="another worker .*check that SGLANG_PLUGINS does not leave"):
        with fake_server(tmp_path, SERVES) as server:
            server.wait_ready(60)
            grandchild = int(server.log_text().split()[1])
            assert is_running(grandchild)
            launch.wait_for("ours", server)  # whose log does not name our worker
    assert wait_until_ended([server.process.pid, grandchild]) == []


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


@pytest.mark.slow
def test_a_demo_that_is_ended_leaves_no_process_behind() -> None:
    """By SIGTERM; `test_bench_servers` has Ctrl-C."""
    command = [sys.executable, "-m", "dflash_sglang.cli", "demo"]
    silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    demo = subprocess.Popen(command, **silent, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not (started := descendants(demo.pid)):
            assert demo.poll() is None and time.monotonic() < deadline, "the demo started no server"
            time.sleep(0.1)
        time.sleep(2)
        started = descendants(demo.pid)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 143
        assert wait_until_ended(started) == []
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.slow
def test_the_demo_serves_the_pair_with_our_worker_losslessly_and_reports_both_speeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its servers forked; those of the interrupted demos are launched as users launch them."""
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--json", "--max-new-tokens", "64"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["worker"].startswith("dflash_sglang ")
    assert result["identical"] is True and result["identical_prompts"] == len(result["prompts"]) == 6
    assert result["tokens"] > 6 * 20 and result["accept_length"] > 1.3
    ratio = result["tokens_per_second"] / result["baseline_tokens_per_second"]
    assert result["speedup"] == pytest.approx(ratio, abs=0.02) and ratio > 0


def test_an_answer_is_shown_as_it_comes_without_half_characters() -> None:
    written: list[str] = []
    facts = {"spec_verify_ct": 2, "spec_num_correct_drafts": 3}
    events = [{"text": text, "output_ids": [1], "meta_info": facts} for text in ("a", "a\ufffd", "a\u00e9\nb")]
    run = stream_answer(SimpleNamespace(stream=lambda **_: iter(events)), "prompt", 8, written.append)
    assert [piece for piece in written if piece] == ["a", "\u00e9\nb"] and run.accept_length == 2.5
