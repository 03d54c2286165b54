"""Reads a draft checkpoint without loading it: its raw config.json and its tensors' dtypes and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_sglang.config import DraftConfigError, read_config


@dataclass(frozen=True)
class TensorFacts:
    """``dtype``: the safetensors name (BF16, F8_E4M3, U8, ...); ``shape``: as stored."""

    dtype: str
    shape: tuple[int, ...]


def config_directory(path: str, revision: str | None) -> Path:
    """The local directory of a checkpoint's config.json: `path` itself, or a hub repository's snapshot.

    Raises OSError where neither has a config.json.
    """
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise OSError(f"{path} is a file.")
    if "://" in path:
        raise OSError(
            f"{path} is not on this machine, and DFLASH reads a draft's tensors before it builds the draft. Copy "
            "it here, or set SGLANG_PLUGINS=none: SGLang's built-in worker serves it in z-lab's format."
        )
    from transformers.utils import cached_file

    return Path(cached_file(path, "config.json", revision=revision)).parent


def weights_directory(path: str, revision: str | None, download_dir: str | None) -> Path:
    """The local directory of a checkpoint's *.safetensors files: `path` itself, or a hub repository's
    snapshot, downloaded to `download_dir` (--download-dir, None for the hub's cache) if it is not there yet."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "mask_embedding.pt"]
    return Path(snapshot_download(path, revision=revision, cache_dir=download_dir, allow_patterns=patterns))


def draft_config(path: str, revision: str | None = None) -> tuple[dict[str, Any], Path]:
    """(raw config.json, its directory) of a draft checkpoint."""
    directory = config_directory(path, revision)
    return read_config(directory), directory


def tensor_facts(directory: Path) -> dict[str, TensorFacts]:
    """Every tensor of the *.safetensors files of a directory by name, from their headers alone.

    Empty where the weights are in another format, or not on this machine yet. Raises DraftConfigError for a file
    that is not whole.
    """
    facts: dict[str, TensorFacts] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    tensor = file.get_slice(name)
                    facts[name] = TensorFacts(tensor.get_dtype(), tuple(tensor.get_shape()))
        except SafetensorError as error:
            raise DraftConfigError(
                path.name,
                f"{path.stat().st_size} bytes",
                f"a whole safetensors file ({error})",
                "Download it again; a pointer of Git LFS becomes the file with `git lfs pull`.",
            ) from error
    return facts
