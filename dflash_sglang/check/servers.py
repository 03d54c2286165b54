"""The two servers of a check: one with DFLASH, launched or running, and one without, of the same settings."""

from __future__ import annotations

import http.client
import json
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.bench.steps import WIDTH_STATE
from dflash_sglang.check.arguments import Settings
from dflash_sglang.check.parting import ROUNDING
from dflash_sglang.checkpoint import read_config
from dflash_sglang.checkpoint.files import config_directory
from dflash_sglang.demo import launch
from dflash_sglang.demo.launch import OURS, PLAIN
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Client, Server, ServerFailed

NAMES = {OURS: "DFLASH", PLAIN: "plain"}
POOL = 20_000  # tokens of a CPU server's KV pool, at least
# Settings of a running server that the plain one is launched with, by their names in /server_info.
COPIED = ("dtype", "quantization", "kv_cache_dtype", "tp_size", "context_length", "attention_backend", "device")
DTYPES = {"half": "float16", "float": "float32"}  # other names of SGLang's


@dataclass(frozen=True)
class Facts:
    """What a server with DFLASH tells of itself."""

    dtype: str
    block: int  # tokens of the served block
    ours: bool  # whether this package's worker runs
    settings: Mapping[str, Any]  # those of COPIED that are set


@contextmanager
def dflash_server(settings: Settings, directory: Path, progress: Progress) -> Iterator[Client]:
    """The server with DFLASH: the running one, or one that ends with the block.

    Raises ServerFailed where it does not answer, and BadSetting where a running one serves another pair.
    """
    if settings.url is None:
        with _launched(settings, OURS, settings.flags, directory, progress) as server:
            yield server
        return
    client = Client(settings.url)
    try:
        _check_pair(settings, _server_info(client))
        yield client
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ServerFailed(f"--url {settings.url}: {error}") from error


@contextmanager
def plain_server(settings: Settings, facts: Facts, directory: Path, progress: Progress) -> Iterator[Client]:
    """A server without speculation that ends with the block; with the settings of a running server, if there is
    one, and with launch flags given here in their place."""
    flags = settings.flags
    if settings.url is not None:
        copied = ((f"--{name.replace('_', '-')}", str(value)) for name, value in facts.settings.items())
        flags = (*(word for pair in copied for word in pair), *flags)
    with _launched(settings, PLAIN, flags, directory, progress) as server:
        yield server


def facts_of(settings: Settings, client: Client) -> Facts:
    """Raises BadSetting for a dtype whose rounding is not known."""
    info = client.get("/server_info")
    dtype = DTYPES.get(info["dtype"], info["dtype"])
    if dtype == "auto":
        dtype = _auto_dtype(settings.pair.target)
    if dtype not in ROUNDING:
        raise BadSetting(f"--dtype {dtype}: expected one of {', '.join(ROUNDING)}")
    return Facts(
        dtype=dtype,
        block=info["speculative_num_draft_tokens"],
        ours=any(WIDTH_STATE in state for state in info["internal_states"]),
        settings={name: info[name] for name in COPIED if info.get(name) is not None},
    )


def _auto_dtype(target: str) -> str:
    """What SGLang serves a checkpoint in without --dtype: the checkpoint's own, or half of float32."""
    config = read_config(config_directory(target, None))
    own = config.get("dtype") or config.get("torch_dtype") or "float32"
    if own != "float32":
        return own
    return "bfloat16" if config.get("model_type", "").startswith("gemma") else "float16"


@contextmanager
def _launched(
    settings: Settings, kind: str, flags: tuple[str, ...], directory: Path, progress: Progress
) -> Iterator[Server]:
    name = NAMES[kind]
    more = settings.draft_flags if kind == OURS else ()
    own = [] if settings.gpu else [*launch.ON_CPU, "--sleep-on-idle", "--mem-fraction-static", "0.5"]
    if not settings.gpu:
        own += ["--max-total-tokens", str(_pool(settings))]
    server = launch.new_server(
        [*own, *launch.model_flags(kind, settings.pair.target, settings.pair.draft, more), *flags],
        environment=launch.environment(kind, cpu=not settings.gpu),
        log=directory / f"{name}.log",
    )
    with server:
        progress.begin(f"starting the {name} server")
        launch.wait_for(kind, server, progress.update)
        progress.end("ready")
        with server.reported(f"the {name} server"):
            yield server


def _pool(settings: Settings) -> int:
    longest = max(map(len, settings.prompts)) + settings.max_new_tokens + 3 * settings.pair.spec.block_size
    return max(settings.concurrency * longest, POOL)


def _server_info(client: Client) -> Mapping[str, Any]:
    """Of a running server. Raises BadSetting where it is not one of SGLang's."""
    info: Any = None
    try:
        info = client.get("/server_info")
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.NOT_FOUND:
            raise
    except ValueError:  # no JSON, or no text
        info = None
    if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
        expected = "an SGLang server, whose /server_info has model_path"
        raise BadSetting(f"--url {client.url}: expected {expected}. Give its address without /v1.")
    return info


def _check_pair(settings: Settings, info: Mapping[str, Any]) -> None:
    found = info.get("speculative_algorithm")
    if found != "DFLASH":
        raise BadSetting(f"--url {settings.url}: its --speculative-algorithm is {found}: expected DFLASH")
    for option, ours, field in (
        ("--target", settings.pair.target, "model_path"),
        ("--draft", settings.pair.draft, "speculative_draft_model_path"),
    ):
        if not _same(ours, theirs := str(info.get(field))):
            raise BadSetting(f"{option} {ours}: expected {theirs}, which --url {settings.url} serves")


def _same(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()
