"""What the demo shows while it works: a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """Writes steps to `out`; on a terminal the current step is one line that is rewritten in place."""

    def __init__(self, out: TextIO):
        self.out = out
        self._live = out.isatty()
        self._step = ""
        self._began = 0.0

    def begin(self, step: str) -> None:
        self._step, self._began = step, time.monotonic()
        if not self._live:
            self._write(f"{step} ...\n")

    def update(self, detail: str = "") -> None:
        """Rewrites the current line with its detail and age; does nothing where there is no terminal."""
        if self._live:
            self._write(f"\r\x1b[K{self._step} ... {detail} {time.monotonic() - self._began:.0f} s")

    def end(self, detail: str = "done") -> None:
        start = "\r\x1b[K" if self._live else ""
        self._write(f"{start}{self._step}: {detail} ({time.monotonic() - self._began:.1f} s)\n")

    def text(self, piece: str) -> None:
        self._write(piece)

    def _write(self, piece: str) -> None:
        self.out.write(piece)
        self.out.flush()
