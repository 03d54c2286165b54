"""The trained pair with its draft in every quantisation of `training.quantise`, against the draft in bfloat16.

python -m bench.quantised --out FILE [--schemes NAME ...]

Quantises the draft, serves the target in bfloat16 with each of them, all servers together, and sends the held-out
prompts one by one, greedy: to each server when it is ready, right after the one with the bfloat16 draft. A scheme
whose server does not start, or runs another worker, is a claim that fails, with the reason; the others go on.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench import report
from bench.pair import decode, pair_server, prompts_of_pair
from bench.quantised_table import launches_per_layer
from dflash_sglang import pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, PLAIN, wait_for
from dflash_sglang.demo.server import Server, ServerFailed
from training.calibrate import read_inputs
from training.quantise import SCHEMES, quantise_checkpoint

NEW_TOKENS = 128
TOLERANCE = 0.03
LAUNCHES_PER_LAYER = 3
BF16 = "bf16"
DECISION = re.compile(r"dflash_sglang context KV: (.*)")
SPEED_FLAGS = ["--sleep-on-idle", "--max-total-tokens", "20000", "--max-running-requests", "8"]


def draft_server(directory: Path, log: Path) -> Server:
    """A server of the trained target with the draft in `directory`, not started yet."""
    return pair_server(OURS, log, ["--speculative-draft-model-path", str(directory), *SPEED_FLAGS])


def as_ready(servers: dict[str, Server]) -> Iterator[tuple[str, str | None]]:
    """(name, None) of each started server when it is ready and runs this package's worker, (name, reason) of each
    that is not to be."""
    with ThreadPoolExecutor(len(servers)) as pool:
        waiting = {pool.submit(wait_for, OURS, server): name for name, server in servers.items()}
        for done in as_completed(waiting):
            try:
                done.result()
                yield waiting[done], None
            except (ServerFailed, RuntimeError) as error:  # the server's end, or another worker's log line
                yield waiting[done], str(error)[-3000:]


def measure(server: Server, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Figures of a ready server; `step_ms` is the time of a request over its verify steps."""
    figures = decode(server, prompts, NEW_TOKENS, temperature=0)
    seconds = len(prompts) * NEW_TOKENS / figures["tokens_per_second"]
    decisions = DECISION.findall(server.log_text())
    return {
        **figures,
        "step_ms": 1000 * seconds / figures["verify_steps"],
        "context_kv": decisions[-1] if decisions else None,
    }


def count_launches(directories: dict[str, Path]) -> dict[str, Any]:
    """Per draft what `bench.launches` prints, each in a process of its own; of those that fail, the reason."""

    def one(directory: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.launches", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        if done.returncode != 0:
            return {"failed": done.stderr[-1500:]}
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(len(directories)) as pool:
        return dict(zip(directories, pool.map(one, directories.values()), strict=True))


def claims(figures: dict[str, Any], launches: dict[str, Any], failed: dict[str, str]) -> list[dict[str, Any]]:
    """Per scheme: accept length within the tolerance of bfloat16's, launches, and whether it could be served."""
    out = []
    for name, measured in figures.items():
        what = f"{name}: accept length over bfloat16's"
        out.append(report.at_least(what, measured["accept_length_over_bf16"], 1 - TOLERANCE))
    for name, counted in launches.items():
        what, bound = f"{name}: launches of context KV per layer", f"<= {LAUNCHES_PER_LAYER}"
        if "failed" in counted:
            out.append(report.claim(what, counted["failed"], bound, False))
        else:
            out.append(report.at_most(what, round(launches_per_layer(counted), 2), LAUNCHES_PER_LAYER))
    return out + [
        report.claim(f"{name}: is served", reason, "a ready server", False) for name, reason in failed.items()
    ]


def beside_bf16(measured: dict[str, Any], bf16: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The figures of one scheme, and what they are to bfloat16's of the same turn and to plain decoding's."""
    outputs = measured.pop("outputs")
    length = "new_tokens_after_the_first_per_step"
    return {
        **measured,
        "bf16": {name: bf16[name] for name in (length, "step_ms", "tokens_per_second")},
        "accept_length_over_bf16": round(measured[length] / bf16[length], 4),
        "step_time_over_bf16": round(measured["step_ms"] / bf16["step_ms"], 4),
        "outputs_equal_to_plain_decoding": sum(a == b for a, b in zip(outputs, plain["outputs"], strict=True)),
    }


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    arguments = parser.parse_args()
    prompts = prompts_of_pair()
    draft = Path(pair.pair_directories()["draft"])
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    launches: dict[str, Any] = {}

    def finish() -> int:
        return report.finish(
            "bench.quantised",
            arguments.out,
            claims(figures, launches, failed),
            figures=figures,
            launches=launches,
            failed=failed,
            prompts=len(prompts),
            new_tokens=NEW_TOKENS,
        )

    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        unquantised = stack.enter_context(draft_server(draft, directory / f"{BF16}.log"))
        with pair_server(PLAIN, directory / "plain.log", SPEED_FLAGS) as server:
            read = read_inputs(draft)
            drafts = {n: quantise_checkpoint(n, directory / n, draft, read) for n in arguments.schemes}
            wait_for(PLAIN, server)
            plain = decode(server, prompts, NEW_TOKENS, temperature=0)
        # Its start has filled the compilation caches that the others, started together, share.
        wait_for(OURS, unquantised)
        servers = {n: stack.enter_context(draft_server(drafts[n], directory / f"{n}.log")) for n in drafts}
        for name, reason in as_ready(servers):
            if reason is not None:
                failed[name] = reason
                continue
            try:
                bf16 = measure(unquantised, prompts)
                figures[name] = beside_bf16(measure(servers[name], prompts), bf16, plain)
            except OSError as error:  # the server ended, or answered with an HTTP error
                failed[name] = f"{error}\n{servers[name].log_tail()}"[-3000:]
            finish()  # what is there, should the rest not come
        launches |= count_launches({BF16: draft, **drafts})
    return finish()


if __name__ == "__main__":
    sys.exit(main())
