"""A refused launch ends with what is wrong as the last lines of the log, and without a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType

from dflash_sglang.checkpoint.fields import DraftConfigError
from dflash_sglang.checkpoint.token_map import TokenMapError
from dflash_sglang.settings.plugin_config import PluginConfigError
from dflash_sglang.sglang_names.probe import SGLangMismatchError
from dflash_sglang.startup.facts import LoadError, StartupError

# Their messages say what to change; where they were raised helps nobody.
REFUSALS = (StartupError, LoadError, PluginConfigError, DraftConfigError, TokenMapError, SGLangMismatchError)


@functools.cache
def print_messages_only() -> None:
    """Makes this process print only the message of a refusal that nobody catches."""
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, REFUSALS):
            print(error, file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = excepthook


def get_exception_traceback(original: Callable[[], str]) -> str:
    """AROUND sglang.utils.get_exception_traceback: what a scheduler that ends writes into the log."""
    error = sys.exception()
    return str(error) if isinstance(error, REFUSALS) else original()
