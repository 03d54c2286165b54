"""`bench.verify_attention`: the whole command line on a CPU, where outputs are checked, and its claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import verify_attention as bench
from dflash_sglang.kernels.attention import tree_keys
from dflash_sglang.patches import flash3

TINY = [
    "--device", "cpu", "--dtype", "float32", "--layers", "2", "--heads", "6", "--kv-heads", "2", "--head-dim",
    "64", "--nodes", "5", "18", "--requests", "1", "--contexts", "20", "--context-length", "400", "--page-size",
    "4",
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["bench.verify_attention", *TINY, "--out", str(out), *options])
    return bench.main(), json.loads(out.read_text())


def test_a_chain_and_trees_have_the_outputs_of_dense_attention(monkeypatch, tmp_path):
    status, report = run(monkeypatch, tmp_path / "report.json")
    assert status == 0 and list(report["figures"]) == ["difference"]  # nothing is timed on a CPU
    assert list(report["figures"]["difference"]) == ["5", "18"]
    for found in report["figures"]["difference"].values():
        assert list(found) == [bench.CHAIN, bench.MERGE]
        assert all(list(of) == ["0", "1", "37", "300"] and max(of.values()) < 1e-5 for of in found.values())


def see_siblings(queries: Any, prefix: Any, tree: Any, scale: float) -> None:
    chains = [(1 << node + 1) - 1 for node in range(tree.slots.shape[1])]
    ancestors = tree.ancestors.new_tensor(chains).expand_as(tree.ancestors)
    tree_keys.add_tree_keys(queries, prefix, tree._replace(ancestors=ancestors), scale)


def write_no_numbers(queries: Any, prefix: Any, tree: Any, scale: float) -> None:
    prefix.out.fill_(float("nan"))


@pytest.mark.parametrize("broken", [see_siblings, write_no_numbers])
def test_a_broken_merge_fails_and_the_chain_does_not(monkeypatch, tmp_path, broken):
    monkeypatch.setattr(flash3, "add_tree_keys", broken)
    status, report = run(monkeypatch, tmp_path / "report.json", "--nodes", "18")
    assert status == 1
    assert [claim["ok"] for claim in report["claims"]] == [True, False]
    assert report["claims"][1]["what"].startswith("prefix + merge, 18 nodes")


def test_the_overhead_over_a_chain_is_claimed_for_one_request():
    def step(nodes: int, requests: int, merge: float) -> dict[str, Any]:
        us = {bench.CHAIN: 400.0, bench.MERGE: merge, bench.CASCADE: 1000.0}
        return dict(nodes=nodes, requests=requests, context=256, us=us)

    steps = [step(16, 1, 650.0), step(16, 2, 900.0), step(32, 1, 751.0), step(64, 1, 900.0)]
    claims = bench.overheads(steps)
    assert [(claim["value"], claim["bound"], claim["ok"]) for claim in claims] == [
        (250.0, "<= 250", True),
        (351.0, "<= 350", False),
    ]


def test_a_page_table_that_is_too_narrow_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "report.json", "--contexts", "390")
    assert "--context-length 400: expected the longest context or more, 408" in capsys.readouterr().err
