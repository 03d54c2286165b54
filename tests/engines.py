"""Real SGLang engines on the CPU platform: a server or `sgl.Engine`, float32, ended with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_sglang.demo.server import Server, free_port

READY_TIMEOUT = 400.0  # seconds; importing SGLang alone takes tens on a busy machine
BUILT_IN_WORKER = {"SGLANG_PLUGINS": "none"}  # the CPU platform stays, our plugin does not load


class EngineFailed(AssertionError):
    """A driver process that runs `sgl.Engine` ended with an error; the message ends with its output."""


def cpu_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {
        **os.environ,
        "SGLANG_PLATFORM": "dflash_cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def engine_arguments(target: Path, draft: Path | None, **overrides: Any) -> dict[str, Any]:
    """Server arguments by their Python names; an override of None removes one."""
    arguments: dict[str, Any] = dict(
        model_path=str(target),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
        max_total_tokens=20000,
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


@contextmanager
def serve(
    target: Path,
    draft: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = ("-m", "sglang.launch_server"),
    **arguments: Any,
) -> Iterator[Server]:
    """A ready `sglang.launch_server` on a free port; everything it started is ended on leaving the block."""
    port = free_port()
    flags = as_flags(engine_arguments(target, draft, **arguments))
    with tempfile.TemporaryDirectory() as directory:
        with Server(
            [sys.executable, *command, *flags, "--port", str(port)],
            port=port,
            environment=cpu_environment(environment),
            log=Path(directory) / "server.log",
        ) as server:
            server.wait_ready(READY_TIMEOUT)
            yield server


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


def run_engine(
    target: Path,
    draft: Path | None,
    requests: Sequence[Mapping[str, Any]],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 500,
    **arguments: Any,
) -> list[Any]:
    """Runs `sgl.Engine(**arguments)` in a process of its own; returns what each `generate(**request)` gave.

    Raises EngineFailed with the process's output when it ends with an error.
    """
    job = {"engine": engine_arguments(target, draft, **arguments), "requests": list(requests)}
    with tempfile.TemporaryDirectory() as directory:
        answers = Path(directory) / "answers.json"
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(job), str(answers)],
            env=cpu_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
        if not answers.exists():
            raise EngineFailed(f"sgl.Engine ended with exit code {process.returncode}\n{output[-8000:]}")
        return json.loads(answers.read_text())


def _drive(job: Mapping[str, Any], answers: Path) -> None:
    import sglang

    engine = sglang.Engine(**job["engine"])
    results = [engine.generate(**request) for request in job["requests"]]
    answers.write_text(json.dumps(results))
    engine.shutdown()


if __name__ == "__main__":
    _drive(json.loads(sys.argv[1]), Path(sys.argv[2]))
