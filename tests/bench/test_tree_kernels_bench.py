"""`bench.tree_kernels`: the torch twins run from end to end on a CPU, and what the claim adds up."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from bench import tree_kernels


def test_every_launch_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = [
        "--device",
        "cpu",
        "--vocab",
        "300",
        "--requests",
        "1",
        "2",
        "--nodes",
        "8",
        "16",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["program", *options])
    assert tree_kernels.main() == 0
    figures = json.loads(out.read_text())["figures"]
    names = [
        "argmax",
        "best 1",
        "best 8",
        "best 16",
        "topk 16",
        "accept",
        "grow 8",
        "accept 8",
        "grow 16",
        "accept 16",
    ]
    assert figures == [dict(requests=requests, ran=names) for requests in (1, 2)]


def test_the_paths_that_are_timed_are_long() -> None:
    forms = tree_kernels.calls(2, 300, [16], "cpu")
    forms["grow 16"]()
    forms["accept 16"]()
    accept = forms["accept 16"]
    assert isinstance(accept, partial)
    paths = accept.keywords["paths"]
    assert ((paths.nodes > 0).sum(dim=1) >= 3).all() and (paths.sources != paths.targets).any()


@pytest.mark.parametrize("grow, ok", [(60.0, True), (70.0, False)])
def test_the_claim_is_what_a_tree_adds_to_the_step_of_one_request(grow: float, ok: bool) -> None:
    us = {"argmax": 5.0, "best 8": 25.5, "accept": 2.0, "accept 16": 4.0, "grow 16": grow}
    (claim,) = tree_kernels.claims([dict(requests=1, us=us), dict(requests=2, us=us)])
    assert claim["value"] == 22.5 + grow and claim["ok"] is ok
