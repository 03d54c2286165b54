"""The pure parts of `bench.parallel` and `bench.parallel_soak`: commands, load, claims, memory of a log."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import transformers

from bench import cluster, layouts, parallel, uneven
from bench.load import Load, Outcome, by_figure
from dflash_sglang.bench import random_pair
from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from tests.soak.requests import corpus_of


def flags_of(command: list[str]) -> dict[str, str | None]:
    """`--flag value` pairs of a command; None for a bare flag."""
    pairs = itertools.pairwise([*command, "--end"])
    return {a: (None if b.startswith("--") else b) for a, b in pairs if a.startswith("--") and a != "--end"}


@pytest.mark.parametrize("layout", layouts.LAYOUTS.values(), ids=lambda layout: layout.name)
def test_the_processes_of_a_layout_use_all_of_its_gpus_and_ports_of_their_own(layout, tmp_path):
    commands = [flags_of(layout.flags_of(node, 12000)) for node in range(layout.nodes)]
    for node, command in enumerate(commands):
        sizes = {name: int(command.get(f"--{name}-size") or 1) for name in ("tp", "dp")}
        attention = "--enable-dp-attention" in command
        assert sizes["tp"] * (1 if attention else sizes["dp"]) == layout.gpus
        assert sizes["dp"] == layout.replicas
        assert command.get("--node-rank") == (str(node) if layout.nodes > 1 else None)
        # A port for the group of ranks, but where each replica has a group of its own.
        assert ("--nccl-port" in command) == (layout.nodes == 1 and not layout.independent_replicas)
    nodes = cluster.Cluster(layout, PLAIN, ["--model-path", "TARGET"], 12000, {}, tmp_path).nodes
    assert [node.url for node in nodes] == [f"http://127.0.0.1:{12000 + node}" for node in range(layout.nodes)]
    for node, server in enumerate(nodes):
        flags = flags_of(server.command)
        assert (flags["--model-path"], flags["--port"]) == ("TARGET", str(12000 + node))
    assert len({command.get("--dist-init-addr") for command in commands}) == 1
    assert len({command.get("--base-gpu-id") for command in commands}) == layout.nodes


def test_the_layouts_are_those_of_the_docs():
    text = (random_pair.Path(__file__).parents[2] / "docs" / "guide" / "many-gpus.md").read_text()
    for layout in layouts.LAYOUTS.values():
        assert f"`{layout.name}`" in text
        assert " ".join(layout.flags) in text


def test_every_round_of_load_singles_out_the_next_rank_and_ends_nothing_but_the_aborted_phase():
    corpus = corpus_of(random_pair.pair_directories()["target"])
    for replicas in (1, 2, 4):
        rounds = list(itertools.islice(uneven.phases(replicas), uneven.PHASES * replicas))
        ranks = [phase.rank for phase in rounds if phase.name == "burst to one rank"]
        assert ranks == ([None] if replicas == 1 else list(range(replicas)))
    for seed, phase in enumerate(rounds[: uneven.PHASES]):
        asked = phase.requests(seed, corpus)
        assert len(asked) == phase.count
        assert {one.body.get("routed_dp_rank") for one in asked} == {phase.rank}
        assert all(one.abort for one in asked) == phase.all_aborted
    compared = uneven.compared(20, 7, corpus, 2)
    assert [one.body["routed_dp_rank"] for one in compared] == [0, 1] * 10
    assert all(one.greedy and one.abort is None for one in compared)
    assert uneven.astray(
        {"routed_dp_rank": 1}, [{"meta_info": {"dp_rank": 0}}, {"meta_info": {"dp_rank": 1}}]
    ) == [0]


def outcomes(tokens_per_second: list[float], step_ms: float = 10.0) -> dict[str, list[float]]:
    return by_figure([Outcome(rate, 6.02, step_ms) for rate in tokens_per_second])


def test_each_load_that_is_measured_is_kept_when_the_next_one_fails(monkeypatch, tmp_path):
    out = tmp_path / "parallel.json"
    asked: list[tuple[Load, int]] = []

    def take_turns(servers: dict, load: Load, rounds: int) -> dict[str, dict[str, list[float]]]:
        asked.append((load, rounds))
        if load.output_tokens == 601:
            raise RuntimeError("a rank is gone")
        return {kind: outcomes([1000.0]) for kind in (OURS, BUILT_IN)}

    monkeypatch.setattr(parallel, "take_turns", take_turns)
    for name in ("servers_of", "start", "stop_on_sigterm", "stop_together"):
        monkeypatch.setattr(parallel, name, lambda *_: {})
    loads = ["--concurrency", "1", "--also", "16:1021", "16:601", "--rounds", "2"]
    options = ["--layouts", "dpa2", *loads, "--pair", "DIR", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["parallel", *options])
    with pytest.raises(RuntimeError, match="a rank is gone"):
        parallel.main()
    assert [(load.concurrency, load.requests, load.output_tokens, rounds) for load, rounds in asked] == [
        (1, 2, 253, 2),
        (16, 32, 1021, 2),
        (16, 32, 601, 2),
    ]
    written = json.loads(out.read_text())
    assert list(written["figures"]["dpa2"]) == ["1", "16:1021"]
    assert [one["bound"] for one in written["claims"][::2]] == [">= 0.99", ">= 1.3"]


@pytest.mark.parametrize("name, ids", [
    ("qwen3-8b", [1, 9, 17, 25, 33]), ("qwen3-30b-a3b", [1, 12, 23, 34, 45]), ("small-moe", [1, 2, 3]),
    ("hybrid-9b", [1, 8, 15, 22, 29]),
])  # fmt: skip
def test_a_random_draft_reads_layers_that_its_target_has(name, ids):
    shape = random_pair.SHAPES[name]
    target = random_pair.target_config(shape, None)
    spec = DraftSpec.from_config(random_pair.draft_config(shape, target))
    assert list(spec.target_layer_ids) == ids


@pytest.mark.parametrize("name, model", [
    ("small-moe", "Qwen3MoeForCausalLM"), ("hybrid-9b", "Qwen3_5ForCausalLM"),
])  # fmt: skip
def test_a_random_pair_has_the_tensors_that_its_config_names(name, model, tmp_path, monkeypatch):
    """Experts, and gated delta nets of a small size."""
    from dflash_sglang.checkpoint.files import tensor_facts

    shape = random_pair.SHAPES[name]
    if name == "hybrid-9b":
        small = dict(hidden_size=64, intermediate_size=96, linear_num_key_heads=2, linear_num_value_heads=4)
        shape = replace(shape, common={**shape.common, "vocab_size": 64}, target={**shape.target, **small})
        monkeypatch.setitem(random_pair.SHAPES, name, shape)
    directories = random_pair.write_pair(tmp_path, name, layers=4)
    _, found = getattr(transformers, model).from_pretrained(directories["target"], output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    draft = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert draft["num_target_layers"] == 4 and "num_experts" not in draft
    features = len(draft["dflash_config"]["target_layer_ids"])
    facts = tensor_facts(tmp_path / "draft")
    assert facts["fc.weight"].shape == (draft["hidden_size"], features * draft["hidden_size"])
    only = random_pair.write_pair(tmp_path / "only", name, config_only=True)
    assert tensor_facts(random_pair.Path(only["target"])) == {}
