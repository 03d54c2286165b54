"""Whether the installed SGLang is the one this package is written for: version, then every symbol it uses."""

from __future__ import annotations

import importlib
import importlib.metadata

from dflash_sglang import SGLANG_VERSION, __version__


class SGLangMismatchError(RuntimeError):
    """The installed SGLang lacks what this version of dflash_sglang needs."""


def check_version() -> None:
    """Raises SGLangMismatchError unless SGLang has the one supported version. Imports nothing of it."""
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise SGLangMismatchError(
            f"dflash_sglang {__version__} needs sglang=={SGLANG_VERSION}, found sglang {installed}. "
            f"Install sglang=={SGLANG_VERSION}, or a dflash-sglang made for {installed}."
        )


def check_symbols(module: str) -> None:
    """Imports one of this package's modules of SGLang names.

    Raises SGLangMismatchError naming the module and the name that SGLang lacks.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        installed = importlib.metadata.version("sglang")
        raise SGLangMismatchError(
            f"dflash_sglang {__version__} does not fit sglang {installed}: {error}. "
            f"Reinstall sglang=={SGLANG_VERSION}."
        ) from error
