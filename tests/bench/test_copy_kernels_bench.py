"""`bench.copy_kernels`: the torch twins run from end to end on a CPU, and which figures are claimed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import copy_kernels


def test_every_launch_runs_on_a_cpu_over_texts_that_match_as_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    options = "--device cpu --requests 1 3 --contexts 120 --page-sizes 16 --out".split()
    monkeypatch.setattr(sys, "argv", ["program", *options, str(out)])
    assert copy_kernels.main() == 0
    figures = json.loads(out.read_text())["figures"]
    matches = {"random": [0], "copying": [32], "period": [32], "one token": [32]}
    assert figures == [
        dict(requests=requests, context=120, page_size=16, text=text, match=match)
        for requests in (1, 3)
        for text, match in matches.items()
    ]


@pytest.mark.parametrize("us, ok", [(20.0, True), (20.1, False)])
def test_the_claims_are_of_one_long_and_of_many_requests(us: float, ok: bool) -> None:
    figures = [
        dict(requests=requests, context=context, page_size=1, text=text, us={"find": 1.0, "find and write": us})
        for requests, context in ((1, 131072), (64, 32768), (8, 32768))
        for text in copy_kernels.TEXTS
    ]
    claims = copy_kernels.claims(figures)
    assert [claim["bound"] for claim in claims] == ["<= 20"] * 2 + ["<= 60"] * 2
    assert [claim["ok"] for claim in claims] == [ok] * 2 + [True] * 2
