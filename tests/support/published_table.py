"""The table of published drafts, as a page of the docs: python -m tests.support.published_table

Made of `published/`, whose readings `tests/unit/doctor/test_published.py` shows.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "published-drafts.md"
WORKERS = {"ours": "this package", "foreign": "built-in worker", "refused": "refused"}
COMPLETENESS = {
    "verbatim": "verbatim",
    "trimmed": "fields",
    "described": "described",
}
HEAD = """# Published drafts

**No published weights could be had where this package was built.** So no accept length of a published draft was \
measured here. The table has what was checked: how each config.json is read, and for one draft that random \
weights of its sizes are served.

To serve a pair, put its two names into one line:

```
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH \
--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16
```

Made by `python -m tests.support.published_table`. `tests/unit/doctor/test_published.py` reads each config.json \
as its row says. "config read": `verbatim`; `fields`, those that decide, as published; or `described`, made of \
what its authors say. "layers": `full`, or the window of sliding layers; `c` marks causal ones. Random weights of \
the sizes of `z-lab/Qwen3-8B-DFlash-b16` were served on an H200 (`bench --shapes qwen3-8b`), of no other.

| draft | target | format | block | layers | runs on | config read |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    drafts = [json.loads(path.read_text()) for path in PUBLISHED.glob("*.json")]
    order = list(WORKERS)
    drafts.sort(key=lambda one: (order.index(one["expect"]["outcome"]), one["target_name"], one["hub"]))
    return HEAD + "".join(f"| {' | '.join(_row(one))} |\n" for one in drafts)


def _row(published: dict[str, Any]) -> list[str]:
    draft, expect = published["draft"], published["expect"]
    return [
        published["hub"],
        published["target_name"],
        _format(draft),
        str(expect.get("block_size", "")),
        _layers(expect.get("layers", [])),
        f"{WORKERS[expect['outcome']]}{_reason(expect)}",
        COMPLETENESS[published["completeness"]],
    ]


def _format(draft: dict[str, Any]) -> str:
    (name,) = draft["architectures"]
    return f"{name}, speculators" if "speculators_model_type" in draft else name


def _reason(expect: dict[str, Any]) -> str:
    return f" (`{expect['says']}`)" if "says" in expect else ""


def _layers(layers: list[list[Any]]) -> str:
    kinds = [f"{window or 'full'}{' c' if mask == 'causal' else ''}" for _, mask, window in layers]
    return ", ".join(f"{len(list(equal))} x {kind}" for kind, equal in groupby(kinds))


if __name__ == "__main__":
    PAGE.write_text(page())
