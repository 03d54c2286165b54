"""Files that torch.load reads beside the weights: one that carries code is refused, and its code never runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint import DraftConfigError
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING_FILE, own_modules
from dflash_sglang.checkpoint.token_map import TokenMapError, read_token_map


class Touches:
    """An object that creates a file when a pickle brings it back."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def plain_pickle(saved: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(saved, protocol=2))


@pytest.mark.parametrize("save", [torch.save, plain_pickle])
@pytest.mark.parametrize("own_files", [False, True], ids=["token map", "mask embedding"])
def test_a_file_that_carries_code_is_refused_and_its_code_does_not_run(
    tmp_path: Path, own_files: bool, save: Callable[[Any, Path], None]
) -> None:
    path, ran = tmp_path / MASK_EMBEDDING_FILE, tmp_path / "ran"
    save({"embedding": torch.ones(4), "more": Touches(ran)} if own_files else [3, 9, Touches(ran)], path)
    with pytest.raises(DraftConfigError if own_files else TokenMapError, match=MASK_EMBEDDING_FILE):
        own_modules(tmp_path, {}) if own_files else read_token_map(str(path))
    assert not ran.exists()
