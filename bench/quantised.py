"""The trained pair with its draft in every quantisation of `training.quantise`, against the draft in bfloat16.

python -m bench.quantised --out FILE [--schemes NAME ...] [--at-once 12]

Quantises the draft, serves the target in bfloat16 with each of them (`--at-once` servers together, one of them has
the bfloat16 draft) and sends the held-out prompts one by one, greedy. A scheme whose server does not start, or
runs another worker, is a claim that fails, with the reason; the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import report
from bench.pair import decode, pair_server
from bench.serve import OURS, PLAIN, wait_for
from dflash_sglang import pair
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


@contextlib.contextmanager
def started(servers: dict[str, Server]) -> Iterator[tuple[dict[str, Server], dict[str, str]]]:
    """(servers that are ready and run this package's worker, why the others are not), all started together."""
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server)
        ready, failed = {}, {}
        for name, server in servers.items():
            try:
                wait_for(OURS, server)
                ready[name] = server
            except (ServerFailed, RuntimeError) as error:  # the server's end, or another worker's log line
                failed[name] = str(error)[-3000:]
                print(name, "failed:", failed[name], flush=True)
        yield ready, failed


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
    bf16 = figures[BF16]["new_tokens_after_the_first_per_step"]
    for name, measured in figures.items():
        if name != BF16:
            ratio = measured["new_tokens_after_the_first_per_step"] / bf16
            what = f"{name}: accept length over bfloat16's"
            out.append(report.at_least(what, round(ratio, 4), 1 - TOLERANCE))
    for name, counted in launches.items():
        what, bound = f"{name}: launches of context KV per layer", f"<= {LAUNCHES_PER_LAYER}"
        if "failed" in counted:
            out.append(report.claim(what, counted["failed"], bound, False))
        else:
            # The write of all layers is one launch beside theirs.
            per_layer = (counted["launches"] - 1) / counted["layers"]
            out.append(report.at_most(what, round(per_layer, 2), LAUNCHES_PER_LAYER))
    return out + [
        report.claim(f"{name}: is served", reason, "a ready server", False) for name, reason in failed.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--at-once", type=int, default=12, help="servers that are up together")
    arguments = parser.parse_args()
    prompts = [list(text.encode()) for text in pair.held_out_prompts()]
    draft = Path(pair.pair_directories()["draft"])
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with pair_server(PLAIN, directory / "plain.log", SPEED_FLAGS) as server:
            read = read_inputs(draft)
            drafts = {n: quantise_checkpoint(n, directory / n, draft, read) for n in arguments.schemes}
            wait_for(PLAIN, server)
            plain = decode(server, prompts, NEW_TOKENS, temperature=0)
        with draft_server(draft, directory / f"{BF16}.log") as server:
            # Alone first: it fills the compilation caches that the others, started together, then share.
            wait_for(OURS, server)
            names, at_once = list(drafts), max(arguments.at_once - 1, 1)
            for start in range(0, len(names), at_once):
                wave = {n: draft_server(drafts[n], directory / f"{n}.log") for n in names[start : start + at_once]}
                with started(wave) as (ready, not_ready):
                    failed |= not_ready
                    for name, one in {BF16: server, **ready}.items():
                        try:
                            figures[name] = measure(one, prompts)
                        except OSError as error:  # the server ended, or answered with an HTTP error
                            failed[name] = f"{error}\n{one.log_tail()}"[-3000:]
                            continue
                        print(name, {k: v for k, v in figures[name].items() if k != "outputs"}, flush=True)
        launches = count_launches({BF16: draft, **drafts})
    for measured in figures.values():
        outputs = measured.pop("outputs")
        measured["outputs_equal_to_plain_decoding"] = sum(
            a == b for a, b in zip(outputs, plain["outputs"], strict=True)
        )
        measured["step_time_over_bf16"] = round(measured["step_ms"] / figures[BF16]["step_ms"], 4)
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


if __name__ == "__main__":
    sys.exit(main())
