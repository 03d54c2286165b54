"""The files from a request to a committed token, which docs/internals/step.md names, are few and hang together."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 1500


def test_the_way_from_a_request_to_a_committed_token_is_short() -> None:
    page = (ROOT / "docs/internals/step.md").read_text()
    section = page.partition("## Where to start reading")[2].partition("\n## ")[0]
    sources = {
        name: (ROOT / "dflash_sglang" / name).read_text() for name in re.findall(r"^\d+\. `(.+?)`", section, re.M)
    }
    assert list(sources)[0] == "worker.py" and list(sources)[-1] == "verify/step_result.py"
    assert sum(source.count("\n") for source in sources.values()) <= MOST_LINES
    modules = {name: f"dflash_sglang.{name.removesuffix('.py').replace('/', '.')}" for name in sources}
    pairs = [
        (one, other) for one in sources for other in sources if f"from {modules[other]} import" in sources[one]
    ]
    assert {name for pair in pairs for name in pair} == set(sources)
    for function in re.findall(r"`(_step|accept_torch)`", section):
        assert any(f"def {function}(" in source for source in sources.values())
