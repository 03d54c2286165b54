"""Nothing of this package takes memory of a GPU while requests run, whatever they ask for.

`device_memory` reads torch's figures in the scheduler, `scheduler_hooks`' "firsts" what buffers this package has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import device_memory
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from tests.support.scheduler_hooks import hooked
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MANY, NEW_TOKENS, WARM, PASSES = 8, 64, 2, 3
SEGMENT = 2 << 20  # of torch's; requests meet in other prefills from pass to pass
SAMPLED = dict(temperature=0.8, top_p=0.95)
# Of each kind sampling parameters and fields of the request.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (dict(temperature=0.0), {}),
    "sampled": (dict(SAMPLED), {}),
    "filtered": (dict(temperature=0.7, top_k=50, top_p=0.95, min_p=0.05), {}),
    "penalised": (dict(SAMPLED, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1), {}),
    "biased": (dict(temperature=0.0, logit_bias={"5": 1.0}), {}),
    "logprobs": (dict(SAMPLED), dict(return_logprob=True, top_logprobs_num=5)),
    "penalised, greedy": (dict(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.2), {}),
    "no end at first": (dict(temperature=0.0, min_new_tokens=30, ignore_eos=False), {}),
    "grammar": (dict(temperature=0.0, regex="[a-z_ ]{40,60}", ignore_eos=False), {}),
    "grammar, sampled": (dict(SAMPLED, regex="[a-z_ ]{40,60}", ignore_eos=False), {}),
    "logprobs, greedy": (dict(temperature=0.0), dict(return_logprob=True, top_logprobs_num=2)),
    "logprobs of the prompt": (dict(SAMPLED), dict(return_logprob=True, logprob_start_len=0)),
    "narrow": (dict(temperature=0.0, custom_params={"dflash": {"max_width": 2}}), {}),
}


class Watched(NamedTuple):
    server: Server
    records: Path


@pytest.fixture(scope="module", params=["block", {"widths": [1, 4, 16]}], ids=["block", "widths"])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    records = tmp_path_factory.mktemp("records")
    own = {CONFIG_ENV: json.dumps({"width": request.param})}
    environment = {**DEVICE_ENVIRONMENT, **hooked(records, "firsts", "support.device_memory", **own)}
    flags = dict(max_running_requests=MANY, cuda_graph_max_bs_decode=MANY, min_free_slots_delay=1)
    with serve(TARGET, DRAFT, environment=environment, skip_tokenizer_init=None, **flags, **ON_DEVICE) as server:
        yield Watched(server, records)
        print(server.log_tail(40))


def prompts() -> list[list[int]]:
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[300 * i : 300 * i + 40 + 11 * i]) for i in range(MANY)]


def soak(server: Server, records: Path) -> dict[str, list[dict[str, Any]]]:
    """The steps of each kind with a full batch of it."""
    steps = {}
    for name, (sampling, fields) in KINDS.items():
        seen = len(device_memory.lines(records))
        ask(server, prompts(), sampling, fields)
        steps[name] = [line for line in device_memory.lines(records)[seen:] if line["requests"] == MANY]
    return steps


def mix(server: Server) -> None:
    """All kinds at once, more requests than run together."""
    with ThreadPoolExecutor(len(KINDS)) as pool:
        list(pool.map(lambda kind: ask(server, prompts()[:2], *kind), KINDS.values()))


def ask(server: Server, ids: list[list[int]], sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    params = dict(dict(max_new_tokens=NEW_TOKENS, ignore_eos=True), **sampling)
    answers = server.generate(input_ids=ids, sampling_params=params, **fields)
    assert all(answer["meta_info"]["completion_tokens"] > 0 for answer in answers)


def test_a_soak_of_all_kinds_of_requests_takes_no_memory_once_each_has_run(watched):
    server, records = watched
    for _ in range(WARM):
        soak(server, records)
        mix(server)
    allocated, reserved = [alone(server, records)], device_memory.lines(records)[-1]["reserved"]
    passes = []
    for _ in range(PASSES):
        passes.append(soak(server, records))
        allocated.append(alone(server, records))
    grown = device_memory.lines(records)[-1]["reserved"] - reserved
    mix(server)
    allocated.append(alone(server, records))
    assert len(set(allocated)) == 1, f"allocated without requests, after each pass: {allocated}"
    assert grown <= 4 * SEGMENT, f"torch has asked for {grown} bytes more of the device"
    made = {where for _, _, buffers in lines(records / "firsts.jsonl") for where in map(tuple, buffers)}
    assert made == set(), "buffers of this package that no start-up has made"
    print({name: spread(steps) for name, steps in passes[-1].items()})
    for name in KINDS:
        first, *_, last = (max(line["peak"] for line in steps[name]) for steps in passes)
        assert last <= first + SEGMENT, f"{name}: the peak of its steps went from {first} to {last} bytes"


def alone(server: Server, records: Path) -> int:
    """Bytes that are allocated when the second of two equal requests comes to an empty server."""
    for _ in range(2):
        server.post("/flush_cache?timeout=60")
        server.generate(input_ids=[[7] * 16], sampling_params=dict(temperature=0.0, max_new_tokens=8))
    return [line["alone"] for line in device_memory.lines(records) if "alone" in line][-1]


def spread(steps: list[dict[str, Any]]) -> tuple[int, int]:
    """Bytes by which what is allocated before steps of one kind differs, and their peak beyond that."""
    before = [line["before"] for line in steps]
    return max(before) - min(before), max(line["peak"] - line["before"] for line in steps)


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]
