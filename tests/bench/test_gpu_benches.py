"""The programs of `bench/`: what they compare, what a claim is made of, what they leave of a run that ended."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import (
    cluster,
    layouts,
    load,
    paired,
    parallel,
    recurrent,
    serve,
    servers,
    startup,
    step_profile,
    uneven,
)
from bench.like_for_like import GROUPS, candidate, expected_length, others
from bench.load import Answer, Load, Outcome, ask, by_figure, decode_seconds
from bench.widths import ACCEPTANCE
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
from tests.soak.requests import corpus_of
from training.pair import pair_directories

ROOT = Path(__file__).parents[2]
[GOOD] = ACCEPTANCE["good"]


def values(claimed: list[dict[str, Any]]) -> list[tuple[float, str, bool]]:
    return [(one["value"], one["bound"], one["ok"]) for one in claimed]


def of_rates(*rates: float) -> dict[str, list[float]]:
    return {"by_steps": list(rates)}


# ---- What is compared ------------------------------------------------------------------------------------------


def test_like_for_like_both_sides_have_one_format_one_width_and_one_acceptance() -> None:
    for group in GROUPS.values():
        for server in (one for one in group.servers if one.startswith("ours")):
            [built_in], chosen = others(f"{server}_16", group), others(server, group)
            assert built_in.startswith("built_in") and set(chosen) - {"plain"} == {built_in}
            assert ("plain" in chosen) == ("plain" in group.servers)
    ours, built_in = (candidate(name, (), GOOD) for name in ("ours_dense", "built_in_dense"))
    assert ours.flags == built_in.flags == ("--speculative-draft-model-quantization", "unquant")
    settings = PluginConfig.from_mapping(json.loads(ours.environment[CONFIG_ENV]))
    assert settings.draft_head == "as_is" and settings.width.highest_min_width == 16
    assert ours.environment["DFLASH_SGLANG_FORCED"] == built_in.environment["DFLASH_SGLANG_FORCED"]
    assert "draft_head" not in json.loads(candidate("ours", (), GOOD).environment[CONFIG_ENV])


def test_each_side_of_a_pair_has_the_package_of_its_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # as figures.sh does; a server inherits it
    (tmp_path / "dflash_sglang").mkdir()
    (tmp_path / "dflash_sglang" / "__init__.py").touch()
    found = paired.candidates(tmp_path, "")
    paired.require_checkouts(found, os.environ)
    unsafe = [dataclasses.replace(one, environment={**one.environment, "PYTHONSAFEPATH": ""}) for one in found]
    with pytest.raises(ValueError, match=f"before: expected the package of {tmp_path}, found {ROOT}"):
        paired.require_checkouts(unsafe, os.environ)
    *both, last = paired.candidates(ROOT / "other", "", no_trees=True)
    assert [one.name for one in both] == ["before", "after"] and last.name == "no_trees"
    assert json.loads(last.environment[CONFIG_ENV])["width"] == {"trees": []}
    assert last.environment["PYTHONPATH"] == both[1].environment["PYTHONPATH"]


def test_the_built_in_worker_is_refused_on_a_cpu(monkeypatch, capsys) -> None:
    pair = [option for role, where in pair_directories().items() for option in (f"--{role}", where)]
    for program in (serve, step_profile, startup):
        options = [*pair, "--device", "cpu", "--token-ids", "5", "200", "--input", "16", "--mem-fraction", "0.3"]
        monkeypatch.setattr(sys, "argv", ["program", *options, "--out", "FILE", "--kinds", OURS, BUILT_IN])
        with pytest.raises(SystemExit):
            program.main()
        assert "--kinds ours built_in: without this package SGLang serves no DFLASH" in capsys.readouterr().err


# ---- Claims ----------------------------------------------------------------------------------------------------


def test_a_claim_is_a_ratio_of_medians_against_the_bound_of_its_load() -> None:
    variant = serve._variant("fp8=PYTHONPATH=/x DFLASH_SGLANG_CONFIG='{\"a\": 1}' --fp8 --x '1 2' A=1")
    assert variant.environment == {"PYTHONPATH": "/x", "DFLASH_SGLANG_CONFIG": '{"a": 1}'}
    assert (variant.name, variant.kind, variant.flags) == ("ours_fp8", OURS, ("--fp8", "--x", "1 2", "A=1"))
    figures = {"32": {"greedy": {n: {"step_ms": [ms]} for n, ms in ((OURS, 9), (BUILT_IN, 10), ("ours_fp8", 8))}}}
    assert values(serve.claims(figures, 1.0, 1.05, {("greedy", "32"): 0.85})) == [
        (0.9, "<= 0.85", False),
        (0.8, "<= 0.85", True),
    ]
    del figures["32"]["greedy"][BUILT_IN]  # ours is held against its variant then
    assert values(serve.claims(figures, 1.0, 1.05, {}, variant_bound=1.005)) == [(1.125, "<= 1.005", False)]

    names = [OURS, PLAIN, BUILT_IN, "ours_16", "ours_8"]
    of_32 = {OURS: of_rates(96, 10, 300), PLAIN: of_rates(50, 50, 50), BUILT_IN: of_rates(64, 65, 64)}
    of_32 |= {"ours_16": of_rates(60, 60, 60), "ours_8": of_rates(100, 99, 100)}
    of_64 = {**of_32, PLAIN: of_rates(90, 192, 90)}
    claimed = recurrent.claims({"32": of_32, "64": of_64}, names)
    assert values(claimed) == [(0.96, ">= 0.97", False), (1.5, ">= 1.5", True), (0.96, ">= 0.97", False)]
    # Of a round that was broken off, nothing counts; nothing is claimed of a load that somebody lacks.
    of_32[OURS]["by_steps"].append(1)
    assert recurrent.claims({"32": of_32, "1": {OURS: of_rates(9)}}, names) == claimed[:2]


def test_tokens_are_counted_at_the_accept_length_of_the_long_run(monkeypatch) -> None:
    figures = {"by_width": [{"16": [30, 0], "1": [10, 0]}]}
    for server, of, length in (("built_in", {}, 6.42), ("ours", figures, (3 * 6.42 + 1) / 4), ("plain", {}, 1.0)):
        assert expected_length(server, of, 0, GOOD) == pytest.approx(length, abs=0.01)
    steps = {"16": [100, 0], "1": [50, 2]}
    assert paired.rate(steps, 2.0, 8) == pytest.approx(8 * (100 * 6.42 + 50) / 2, rel=0.001)

    counted = iter([{"16": 10, "1": 0}, {"16": 40, "1": 10}])

    def told(server: Any) -> dict[str, Any]:
        steps = next(counted)
        return {"steps": steps, "probes": dict.fromkeys(steps, 0)}

    monkeypatch.setattr(recurrent, "told", told)
    monkeypatch.setattr(recurrent, "occupy", lambda *_: None)
    monkeypatch.setattr(recurrent, "watch", lambda *_: Outcome(1000.0, 5.0, 7.0))
    ours = recurrent.measure(None, OURS, Load(8, 1), 6.0)
    assert ours["by_width"] == {"16": [30, 0], "1": [10, 0]}
    assert ours["by_steps"] == pytest.approx(1000 * (3 * 6.42 + 1) / 4 / 5, rel=0.001)


def test_each_load_that_was_measured_is_kept_when_the_next_one_fails(monkeypatch, tmp_path) -> None:
    def turns(servers: Any, load: Load, rounds: int) -> dict[str, Any]:
        if load.concurrency == 32:
            raise RuntimeError("a rank is gone")
        return {kind: by_figure([Outcome(rate, 6.0, ms)]) for kind, rate, ms in ((OURS, 9, 9), (BUILT_IN, 9, 10))}

    monkeypatch.setattr(parallel, "take_turns", turns)
    monkeypatch.setattr(serve, "measure", lambda servers, _, n: {"greedy": turns(servers, Load(n, 1), 1)})
    monkeypatch.setattr(servers, "together", lambda *_, **__: contextlib.nullcontext({}))
    for name in ("servers_of", "start", "stop_on_sigterm", "stop_together"):
        monkeypatch.setattr(parallel, name, lambda *_: {})
    out, loads = tmp_path / "out.json", ["--concurrency", "1", "32", "--out", str(tmp_path / "out.json")]
    for program, options, figures, claimed in (
        (serve, ["--target", "T", "--draft", "D"], (), [(0.9, "<= 1.03", True)]),
        (parallel, ["--layouts", "dpa2", "--pair", "DIR"], ("dpa2",), [(1.0, ">= 0.99", True)]),
    ):
        monkeypatch.setattr(sys, "argv", ["program", *options, *loads])
        with pytest.raises(RuntimeError, match="a rank is gone"):
            program.main()
        written = json.loads(out.read_text())
        kept = written["figures"]
        for name in figures:
            kept = kept[name]
        assert list(kept) == ["1"] and values(written["claims"])[:1] == claimed


# ---- A load ----------------------------------------------------------------------------------------------------


class Stub:
    """A server that gives a request its first token at once, and when as many are there as come at a time the
    rest of all, in 5 steps of 10 ms."""

    url = "URL"

    def __init__(self, at_a_time: int) -> None:
        self.arrived: list[list[int]] = []
        self.lock, self.all_there = threading.Lock(), threading.Barrier(at_a_time)

    def post(self, path: str) -> None:
        self.flushed = path

    def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert sampling_params["stream_interval"] == sampling_params["max_new_tokens"] == 31
        with self.lock:
            self.arrived.append(input_ids)
        yield {"meta_info": {}}
        self.all_there.wait(10)
        time.sleep(0.05)
        yield {"meta_info": {"completion_tokens": 31, "spec_verify_ct": 5}}


def test_a_step_is_timed_from_when_all_of_a_wave_have_their_first_token() -> None:
    four_at_a_time, stub = Load(4, 8, 16, 31, waves=True), Stub(4)
    outcome = load.run(stub, four_at_a_time)
    assert (len(stub.arrived), outcome.accept_length, stub.flushed) == (8, 6.2, "/flush_cache?timeout=60")
    assert {tuple(ids) for ids in stub.arrived[:4]} == {tuple(ids) for ids in four_at_a_time.prompts()[:4]}
    assert 10 <= outcome.step_ms < 20
    answers = ask(Stub(4), dataclasses.replace(four_at_a_time, pause=0.2))
    assert min(answer.asked for answer in answers[4:]) >= 0.2 + max(answer.last for answer in answers[:4])
    wave = [Answer(asked=0.0, first=1.0, last=5.0, tokens=31, verify_steps=5), Answer(0.0, 3.0, 6.0, 31, 5)]
    assert (decode_seconds(wave, wave=True), decode_seconds(wave, wave=False)) == (5.0, 7.0)
    stub.stream = lambda **_: iter([{"meta_info": {"completion_tokens": 31, "spec_verify_ct": 5}}])
    with pytest.raises(RuntimeError, match="1 of 1 requests failed on URL: an answer came in one piece"):
        ask(stub, Load(1, 1, 16, 31))


def test_every_round_of_uneven_load_singles_out_the_next_rank() -> None:
    corpus = corpus_of(pair_directories()["target"])
    for replicas in (1, 2, 4):
        rounds = list(itertools.islice(uneven.phases(replicas), uneven.PHASES * replicas))
        ranks = [phase.rank for phase in rounds if phase.name == "burst to one rank"]
        assert ranks == ([None] if replicas == 1 else list(range(replicas)))
    for seed, phase in enumerate(rounds[: uneven.PHASES]):
        asked = phase.requests(seed, corpus)
        assert len(asked) == phase.count and {one.body.get("routed_dp_rank") for one in asked} == {phase.rank}
        assert all(one.abort for one in asked) == phase.all_aborted


# ---- Layouts ---------------------------------------------------------------------------------------------------


def flags_of(command: list[str]) -> dict[str, str | None]:
    """`--flag value` pairs of a command; None for a bare flag."""
    pairs = itertools.pairwise([*command, "--end"])
    return {a: (None if b.startswith("--") else b) for a, b in pairs if a.startswith("--") and a != "--end"}


@pytest.mark.parametrize("layout", layouts.LAYOUTS.values(), ids=lambda layout: layout.name)
def test_the_processes_of_a_layout_use_all_of_its_gpus_and_ports_of_their_own(layout, tmp_path) -> None:
    commands = [flags_of(layout.flags_of(node, 12000)) for node in range(layout.nodes)]
    for node, command in enumerate(commands):
        sizes = {name: int(command.get(f"--{name}-size") or 1) for name in ("tp", "dp")}
        attention = "--enable-dp-attention" in command
        assert sizes["tp"] * (1 if attention else sizes["dp"]) == layout.gpus and sizes["dp"] == layout.replicas
        assert command.get("--node-rank") == (str(node) if layout.nodes > 1 else None)
        # A port for the group of ranks, but where each replica has a group of its own.
        assert ("--nccl-port" in command) == (layout.nodes == 1 and not layout.independent_replicas)
    nodes = cluster.Cluster(layout, PLAIN, ["--model-path", "TARGET"], 12000, {}, tmp_path).nodes
    for node, server in enumerate(nodes):
        flags = flags_of(server.command)
        assert server.url == f"http://127.0.0.1:{12000 + node}"
        assert (flags["--model-path"], flags["--port"]) == ("TARGET", str(12000 + node))
    assert len({command.get("--dist-init-addr") for command in commands}) == 1
    assert len(nodes) == len({command.get("--base-gpu-id") for command in commands}) == layout.nodes
    guide = (ROOT / "docs" / "guide" / "many-gpus.md").read_text()
    assert f"`{layout.name}`" in guide and " ".join(layout.flags) in guide
