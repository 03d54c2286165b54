"""Accept length of the trained pair at 1x, 4x and 16x its training length, with and without a window on the draft.

python -m bench.long_context --out FILE [--device cpu] [--multiples 1 4 16] [--prompts 8]
                             [--settings none 1024 256 1024+16 none@16 1024@16]

A prompt is held-out text of the running Python's standard library that fills the context up to the new tokens. A
server per setting, on a GPU all at once, on the CPU one after another. A setting is WINDOW[+SINKS][@FACTOR]: the
window of the draft in tokens or `none`, sinks, and the factor of YaRN by which target and draft are extended from
the training length, their weights as trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import report
from dflash_sglang import pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import ON_CPU, OURS, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server

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


def checkpoints(scratch: Path, factor: str) -> Mapping[str, str]:
    """The pair's directories, or copies whose RoPE is extended by YaRN with this factor, if one is given."""
    directories = pair.pair_directories()
    if not factor:
        return directories
    scaling = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": TRAINED}
    copies = {name: scratch / factor / name for name in directories}
    for name, copy in copies.items():
        source = Path(directories[name])
        if copy.exists():
            continue
        config = json.loads((source / "config.json").read_text())
        config |= {"rope_parameters": {"rope_theta": 10000.0, **scaling}, "rope_scaling": None}
        copy.mkdir(parents=True)
        (copy / "config.json").write_text(json.dumps(config))
        (copy / "model.safetensors").symlink_to(source / "model.safetensors")
    return {name: str(copy) for name, copy in copies.items()}


def server_of(setting: str, context: int, device: str, scratch: Path, mem_fraction: float = 0.3) -> Server:
    """The server of one setting, not started yet. mem_fraction: near 1 where larger servers start beside it."""
    window, _, factor = setting.partition("@")
    cpu = device == "cpu"
    flags = [
        *model_flags(OURS, **checkpoints(scratch, factor)), "--skip-tokenizer-init", *(ON_CPU if cpu else ()),
        "--context-length", str(context), "--max-total-tokens", str(3 * context),
        "--mem-fraction-static", str(mem_fraction),
        "--cuda-graph-max-bs-decode", "2", "--max-running-requests", "2", "--skip-server-warmup",
    ]  # fmt: skip
    if window != "none":
        size, _, sinks = window.partition("+")
        flags += ["--speculative-draft-window-size", size, "--speculative-draft-sink-size", sinks or "0"]
    longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return new_server(flags, environment={**environment(OURS, cpu=cpu), **longer}, log=scratch / f"{setting}.log")


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
    """{setting: {multiple: figures}}"""
    context = max(arguments.multiples) * TRAINED + 512
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        servers = {
            setting: server_of(setting, context, arguments.device, Path(directory))
            for setting in arguments.settings
        }

        def measured(server: Server) -> dict[str, Any]:
            wait_for(OURS, server)
            return measure(server, arguments.multiples, arguments.prompts)

        if arguments.device == "cpu":
            results = {}
            for setting, server in servers.items():
                with server:
                    results[setting] = measured(server)
            return results
        for server in servers.values():
            running.enter_context(server)
        with ThreadPoolExecutor(len(servers)) as pool:
            return dict(zip(servers, pool.map(measured, servers.values()), strict=True))


def claims_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A window of the training length costs no acceptance where the pair works at all, up to 4x."""
    what = "accept length with a window of the training length over none"
    claims = []
    for multiple in ("1x", "4x"):
        both = [results.get(setting, {}).get(multiple) for setting in (str(TRAINED), "none")]
        if all(both):
            with_window, without = (figures["new_tokens_after_the_first_per_step"] for figures in both)
            claims.append(report.at_least(f"{what}, {multiple}", round(with_window / without, 4), 0.95))
    return claims


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 4, 16])
    settings = ["none", "1024", "256", "1024+16", "none@16", "1024@16"]
    parser.add_argument("--settings", nargs="+", default=settings)
    parser.add_argument("--prompts", type=int, default=8, help="at 4x; four times as many at 1x, a quarter at 16x")
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
