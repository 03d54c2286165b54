"""Time to the first token where nixl moves KV from a prefill to a decode server, beside that of one server.

python -m bench.transfers --target DIR --draft DIR --out FILE [--input 1024 4096] [--concurrency 1 8] [--rounds 3]
                          [--decode-gpu 1]

First comes a server that does both, alone, then the two servers together, by default on one GPU. Needs the package
`nixl`. A wave of prompts is there at once; there is no router, so each goes to both servers from here. Bytes are
those that the prefill server counts per transfer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench import report
from bench.servers import Candidate, add_load_options, add_options, parse, together
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS
from dflash_sglang.demo.server import Server, free_port
from dflash_sglang.demo.signals import signals_as_exit

ONE_SERVER, APART = "one_server", "apart"
HOST = "127.0.0.1"
OUTPUT = 8  # tokens of an answer
SENT = 1.01  # bytes over those of the KV rows of target and draft, at most: nothing else is large
TRANSFER = "sglang:kv_transfer"  # begins the names of a prefill server's counters

Ask = Callable[[Sequence[int]], Iterator[Any]]  # events of an answer


def bytes_per_token(config: Mapping[str, Any], element: int = 2) -> int:
    """K and V of a token in all layers. config: a checkpoint's; element: bytes of a number."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * head_dim * element)


def counted(metrics: str, name: str) -> float:
    """The sum over all labels of a series in the text of /metrics; 0 if it is not there."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def transferred(before: str, after: str, tokens: int) -> dict[str, float]:
    """What a prefill server has sent between two texts of /metrics, prompts of so many tokens."""
    names = dict(megabytes="total_mb_sum", milliseconds="latency_ms_sum", requests="total_mb_count")
    sent = {
        key: counted(after, f"{TRANSFER}_{name}") - counted(before, f"{TRANSFER}_{name}")
        for key, name in names.items()
    }
    if not sent["requests"]:
        raise RuntimeError(f"the prefill server counted no transfer: expected {TRANSFER}_total_mb in its /metrics")
    return {
        "requests": sent["requests"],
        "bytes_per_token": round(sent["megabytes"] * 2**20 / tokens, 1),
        "milliseconds_per_request": round(sent["milliseconds"] / sent["requests"], 3),
    }


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """figures: as in the report"""
    rows = sum(figures["kv_bytes_per_token"].values())
    return [
        report.at_most(
            f"bytes per token over those of the KV rows of target and draft, {name}",
            round(measured["transfer"]["bytes_per_token"] / rows, 4),
            SENT,
        )
        for name, measured in figures.get(APART, {}).items()
    ]


def asks_one(server: Server) -> Ask:
    return lambda prompt: server.stream(input_ids=prompt, sampling_params=_sampling())


def asks_both(prefill: Server, decode: Server, bootstrap_port: int) -> Ask:
    rooms = random.Random(0)

    def ask(prompt: Sequence[int]) -> Iterator[Any]:
        room = dict(bootstrap_host=HOST, bootstrap_port=bootstrap_port, bootstrap_room=rooms.getrandbits(62))
        request = dict(input_ids=prompt, sampling_params=_sampling(), **room)
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(lambda: prefill.generate(**request))
            yield from decode.stream(**request)
            prefilled.result()

    return ask


def _sampling() -> dict[str, Any]:
    return dict(max_new_tokens=OUTPUT, temperature=0, ignore_eos=True)


def wave(ask: Ask, prompts: Sequence[Sequence[int]]) -> list[float]:
    """ms to the first token of each of these prompts, which are there at once."""

    def first(prompt: Sequence[int]) -> float:
        start = time.perf_counter()
        answer = ask(prompt)
        next(answer)
        elapsed = time.perf_counter() - start
        for _ in answer:
            pass
        return round(1000 * elapsed, 3)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(first, prompts))


def measure(ask: Ask, caches: Server, arguments: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, tokens prefilled, figures) of each length and concurrency. caches: the server with a prefix cache."""
    rng = random.Random(1)
    for tokens in arguments.input:
        for concurrency in arguments.concurrency:
            rounds = []
            for _ in range(1 + arguments.rounds):
                caches.post("/flush_cache?timeout=60")
                prompts = [rng.choices(range(*arguments.token_ids), k=tokens) for _ in range(concurrency)]
                rounds.append(wave(ask, prompts))
            name = f"{tokens} tokens, concurrency {concurrency}"
            found = dict(first_token_ms=rounds[1:], median_ms=round(statistics.median(sum(rounds[1:], [])), 3))
            print(name, found, flush=True)
            yield name, tokens * concurrency * len(rounds), found


def main() -> int:
    parser = script_parser(__doc__, conflict_handler="resolve")
    add_options(parser, [OURS], accept_length=6.4)
    add_load_options(parser, [1, 8])
    parser.add_argument("--input", type=int, nargs="+", default=[1024, 4096], help="tokens of a prompt")
    parser.add_argument("--decode-gpu", type=int, default=0, help="of the decode server; the others have GPU 0")
    arguments = parse(parser)
    port, environment = free_port(), {"SGLANG_HOST_IP": HOST}
    over = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(port))
    mode = "--disaggregation-mode"
    one = Candidate(ONE_SERVER, OURS)
    prefill = Candidate("prefill", OURS, (mode, "prefill", *over, "--enable-metrics"), environment)
    on = ("--base-gpu-id", str(arguments.decode_gpu)) if arguments.decode_gpu else ()
    decode = Candidate("decode", OURS, (mode, "decode", *over, *on), environment)
    configs = {name: Path(getattr(arguments, name)) / "config.json" for name in ("target", "draft")}
    element = 4 if arguments.device == "cpu" else 2
    figures: dict[str, Any] = {
        "kv_bytes_per_token": {
            name: bytes_per_token(json.loads(path.read_text()), element) for name, path in configs.items()
        }
    }
    room = dict(requests=max(arguments.concurrency), tokens=arguments.max_tokens)
    with signals_as_exit():
        with together([one], arguments, **room) as servers:
            server = servers[ONE_SERVER]
            figures[ONE_SERVER] = {name: found for name, _, found in measure(asks_one(server), server, arguments)}
        figures[APART] = {}
        with together([prefill, decode], arguments, **room) as servers:
            sends = servers["prefill"]
            ask, before = asks_both(sends, servers["decode"], port), sends.text("/metrics")
            for name, tokens, found in measure(ask, sends, arguments):
                after = sends.text("/metrics")
                figures[APART][name] = {**found, "transfer": transferred(before, after, tokens)}
                before = after
    return report.finish("bench.transfers", arguments.out, claims(figures), figures=figures)


if __name__ == "__main__":
    sys.exit(main())
