"""Real SGLang engines on the CPU platform: a server or `sgl.Engine`, float32, ended with the test.

They are forked from a process that has SGLang imported (`zygote.py`). `fresh=True` starts a new interpreter
instead, for a test about the launch itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_sglang.demo.launch import CPU_ENVIRONMENT, LAUNCH, new_server
from dflash_sglang.demo.server import Server, free_port
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import zygote

READY_TIMEOUT = 400.0  # seconds; importing SGLang alone takes tens on a busy machine
# The scheduler retracts requests every nine steps, as where a pool is full.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
BUILT_IN_WORKER = {"SGLANG_PLUGINS": "none"}  # the CPU platform stays, our plugin does not load


class EngineFailed(AssertionError):
    """A driver process that runs `sgl.Engine` ended with an error; the message ends with its output."""


def cpu_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every step has the block's width, unless a test's own DFLASH_SGLANG_CONFIG asks for another: what most tests
    count would depend on the machine's speed otherwise, and every start-up would measure it."""
    settings = json.loads((extra or {}).get(CONFIG_ENV, "{}"))
    return {
        **os.environ,
        **CPU_ENVIRONMENT,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
        CONFIG_ENV: json.dumps({"width": "block", **settings}),
    }


def engine_arguments(target: Path, draft: Path | None, **overrides: Any) -> dict[str, Any]:
    """Server arguments by their Python names; an override of None removes one.

    An idle scheduler sleeps, where by default it takes a core from the servers of other tests.
    """
    arguments: dict[str, Any] = dict(
        model_path=str(target),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        mem_fraction_static=0.5,
        max_total_tokens=20000,
        max_mamba_cache_size=512,  # without it recurrent states take half of the memory, and seconds to be zeroed
        sleep_on_idle=True,
    )
    if draft is not None:
        arguments |= dict(speculative_algorithm="DFLASH", speculative_draft_model_path=str(draft))
    return {key: value for key, value in {**arguments, **overrides}.items() if value is not None}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """`page_size=16` -> `--page-size 16`; True gives the bare flag, False none, a list its items."""
    flags: list[str] = []
    for key, value in arguments.items():
        if value is False:
            continue
        flags.append("--" + key.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return flags


def accepted_proposals(answers: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """{proposals: steps of these answers that accepted so many}; of copied text that is more than a block's."""
    histograms = (answer["meta_info"].get("spec_correct_drafts_histogram", []) for answer in answers)
    return sum((Counter(dict(enumerate(histogram))) for histogram in histograms), Counter())


@contextmanager
def serve(
    target: Path,
    draft: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = LAUNCH,
    fresh: bool = False,
    **arguments: Any,
) -> Iterator[Server]:
    """A ready `sglang.launch_server` on a free port; everything it started is ended on leaving the block.

    A `command` of its own is always a fresh interpreter.
    """
    with _started(target, draft, environment, command, fresh, arguments) as server:
        server.wait_ready(READY_TIMEOUT)
        yield server


_kept: dict[str, tuple[Server, ExitStack]] = {}  # the last one used last
_in_use: Counter[str] = Counter()
MOST_KEPT = 2  # servers of a test run's process that nobody uses


@contextmanager
def kept(
    target: Path, draft: Path | None = None, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Iterator[Server]:
    """The server of `serve`, with an empty prefix cache, which stays up for whoever asks for the same one next.

    For tests that leave no other trace on a server than its prefix cache and its log.
    """
    asked = engine_arguments(target, draft, **arguments)
    key = repr((sorted(asked.items()), sorted((environment or {}).items())))
    server, started = _kept.pop(key, (None, ExitStack()))
    if server is None or server.process.poll() is not None:
        server = started.enter_context(serve(target, draft, environment=environment, **arguments))
    else:
        server.post("/flush_cache?timeout=60")
    _kept[key] = server, started
    _in_use[key] += 1
    try:
        yield server
    finally:
        _in_use[key] -= 1
        end_kept(MOST_KEPT)


@atexit.register
def end_kept(most: int = 0) -> None:
    """Ends kept servers that nobody uses but for so many, the one used longest ago first."""
    unused = [key for key in _kept if not _in_use[key]]
    for key in unused[: max(len(unused) - most, 0)]:
        _kept.pop(key)[1].close()


@contextmanager
def serve_on_nodes(
    count: int,
    target: Path,
    draft: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[list[Server]]:
    """One server by `count` launchers, which stand for nodes; the first one is ready and answers requests."""
    joined = dict(nnodes=count, dist_init_addr=f"127.0.0.1:{free_port()}")
    with ExitStack() as nodes:
        servers = [
            nodes.enter_context(
                _started(target, draft, environment, LAUNCH, False, {**arguments, **joined, "node_rank": rank})
            )
            for rank in range(count)
        ]
        servers[0].wait_ready(READY_TIMEOUT)
        yield servers


@contextmanager
def _started(
    target: Path,
    draft: Path | None,
    environment: Mapping[str, str] | None,
    command: Sequence[str],
    fresh: bool,
    arguments: Mapping[str, Any],
) -> Iterator[Server]:
    kind = Server if fresh or command != LAUNCH else _ForkedServer
    if kind is _ForkedServer:
        arguments = {"skip_server_warmup": True, **arguments}
    with tempfile.TemporaryDirectory() as directory:
        with new_server(
            as_flags(engine_arguments(target, draft, **arguments)),
            environment=cpu_environment(environment),
            log=Path(directory) / "server.log",
            program=command,
            server_class=kind,
        ) as server:
            yield server


class _ForkedServer(Server):
    """Forked by the zygote, without warm-up, and ended at once: the orderly end of `Server` takes six seconds."""

    # Answered as soon as the schedulers are up, as HTTP is only then; /health asks them for a token, and sleeps.
    ready_path = "/model_info"
    poll_seconds = 0.1

    def __enter__(self) -> Server:
        self._process = zygote.start(self.command, self.environment, self.log)
        return self

    def stop(self) -> None:
        """Ends the launcher, which SGLang's processes follow, and half a second later what is left."""
        group = self.process.pid
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 0.5  # multiprocessing's resource tracker cleans up
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.02)
            os.killpg(group, signal.SIGKILL)


def greedy(
    server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int, **sampling: Any
) -> list[list[int]]:
    """Greedy output ids of all prompts, sent as one batch; EOS does not end a request unless asked to."""
    answers = server.generate(
        input_ids=[list(p) for p in prompts], sampling_params=greedy_params(max_new_tokens, **sampling)
    )
    return [answer["output_ids"] for answer in answers]


def greedy_params(max_new_tokens: int, **sampling: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}


def ask_at_once(server: Server, asked: Sequence[Mapping[str, Any]], at_once: int = 12) -> list[dict[str, Any]]:
    """The answers to these requests, so many at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: server.generate(**one), asked))


def run_engine(
    target: Path,
    draft: Path | None,
    requests: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 500,
    fresh: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Runs `sgl.Engine(**arguments)` in a process of its own; returns what each `generate(**request)` gave.

    Raises EngineFailed with the process's output when it ends with an error.
    """
    job = {"engine": engine_arguments(target, draft, **arguments), "requests": list(requests)}
    variables = cpu_environment(environment)
    variables["PYTHONPATH"] = ":".join(filter(None, [variables.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    with tempfile.TemporaryDirectory() as directory:
        answers, log = Path(directory) / "answers.json", Path(directory) / "engine.log"
        command = [sys.executable, "-m", "tests.support.engines", json.dumps(job), str(answers)]
        with (Server if fresh else _ForkedServer)(command, port=0, environment=variables, log=log) as engine:
            code = engine.process.wait(timeout)
        if not answers.exists():
            raise EngineFailed(f"sgl.Engine ended with exit code {code}\n{engine.log_text()[-8000:]}")
        return json.loads(answers.read_text())


def _drive(job: Mapping[str, Any], answers: Path) -> None:
    import sglang

    engine = sglang.Engine(**job["engine"])
    results = [engine.generate(**request) for request in job["requests"]]
    answers.write_text(json.dumps(results))
    engine.shutdown()


if __name__ == "__main__":
    _drive(json.loads(sys.argv[1]), Path(sys.argv[2]))
