"""The doctor on 33 published drafts: the outcome that start-up has, from checkpoints of headers without data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.start_up import hook_configs
from tests.unit.startup.test_published import PUBLISHED, tensors, write_header

OUTCOMES = {"ours": (0, "dflash_sglang"), "foreign": (0, "built-in"), "refused": (1, None)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_draft_has_the_outcome_of_start_up(
    name: str, tmp_path: Path, examined: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_configs(monkeypatch)
    published = json.loads(PUBLISHED[name].read_text())
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(published[role]))
    write_header(tmp_path / "draft" / "model.safetensors", tensors(published["draft"], published["expect"]))
    code, said = examined(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    assert (code, said["worker"]) == OUTCOMES[published["expect"]["outcome"]]
    if code == 0 and said["model"] is not None:
        assert said["model"]["target_layers"] == published["expect"]["target_layer_ids"]
        assert said["memory_per_rank"]["kv_bytes_per_token"] > 0
