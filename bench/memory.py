"""Whether what SGLang leaves free beside its KV pools covers the largest prefill and the largest steps.

python -m bench.memory --target DIR --draft DIR --out FILE [--requests 48] [--passes 2] [--widths]
                       [--flags "--load-format dummy"] [--dflash-flags "--speculative-draft-load-format auto"]

One server of this package's worker with the memory settings that SGLang chooses. It serves the block's width; with
`--widths` it has graphs of every width, and the requests ask for the widest. A pass has a prompt of two whole
chunks, and a batch of as many requests as the server takes for each kind of request. The acceptance is forced, so
the weights may be random (`dflash_sglang.bench.random_pair`). Memory is read inside of the scheduler
(`bench.device_memory`).

SGLang gives the KV pools what is free once the models are loaded, but for a slack of (1 - mem_fraction_static).
What this package keeps of requests is taken before; graphs, workspaces and activations come out of the slack.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.device_memory import GB, installed, lines
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV

SAMPLED: Mapping[str, Any] = dict(temperature=0.7, top_p=0.95)
PREFILL = "prefill"
WIDTHS = '{"width": {"highest_min_width": 4096}}'  # whatever a request asks for
# Sampling parameters and fields of the requests of a batch.
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "greedy": (dict(temperature=0.0), {}),
    "sampled": (SAMPLED, {}),
    "filtered": (dict(temperature=0.7, top_k=50, top_p=0.95, min_p=0.05), {}),
    "penalised": (dict(SAMPLED, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1), {}),
    "biased": (dict(temperature=0.0, logit_bias={"5": 1.0}), {}),
    "logprobs": (dict(SAMPLED), dict(return_logprob=True, top_logprobs_num=5)),
}
Line = Mapping[str, Any]


def run_pass(server: Server, directory: Path, arguments: argparse.Namespace, ready: Line) -> dict[str, list[Line]]:
    """The steps of each kind, one after the other."""
    rng, steps = random.Random(0), {}

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(*arguments.token_ids) for _ in range(length)] for _ in range(count)]

    def ask(name: str, ids: list[list[int]], new_tokens: int, sampling: Mapping[str, Any], **fields: Any) -> None:
        server.post("/flush_cache?timeout=60")
        seen = len(lines(directory))
        params = dict(sampling, max_new_tokens=new_tokens, ignore_eos=True)
        if arguments.widths:  # the widest steps are the largest
            params["custom_params"] = {"dflash": dict.fromkeys(("min_width", "max_width"), ready["block"])}
        server.generate(input_ids=ids, sampling_params=params, **fields)
        steps[name] = [line for line in lines(directory)[seen:] if line["at"] == "step"]

    ask(PREFILL, prompts(1, 2 * ready["chunk"]), 2, KINDS["greedy"][0])
    for name, (sampling, fields) in KINDS.items():
        ask(name, prompts(ready["requests"], arguments.input), arguments.output, sampling, **fields)
    return steps


def alone(server: Server, directory: Path) -> int:
    """Bytes that are allocated when the second of two equal requests comes to an empty server."""
    for _ in range(2):
        server.post("/flush_cache?timeout=60")
        server.generate(input_ids=[[7] * 16], sampling_params=dict(temperature=0.0, max_new_tokens=8))
    return [line["alone"] for line in lines(directory) if "alone" in line][-1]


def figures_of(
    start: Mapping[str, Line], passes: Sequence[Mapping[str, Sequence[Line]]], allocated: Sequence[int]
) -> dict[str, Any]:
    """start: lines of sizing, sized and ready; passes: {kind: steps}; allocated: `alone` after
    each pass. GB (2**30 bytes) where a name ends so."""
    ready, last = start["ready"], passes[-1]

    def gb(number: float) -> float:
        return round(number / GB, 3)

    def least_free(steps: Mapping[str, Sequence[Line]]) -> int:
        return min(line["free"] for of_kind in steps.values() for line in of_kind)

    def step_of(kind: str) -> dict[str, Any]:
        largest = max(last[kind], key=lambda line: line["peak"] - line["before"])
        return {
            "shape": [largest[name] for name in ("mode", "requests", "tokens", "width")],
            "peak_gb": gb(largest["peak"] - largest["before"]),
            "allocated_gb": gb(max(line["peak"] for line in last[kind])),
        }

    least = [least_free(steps) for steps in passes]
    return {
        "slack_gb": gb(start["sizing"]["slack"]),
        "free_at_sizing_gb": gb(start["sizing"]["free"]),
        "pools_gb": gb(start["sizing"]["free"] - start["sized"]["free"]),
        "start_up_took_gb": gb(start["sized"]["free"] - ready["free"]),
        "serving_took_gb": gb(ready["free"] - min(least)),
        "least_free_gb": gb(min(least)),
        "later_passes_took_bytes": least[0] - min(least),
        "allocated_alone_grew_bytes": max(allocated) - allocated[0],
        "largest_prefill_tokens": max(line["tokens"] for line in last[PREFILL]),
        "largest_decode": [
            max(line[name] for kind in KINDS for line in last[kind] if line["mode"] == "DECODE")
            for name in ("requests", "width")
        ],
        "kinds": {kind: step_of(kind) for kind in last},
    }


def claims(figures: Mapping[str, Any], ready: Line, least_free: float) -> list[dict[str, Any]]:
    tokens, decode = figures["largest_prefill_tokens"], figures["largest_decode"]
    expected = [ready["requests"], ready["block"]]
    took = figures["start_up_took_gb"] + figures["serving_took_gb"]
    return [
        report.claim("tokens of the largest prefill", tokens, f"= {ready['chunk']}", tokens == ready["chunk"]),
        report.claim("requests and width of the largest step", decode, f"= {expected}", decode == expected),
        report.at_most(
            "taken by graphs, workspaces, the largest prefill and the largest steps, over what SGLang leaves "
            "beside the KV pools",
            round(took / figures["slack_gb"], 3) if figures["slack_gb"] else 0.0,
            1.0,
        ),
        report.at_least("GB of the device free at the tightest moment", figures["least_free_gb"], least_free),
        report.at_most(
            "bytes of the device that later passes take beyond the first", figures["later_passes_took_bytes"], 0
        ),
        report.at_most(
            "bytes that stay allocated after the passes beyond those before",
            figures["allocated_alone_grew_bytes"],
            0,
        ),
    ]


def server_of(arguments: argparse.Namespace, scratch: Path) -> Server:
    flags = [
        *model_flags(OURS, arguments.target, arguments.draft, arguments.dflash_flags),
        "--skip-tokenizer-init", "--min-free-slots-delay", "1",
        "--max-running-requests", str(arguments.requests), *arguments.flags,
    ]  # fmt: skip
    own = {
        **environment(OURS, chooses=arguments.widths),
        **({CONFIG_ENV: WIDTHS} if arguments.widths else {}),
        **installed(scratch),
        "SGLANG_SIMULATE_ACC_LEN": str(arguments.accept_length),
    }
    return new_server(flags, environment=own, log=(arguments.logs or scratch) / "server.log")


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="directory that keeps the server's log")
    parser.add_argument("--requests", type=int, default=48, help="at a time; SGLang's default with DFLASH")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt of a batch")
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--passes", type=int, default=2, help="after the first")
    parser.add_argument("--accept-length", type=float, default=3.2)
    parser.add_argument("--widths", action="store_true", help="graphs of every width, as servers have by default")
    parser.add_argument("--token-ids", type=int, nargs=2, default=[1000, 100_000])
    parser.add_argument("--least-free", type=float, default=0.5, help="bound of what must stay free, GB")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of the server, one string")
    parser.add_argument("--dflash-flags", type=shlex.split, default=[], help="more flags of its draft")
    arguments = parser.parse_args()
    with signals_as_exit(), tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with server_of(arguments, scratch) as server:
            wait_for(OURS, server)
            start = {line["at"]: line for line in lines(scratch) if line["at"] != "step"}
            passes, allocated = [], []
            for _ in range(1 + arguments.passes):
                passes.append(run_pass(server, scratch, arguments, start["ready"]))
                allocated.append(alone(server, scratch))
    figures = figures_of(start, passes, allocated)
    return report.finish(
        "bench.memory", arguments.out, claims(figures, start["ready"], arguments.least_free), figures=figures
    )


if __name__ == "__main__":
    sys.exit(main())
