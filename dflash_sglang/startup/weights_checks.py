"""Draft checkpoints whose weights are not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_sglang.checkpoint.files import INDEX, missing_files
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING_FILE
from dflash_sglang.startup.facts import Problem

# Files of weights that SGLang reads from a directory, and formats of --load-format that need none there.
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_ELSEWHERE = ("dummy", "remote", "remote_instance", "rdma", "ipc_cache", "private")


def weights_problems(path: str, directory: Path, load_format: str) -> Iterator[Problem]:
    """What of a draft's weights is missing.

    path: --speculative-draft-model-path; directory: its weights on this machine, of a hub repository those in
    safetensors; load_format: --speculative-draft-load-format as SGLang resolves it. Raises DraftConfigError for an
    index that is malformed.
    """
    if load_format in _ELSEWHERE:
        return
    missing = missing_files(directory)
    if missing:
        yield Problem(
            f"draft file {INDEX}",
            missing,
            f"the files that it names in {directory}",
            "Download them; the download may have been cut short.",
        )
    found = {file.name for pattern in _FILES for file in directory.glob(pattern)} - {MASK_EMBEDDING_FILE}
    if Path(path).is_dir() and not found and not missing:
        yield Problem(
            "--speculative-draft-model-path",
            path,
            f"weights beside its config.json ({', '.join(_FILES)})",
            "Download them too.",
        )
