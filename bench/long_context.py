"""Accept length of the trained pair at 1x, 4x and 16x its training length, with and without a window on the draft.

python -m bench.long_context --out FILE [--device cpu] [--multiples 1 4 16] [--windows none 1024 256 1024+16]
                             [--prompts 8] [--yarn 16]

A prompt is held-out text of the running Python's standard library that fills the context up to the new tokens. A
server per window: on a GPU all at once, on the CPU one after another. Windows are SIZE or SIZE+SINKS tokens.
`--yarn F`: target and draft extended by YaRN, factor F of the training length; weights stay as trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import report
from bench.serve import ENVIRONMENT, OURS, wait_for
from dflash_sglang import pair
from dflash_sglang.demo.server import Server, free_port

RECORD = json.loads((Path(pair.__file__).parent / "record.json").read_text())["training"]
TRAINED: int = RECORD["generated"]["length"]  # bytes, of the target's windows and of the draft's sequences
NEW_TOKENS = 64
BOS, EOS = 256, 257


def held_out_text() -> list[int]:
    """The files that neither model was trained on, as far as this Python has them, each in its BOS and EOS."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / name for name in RECORD["corpus"]["held_out_files"] if (library / name).is_file()]
    return [token for file in files for token in (BOS, *file.read_bytes(), EOS)]


def prompts_of(length: int, count: int) -> list[list[int]]:
    """`count` stretches of the text that begin evenly apart, `length` tokens each."""
    text = held_out_text()
    starts = range(0, len(text) - length, (len(text) - length) // count)
    return [text[start : start + length] for start in starts[:count]]


def checkpoints(scratch: Path, yarn: float | None) -> Mapping[str, str]:
    """The pair's directories, or copies whose RoPE is extended by YaRN."""
    directories = pair.pair_directories()
    if yarn is None:
        return directories
    scaling = {"rope_type": "yarn", "factor": yarn, "original_max_position_embeddings": TRAINED}
    for name, source in directories.items():
        config = json.loads((Path(source) / "config.json").read_text())
        config |= {"rope_parameters": {"rope_theta": 10000.0, **scaling}, "rope_scaling": None}
        (scratch / name).mkdir()
        (scratch / name / "config.json").write_text(json.dumps(config))
        (scratch / name / "model.safetensors").symlink_to(Path(source) / "model.safetensors")
    return {name: str(scratch / name) for name in directories}


def windowed_server(window: str, pair_of: Mapping[str, str], context: int, device: str, log: Path) -> Server:
    """A server of the pair whose draft has the window, not started yet."""
    port = free_port()
    flags = [
        "--model-path", pair_of["target"], "--speculative-draft-model-path", pair_of["draft"],
        "--speculative-algorithm", "DFLASH", "--skip-tokenizer-init", "--port", str(port), "--device", device,
        "--context-length", str(context), "--max-total-tokens", str(3 * context), "--mem-fraction-static", "0.3",
        "--cuda-graph-max-bs-decode", "2", "--max-running-requests", "2", "--skip-server-warmup",
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT[OURS], "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if device == "cpu":
        flags += ["--dtype", "float32"]
        environment |= {"SGLANG_PLATFORM": "dflash_cpu", "OMP_NUM_THREADS": "1"}
    if window != "none":
        size, _, sinks = window.partition("+")
        flags += ["--speculative-draft-window-size", size, "--speculative-draft-sink-size", sinks or "0"]
    return Server(
        [sys.executable, "-m", "sglang.launch_server", *flags], port=port, environment=environment, log=log
    )


def measure(server: Server, multiples: Sequence[int], prompts: int) -> dict[str, Any]:
    """{multiple: figures} of a ready server; fewer prompts of the longest contexts."""
    return {
        f"{multiple}x": decode(
            server, prompts_of(multiple * TRAINED - NEW_TOKENS, max(1, prompts * 4 // multiple))
        )
        for multiple in multiples
    }


def decode(server: Server, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Greedy decoding of prompts one by one, each prefilled by a request before: accept length and speed."""
    tokens, steps, elapsed = 0, 0, 0.0
    for prompt in prompts:
        server.generate(input_ids=prompt, sampling_params=dict(temperature=0, max_new_tokens=1))
        start = time.perf_counter()
        sampling = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        answer = server.generate(input_ids=prompt, sampling_params=sampling)
        elapsed += time.perf_counter() - start
        tokens += len(answer["output_ids"]) - 1
        steps += answer["meta_info"]["spec_verify_ct"]
    return {
        "prompts": len(prompts),
        "verify_steps": steps,
        "new_tokens_after_the_first_per_step": round(tokens / steps, 3),
        "tokens_per_second": round(tokens / elapsed, 1),
    }


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """{window: {multiple: figures}}"""
    context = max(arguments.multiples) * TRAINED + 512
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        scratch = Path(directory)
        pair_of = checkpoints(scratch, arguments.yarn)
        servers = {
            window: windowed_server(window, pair_of, context, arguments.device, scratch / f"{window}.log")
            for window in arguments.windows
        }
        if arguments.device == "cpu":
            results = {}
            for window, server in servers.items():
                with server:
                    wait_for(OURS, server)
                    results[window] = measure(server, arguments.multiples, arguments.prompts)
            return results
        for server in servers.values():
            running.enter_context(server)
        for server in servers.values():
            wait_for(OURS, server)
        with ThreadPoolExecutor(len(servers)) as pool:
            figures = pool.map(
                lambda server: measure(server, arguments.multiples, arguments.prompts), servers.values()
            )
            return dict(zip(servers, figures, strict=True))


def claims_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At the training length a window of that length changes nothing; at every length drafts are accepted."""
    per_step = "new_tokens_after_the_first_per_step"
    claims = [
        report.at_least(f"accept length, window {window}, {multiple}", figures[per_step], 1.0)
        for window, by_multiple in results.items()
        for multiple, figures in by_multiple.items()
    ]
    if {"none", str(TRAINED)} <= results.keys() and "1x" in results["none"]:
        with_window, without = (results[window]["1x"][per_step] for window in (str(TRAINED), "none"))
        ratio = round(with_window / without, 4)
        what = "accept length at 1x, window of the training length over none"
        claims.append(report.claim(what, ratio, "within 2% of 1", abs(ratio - 1) <= 0.02))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--windows", nargs="+", default=["none", "1024", "256", "1024+16"])
    parser.add_argument("--prompts", type=int, default=8, help="at 4x; four times as many at 1x, a quarter at 16x")
    parser.add_argument("--yarn", type=float)
    arguments = parser.parse_args()
    results = measure_all(arguments)
    return report.finish(
        "bench.long_context",
        arguments.out,
        claims_of(results),
        figures=results,
        trained_length=TRAINED,
        new_tokens=NEW_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main())
