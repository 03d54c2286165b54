"""Whether the installed SGLang has every symbol that this package imports."""

from __future__ import annotations

import importlib
import importlib.metadata

from dflash_sglang import SGLANG_VERSION, __version__


class SGLangMismatchError(RuntimeError):
    """The installed SGLang is not what this version of dflash_sglang was made for."""

    @staticmethod
    def remedy() -> str:
        return f"Install sglang=={SGLANG_VERSION}, or a dflash-sglang made for sglang {installed_version()}."


def installed_version() -> str:
    return importlib.metadata.version("sglang")


def check_symbols(module: str) -> None:
    """Imports one of this package's modules of SGLang names.

    Raises SGLangMismatchError naming the module and the name that SGLang lacks.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise SGLangMismatchError(
            f"dflash_sglang {__version__} does not fit sglang {installed_version()}: {error}. "
            f"{SGLangMismatchError.remedy()}"
        ) from error
