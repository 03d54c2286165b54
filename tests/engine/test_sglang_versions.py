"""A server on an SGLang of another version whose source is the known one, started by SGLang's own command."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

from dflash_sglang.patches.table import PATCHES
from tests.support.engines import greedy, serve
from training import pair

TARGET, DRAFT = (Path(pair.pair_directories()[name]) for name in ("target", "draft"))
VERSION = "0.5.24.dev7"

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_sglang_serve_with_another_version_string_runs_our_worker_and_says_so_in_one_line(tmp_path: Path) -> None:
    metadata = importlib.metadata.distribution("sglang").read_text("METADATA")
    assert metadata is not None
    info = tmp_path / f"sglang-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {VERSION}", metadata, flags=re.MULTILINE))
    environment = {
        "DFLASH_SGLANG_REQUIRE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    }
    sglang = str(Path(sys.executable).parent / "sglang")
    with serve(TARGET, DRAFT, environment=environment, command=(sglang, "serve")) as server:
        assert len(greedy(server, [[5, 6, 7]], 16)[0]) == 16
        log = server.log_text()
    fits = f"{len(PATCHES)} of {len(PATCHES)} patches made for sglang 0.5.23"
    assert log.count(f"dflash_sglang serves sglang {VERSION}: its source fits {fits}.") == 1
    assert log.count("worker active") == 1
