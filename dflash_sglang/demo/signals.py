"""Signals that end a run the way an exception does, so that `with` blocks end the servers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit(128 + number), as Ctrl-C is KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
