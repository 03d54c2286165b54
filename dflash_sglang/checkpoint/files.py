"""Reads a draft checkpoint without loading it: its raw config.json and its tensors' dtypes and shapes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_sglang.checkpoint.fields import MOST_LAYERS, DraftConfigError

LARGEST_CONFIG = 1 << 22  # bytes of a config.json; published ones have a few thousand
DEEPEST_CONFIG = 32  # objects and lists inside of one another
# Transformers makes a list or a table with an entry for each.
_COUNTED = re.compile(r"(layers?|labels)$")
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_BLOCK = 1 << 16  # bytes of a sample
UNPACKED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")
"""Safetensors names of dtypes whose tensors have the shape of what they hold."""


@dataclass(frozen=True)
class TensorFacts:
    dtype: str  # the safetensors name (BF16, F8_E4M3, U8, ...)
    shape: tuple[int, ...]  # as stored


def config_directory(path: str, revision: str | None) -> Path:
    """The local directory of a checkpoint's config.json: `path` itself, or a hub repository's snapshot.

    Raises OSError where neither has a config.json.
    """
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise OSError(f"{path} is a file.")
    if no_such_directory(path):
        raise OSError("no such directory")
    if "://" in path:
        raise OSError(
            f"{path} is not on this machine, and DFLASH reads a draft's tensors before it builds the draft. Copy "
            "it here, or set SGLANG_PLUGINS=none: SGLang's built-in worker serves it in z-lab's format."
        )
    from transformers.utils import cached_file

    return Path(cached_file(path, "config.json", revision=revision)).parent


def no_such_directory(path: str) -> bool:
    """Whether nothing is there, and no repository of the hub can be meant."""
    return path.startswith(("/", ".", "~")) and not Path(path).exists()


def weights_directory(path: str, revision: str | None, download_dir: str | None) -> Path:
    """The local directory of a checkpoint's *.safetensors files: `path` itself, or a hub repository's
    snapshot, downloaded to `download_dir` (--download-dir, None for the hub's cache) if it is not there yet."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", INDEX, "mask_embedding.pt"]
    return Path(snapshot_download(path, revision=revision, cache_dir=download_dir, allow_patterns=patterns))


def read_config(directory: str | Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint directory. Raises OSError and ValueError where it cannot be read."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path}: expected JSON whose objects and lists are nested less deeply.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}.")
    return config


def draft_config(path: str, revision: str | None) -> dict[str, Any]:
    """The raw config.json of a draft checkpoint.

    Raises OSError and ValueError where there is none, and DraftConfigError for one that takes long to work with:
    a large file, deep nesting, thousands of layers.
    """
    directory = config_directory(path, revision)
    size = (directory / "config.json").stat().st_size
    if size > LARGEST_CONFIG:
        raise DraftConfigError(
            "file", f"{size} bytes", f"a config.json of at most {LARGEST_CONFIG} bytes", "Serve another draft."
        )
    config = read_config(directory)
    _check_bounds(config)
    return config


def _check_bounds(outer: Mapping[str, Any] | list[Any], path: str = "", depth: int = 0) -> None:
    """path: of `outer` in the config, with dots; depth: objects and lists around it."""
    if depth == DEEPEST_CONFIG:
        expected = f"at most {DEEPEST_CONFIG} levels of them"
        fix = "Serve a draft with a config.json of the usual form."
        raise DraftConfigError(path.split(".")[0], "objects and lists inside of one another", expected, fix)
    for key, value in enumerate(outer) if isinstance(outer, list) else outer.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, int) and value > MOST_LAYERS and _COUNTED.search(str(key)):
            raise DraftConfigError(inner, value, f"an integer of at most {MOST_LAYERS}")
        if isinstance(value, Mapping | list):
            _check_bounds(value, inner, depth + 1)


def missing_files(directory: Path) -> list[str]:
    """The files that a directory's model.safetensors.index.json names and that are not there, sorted.

    Empty without such an index. Raises DraftConfigError for one that is malformed.
    """
    return sorted(name for name in _indexed_files(directory) or () if not (directory / name).is_file())


def _indexed_files(directory: Path) -> set[str] | None:
    """Names of the files that hold the weights; None without an index."""
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return {name for name in names if directory / name}  # a TypeError where one is no text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
        expected = "a JSON object whose weight_map has the file of each tensor"
        raise DraftConfigError(INDEX, f"{path.stat().st_size} bytes", expected, "Download it again.") from error


def fingerprint(directory: Path) -> str:
    """Of the config.json and of a sample of every file with weights: equal for copies of a checkpoint, whatever
    their files are called."""
    config = json.dumps(read_config(directory), sort_keys=True)
    samples = sorted(map(_sample, (path for path in directory.iterdir() if path.suffix in _WEIGHTS)))
    return hashlib.sha256(config.encode() + b"".join(samples)).hexdigest()[:12]


def _sample(path: Path) -> bytes:
    """A hash of a file's size and of blocks at its beginning, middle and end."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, size - _BLOCK):
            file.seek(max(start, 0))
            digest.update(file.read(_BLOCK))
    return digest.digest()


def tensor_facts(directory: Path) -> dict[str, TensorFacts]:
    """Every tensor of the *.safetensors files of a directory by name, from their headers alone.

    Files that an index does not name hold other forms of the weights and are left out. Empty where the weights are
    in another format, or not on this machine yet. Raises DraftConfigError for a file that is not whole.
    """
    facts: dict[str, TensorFacts] = {}
    indexed = _indexed_files(directory)
    for path in sorted(directory.glob("*.safetensors")):
        if indexed is not None and path.name not in indexed:
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    tensor = file.get_slice(name)
                    facts[name] = TensorFacts(tensor.get_dtype(), tuple(tensor.get_shape()))
        except SafetensorError as error:
            expected = f"a whole safetensors file ({error})"
            fix = "Download it again; a pointer of Git LFS becomes the file with `git lfs pull`."
            raise DraftConfigError(path.name, f"{path.stat().st_size} bytes", expected, fix) from error
    return facts
