"""What a run measures: the checked options of `dflash-sglang bench`, and the cells and servers that follow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_sglang.demo.launch import OURS, PLAIN

LEAST_REQUESTS = 4  # of a load
RANDOM = "random ids"  # in place of a set's name
PROFILED_TOKENS = 1536  # of each request, enough to decode until the profiled steps are over


class BadSetting(ValueError):
    """An option that cannot be measured; names it, its value and what was expected."""


# A prompt: what is said to the server before each of its answers, as messages with ``role`` and ``content``.
Turns = tuple[tuple[Mapping[str, str], ...], ...]


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured by themselves. ``chat``: they get the target's chat template."""

    name: str
    prompts: tuple[Turns, ...] = field(repr=False)
    chat: bool

    @property
    def turns(self) -> int:
        """Of the longest conversation; 1 where each prompt is one text."""
        return max(map(len, self.prompts))

    @property
    def conversations(self) -> bool:
        """Whether a prompt is more than one text that a user says."""
        return any(len(turns) > 1 or len(turns[0]) > 1 for turns in self.prompts)


@dataclass(frozen=True)
class Cell:
    """One load. ``prompts``: their set's name; ``input``: tokens of each prompt, None for texts as they are."""

    prompts: str
    concurrency: int
    input: int | None
    temperature: float

    def __str__(self) -> str:
        text = self.prompts if self.input is None else f"{self.prompts}, {self.input} tokens in"
        return f"{self.concurrency} at a time, {text}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Served:
    """One server of the comparison. ``width``: its verify width, None where there is no speculation or our worker
    chooses."""

    kind: str
    width: int | None = None

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        return name if self.width is None else f"{name}, width {self.width}"

    @property
    def slug(self) -> str:
        """The name as part of a file's."""
        return self.kind if self.width is None else f"{self.kind}_{self.width}"


@dataclass(frozen=True)
class Settings:
    """``widths``: verify widths; ``chooses``: our worker has one of its own for each step; ``output``: tokens of
    each completion; ``requests``: of a load, for each that runs at a time; ``accept_length``: forced, or None for
    the draft's own; ``sets``: of prompts, none for random token ids; ``together``: all servers up at once;
    ``profile``: concurrencies at which a step is taken apart."""

    target: str
    draft: str
    vocabulary: int
    gpu: bool
    kinds: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]  # (kind, why it does not run)
    out: Path
    concurrency: tuple[int, ...]
    widths: tuple[int, ...]
    chooses: bool
    inputs: tuple[int | None, ...]
    temperatures: tuple[float, ...]
    top_p: float
    output: int
    requests: int
    rounds: int
    accept_length: float | None
    sets: tuple[PromptSet, ...]
    together: bool
    together_reason: str
    mem_fraction: float | None
    max_total_tokens: int
    flags: tuple[str, ...]
    dflash_flags: tuple[str, ...]
    ours_flags: tuple[str, ...]
    profile: tuple[int, ...]

    @property
    def cells(self) -> list[Cell]:
        names = [one.name for one in self.sets] or [RANDOM]
        sweep = itertools.product(names, self.temperatures, self.inputs, self.concurrency)
        return [Cell(name, concurrency, length, temperature) for name, temperature, length, concurrency in sweep]

    @property
    def served(self) -> list[Served]:
        """The servers in the order in which they take turns."""
        one = {PLAIN, OURS} if self.chooses else {PLAIN}
        return [
            served
            for kind in self.kinds
            for served in ([Served(kind)] if kind in one else [Served(kind, width) for width in self.widths])
        ]

    @property
    def dtype(self) -> str:
        """Of the CPU platform, whose outputs are compared for equality; on a GPU the checkpoint's own."""
        return "auto" if self.gpu else "float32"

    def set_of(self, cell: Cell) -> PromptSet | None:
        """The cell's prompts, None for random token ids."""
        return next((one for one in self.sets if one.name == cell.prompts), None)

    def requests_of(self, cell: Cell) -> int:
        """How many prompts a load of the cell asks."""
        one = self.set_of(cell)
        least = LEAST_REQUESTS if one is None else min(LEAST_REQUESTS, len(one.prompts))
        return max(self.requests * cell.concurrency, least)
