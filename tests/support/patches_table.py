"""The table of patches, as a page of the docs: python -m tests.support.patches_table [--check]"""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_sglang.patches.table import PATCHES, Patch
from tests.support.pages import written

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "patches.md"
HEAD = """# The table of patches

Everything that this package changes in SGLang at run time. Made by `python -m tests.support.patches_table` from \
`dflash_sglang/patches/table.py`. `dflash-sglang patches` also says whether each row fits the installed SGLang. \
How rows are checked and added: [patches](../internals/patches.md). Set-ups of the gains: \
[optimisations](optimisations.md).

| name | SGLang's | kind | why | gain | module |
|---|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(_row(patch) for patch in PATCHES)


def _row(patch: Patch) -> str:
    module = patch.by.split(".")[1:-1]
    cells = [f"`{patch.name}`", f"`{patch.target}`", patch.kind, patch.why, patch.gain, f"`{'/'.join(module)}.py`"]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.exit(written(PAGE, page(), "tests.support.patches_table"))
