"""What SGLang reads of a draft's config.json: the decoder of a speculators export, every other one by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang import hooks
from tests.support.draft_formats import FORMATS, speculators
from tests.support.fakes import arguments
from tests.support.start_up import change
from tests.support.tiny import make_pair


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_resolved", arguments(Path("draft")))


def parsed(directory: Path) -> Any:
    def original(*args: Any, **kwargs: Any) -> str:
        return "SGLang's"

    return hooks.parse_config(original, None, str(directory), trust_remote_code=False, revision=None)


def test_sglang_reads_a_speculators_config_as_that_of_its_decoder(tmp_path: Path) -> None:
    config = parsed(FORMATS["speculators with a reduced vocabulary"](tmp_path))
    assert (config.model_type, config.architectures) == ("qwen3", ["DFlashDraftModel"])
    assert (config.hidden_size, config.num_hidden_layers, config.block_size) == (64, 2, 8)
    assert config.target_layer_ids == [1, 3, 4]
    assert config.dtype == torch.float32
    assert config._name_or_path == str(tmp_path)


def test_sglang_reads_every_other_config_by_itself(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    foreign_draft = change(speculators(tmp_path / "s", ()), {"speculators_model_type": "eagle3"}, {})
    assert [parsed(path) for path in (target, draft, foreign_draft)] == ["SGLang's"] * 3


def test_a_launch_without_dflash_reads_every_config_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    draft = speculators(tmp_path, ())
    for resolved in (None, *(arguments(draft, speculative_algorithm=other) for other in ("EAGLE3", None))):
        monkeypatch.setattr(hooks, "_resolved", resolved)
        assert parsed(draft) == "SGLang's"
    monkeypatch.setattr(hooks, "_resolved", None)
    of_scheduler = arguments(draft, speculative_algorithm="dflash")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: of_scheduler)
    assert parsed(draft).model_type == "qwen3"  # in a scheduler, which SGLang has given its arguments
