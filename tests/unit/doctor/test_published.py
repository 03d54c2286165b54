"""The doctor on 33 published drafts: the outcome that start-up has, from checkpoints of headers without data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.start_up import hook_configs
from tests.unit.startup.test_published import PUBLISHED, tensors, write_header

OUTCOMES = {"ours": (0, "dflash_sglang"), "foreign": (0, "built-in"), "refused": (1, None)}


def test_a_published_draft_has_the_outcome_of_start_up(
    tmp_path: Path, examined: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_configs(monkeypatch)
    wrong = {}
    for name, path in PUBLISHED.items():
        published, directory = json.loads(path.read_text()), tmp_path / name
        expected = published["expect"]
        for role in ("target", "draft"):
            (directory / role).mkdir(parents=True)
            (directory / role / "config.json").write_text(json.dumps(published[role]))
        write_header(directory / "draft" / "model.safetensors", tensors(published["draft"], expected))
        code, said = examined(target=str(directory / "target"), draft=str(directory / "draft"))
        fits = (code, said["worker"]) == OUTCOMES[expected["outcome"]]
        if code == 0 and said["model"] is not None:
            fits &= said["model"]["target_layers"] == expected["target_layer_ids"]
            fits &= said["memory_per_rank"]["kv_bytes_per_token"] > 0
        if not fits:
            wrong[name] = code, said
    assert PUBLISHED and not wrong
