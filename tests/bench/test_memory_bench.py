"""`bench.memory`: what its figures say of the steps that were recorded, and when a claim fails."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from bench import memory
from bench.device_memory import GB

START = {
    "sizing": dict(free=60 * GB, slack=10 * GB),
    "sized": dict(free=9 * GB),
    "ready": dict(free=6 * GB, chunk=8192, requests=48, block=16),
}


def step(mode: str, requests: int, tokens: int, width: int, before: float, peak: float, free: float) -> Any:
    shape = dict(mode=mode, requests=requests, tokens=tokens, width=width)
    return dict(**shape, before=int(before * GB), peak=int(peak * GB), free=int(free * GB))


def passes() -> list[dict[str, Any]]:
    one = {kind: [step("DECODE", 48, 768, 16, 61, 62, 5.5), step("DECODE", 12, 192, 16, 61, 61.5, 5)]
           for kind in memory.KINDS}  # fmt: skip
    one["logprobs"][0] |= dict(peak=64 * GB, free=2 * GB)
    one[memory.PREFILL] = [step("EXTEND", 1, 8192, 16, 60, 61, 4), step("EXTEND", 1, 8190, 16, 60, 61, 4)]
    return [copy.deepcopy(one), one]


def test_figures_are_those_of_the_tightest_moment_and_of_the_last_pass():
    figures = memory.figures_of(START, passes(), [7 * GB, 7 * GB])
    assert figures["pools_gb"] == 51.0 and figures["start_up_took_gb"] == 3.0
    assert figures["serving_took_gb"] == 4.0 and figures["least_free_gb"] == 2.0
    assert figures["kinds"]["logprobs"] == dict(shape=["DECODE", 48, 768, 16], peak_gb=3.0, allocated_gb=64.0)
    assert figures["kinds"]["greedy"]["peak_gb"] == 1.0
    claimed = memory.claims(json.loads(json.dumps(figures)), START["ready"], least_free=0.5)
    assert [one["value"] for one in claimed] == [8192, [48, 16], 0.7, 2.0, 0, 0]
    assert all(one["ok"] for one in claimed)


@pytest.mark.parametrize(
    ("what", "failed"),
    [("prefill", 0), ("batch", 1), ("slack", 2), ("free", 3), ("a later pass", 4), ("a leak", 5)],
)
def test_each_claim_fails_by_itself(what, failed):
    start, run, allocated = copy.deepcopy(START), passes(), [7 * GB, 7 * GB]
    least = 0.5
    if what == "prefill":
        run[1][memory.PREFILL][0]["tokens"] = 4096
        run[1][memory.PREFILL][1]["tokens"] = 4096
    elif what == "batch":
        for kind in memory.KINDS:
            run[1][kind][0]["requests"] = 40
    elif what == "slack":
        start["sizing"]["slack"] = 6 * GB
    elif what == "free":
        least = 2.5
    elif what == "a later pass":
        run[1]["penalised"][1]["free"] = 2 * GB - 512
    else:
        allocated[1] += 512
    claimed = memory.claims(memory.figures_of(start, run, allocated), start["ready"], least)
    assert [i for i, one in enumerate(claimed) if not one["ok"]] == [failed]
