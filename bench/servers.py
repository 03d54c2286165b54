"""The servers of a comparison on one GPU, or on the CPU platform: the options that say which, and their start."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Load
from dflash_sglang.demo.launch import BUILT_IN, LAUNCH, ON_CPU, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit


@dataclass(frozen=True)
class Candidate:
    """One server. ``flags``, ``environment``: what it alone has; ``accept_length``: forced, None for that of
    `--accept-length`; ``gpus``: as in CUDA_VISIBLE_DEVICES, all by default; ``program``: what Python runs."""

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    accept_length: float | None = None
    gpus: str | None = None
    program: tuple[str, ...] = LAUNCH


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What servers serve, how they are started, and where results and logs go."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of every server, one string")
    parser.add_argument("--dflash-flags", type=shlex.split, default=[], help="more flags of the DFLASH servers")
    parser.add_argument("--logs", type=Path, help="directory that keeps the servers' logs")


def add_options(parser: argparse.ArgumentParser, kinds: Sequence[str], accept_length: float) -> None:
    """The options of `parse` and `server_of`, with this accept length by default."""
    add_model_options(parser)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accept-length", type=float, default=accept_length)
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    parser.add_argument(
        "--token-ids", type=int, nargs=2, default=[1000, 100_000], help="of prompts, from and below"
    )
    parser.add_argument("--mem-fraction", type=float, default=0.7)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.device == "cpu" and BUILT_IN in arguments.kinds:
        parser.error(
            f"--kinds {' '.join(arguments.kinds)}: without this package SGLang serves no DFLASH on --device cpu; "
            f"leave {BUILT_IN} out"
        )
    return arguments


def server_of(
    candidate: Candidate, arguments: argparse.Namespace, scratch: Path, *, requests: int, tokens: int, **more: str
) -> Server:
    """A server of `requests` at a time and a KV pool of `tokens`, on a free port, not started yet.

    more: of its environment.
    """
    cpu = arguments.device == "cpu"
    flags = [
        *model_flags(candidate.kind, arguments.target, arguments.draft, arguments.dflash_flags),
        "--skip-tokenizer-init", "--max-running-requests", str(requests), "--min-free-slots-delay", "1",
        "--mem-fraction-static", str(arguments.mem_fraction), "--max-total-tokens", str(tokens),
        "--cuda-graph-max-bs-decode", str(requests), *candidate.flags, *arguments.flags, *(ON_CPU if cpu else ()),
    ]  # fmt: skip
    length = arguments.accept_length if candidate.accept_length is None else candidate.accept_length
    own = {"SGLANG_SIMULATE_ACC_LEN": str(length), **candidate.environment, **more}
    return new_server(
        flags,
        environment=environment_of(candidate.kind, cpu, candidate.gpus, **own),
        log=(arguments.logs or scratch) / f"{candidate.name}.log",
        program=candidate.program,
    )


def environment_of(kind: str, cpu: bool, gpus: str | None, **more: str) -> dict[str, str]:
    """The environment of one of several servers: of a kind, on the GPUs of that list (all by default)."""
    # Servers that start at the same time on the same GPUs find different amounts of memory free on each.
    out = {**environment(kind, cpu=cpu), "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", **more}
    return out if cpu or gpus is None else {**out, "CUDA_VISIBLE_DEVICES": gpus}


@contextlib.contextmanager
def together(
    candidates: Sequence[Candidate],
    arguments: argparse.Namespace,
    *,
    requests: int,
    tokens: int,
    compiled: bool = False,
) -> Iterator[dict[str, Server]]:
    """Ready servers by name, whose logs prove their workers. Raises ServerFailed.

    The first start fills the compilation caches that the others, started at once, then share; where they are
    `compiled` all start at once.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for batch in (candidates,) if compiled else (candidates[:1], candidates[1:]):
            for one in batch:
                server = server_of(one, arguments, scratch, requests=requests, tokens=tokens)
                servers[one.name] = stack.enter_context(server)
            for one in batch:
                wait_for(one.kind, servers[one.name])
        try:
            yield servers
        except (OSError, RuntimeError, ValueError):  # the logs may go with `scratch`
            for server in servers.values():
                print(server.log_tail(), file=sys.stderr)
            raise


def add_load_options(parser: argparse.ArgumentParser, concurrency: Sequence[int]) -> None:
    """The options of `at_each_concurrency`, with these numbers of requests by default."""
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(concurrency))
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--max-tokens", type=int, default=60_000, help="of a KV pool")


def load_of(arguments: argparse.Namespace, concurrency: int, **more: Any) -> Load:
    """Waves of so many requests."""
    count, token_ids = max(4, 2 * concurrency), range(*arguments.token_ids)
    return Load(concurrency, count, arguments.input, arguments.output, token_ids=token_ids, waves=True, **more)


def at_each_concurrency(
    module: str,
    candidates: Sequence[Candidate],
    arguments: argparse.Namespace,
    measure: Callable[[Mapping[str, Server], int], Any],
    claims: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
) -> int:
    """Report {concurrency: what `measure` gives}, with claims, after each of them. Returns the exit status."""
    figures: dict[str, Any] = {}
    status, most = 1, max(arguments.concurrency)
    with (
        signals_as_exit(),
        together(candidates, arguments, requests=most, tokens=arguments.max_tokens) as servers,
    ):
        for concurrency in arguments.concurrency:
            figures[str(concurrency)] = measure(servers, concurrency)
            # What is there, should the next concurrency not come.
            status = report.finish(module, arguments.out, claims(figures), figures=figures)
    return status
