"""WidthConfig: what an operator sets of the width policy, checked against the checkpoint's block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_sglang.settings.schema import CONFIG_ENV, PluginConfigError, known_settings

PLAIN = 1  # the width of plain decoding: nothing is drafted
DEFAULT_WIDTHS = (16, 12, 8, 6, 4, 2, PLAIN)
BLOCK: Literal["block"] = "block"  # the width of the block that is served
TREE = "tree "  # of a fixed tree, before its number of nodes
MAX_NODES = 64  # of a tree: the ancestors of a node are the bits of one int64
DEFAULT_TREES = (16, 32, 64)  # nodes; bench/results/rows_trees.json

AUTO = "auto"  # a width chosen for every step

_WHERE = f"{CONFIG_ENV}: width"


@dataclass(frozen=True)
class WidthConfig:
    """Settings of the width policy: docs/reference/settings.md has what each of their values does.

    Raises PluginConfigError for one of the wrong type or out of range.
    """

    widths: tuple[int, ...] | None = None  # to choose from; None: those of `states`
    fixed: int | str | None = None  # always this width, BLOCK, or TREE with its nodes; nothing is measured
    trees: tuple[int, ...] = DEFAULT_TREES  # nodes of those that steps of few requests may verify
    memory_reserve: float = 2.0  # GB (2**30 bytes) of the device that graphs of more widths must leave free
    highest_min_width: int = PLAIN  # the most that a request may ask for, which widens steps of all beside it
    lowest_max_width: int = PLAIN  # the least that a request may ask for

    def __post_init__(self) -> None:
        if self.widths is not None:
            if not isinstance(self.widths, Sequence) or isinstance(self.widths, str) or not self.widths:
                raise _error("widths", self.widths, "a list of whole numbers from 1 to the draft's block")
            for width in self.widths:
                _check("widths", width, int, 1, None, "whole numbers from 1 to the draft's block")
            object.__setattr__(self, "widths", tuple(self.widths))
            if self.fixed is not None:
                raise _both("widths", self)
        if not isinstance(self.trees, Sequence) or isinstance(self.trees, str):
            raise _error("trees", self.trees, f"a list of {_NODES}")
        trees = self.trees
        if isinstance(self.fixed, str) and self.fixed.startswith(TREE) and self.fixed[len(TREE) :].isdecimal():
            trees = (int(self.fixed[len(TREE) :]),)
        elif self.fixed is not None:
            if self.fixed != BLOCK:
                expected = f"a whole number from 1 to the draft's block, {BLOCK!r} for that, or '{TREE}N'"
                _check("fixed", self.fixed, int, 1, None, expected)
            trees = ()
        if self.fixed is not None and self.trees not in (DEFAULT_TREES, trees):
            raise _both("trees", self)
        for nodes in trees:
            _check("trees" if self.fixed is None else "fixed", nodes, int, 2, MAX_NODES, _NODES)
        object.__setattr__(self, "trees", tuple(sorted(set(trees))))
        _check("memory_reserve", self.memory_reserve, float, 0.0, 1000.0, "GB from 0 to 1000")
        for key in ("highest_min_width", "lowest_max_width"):
            _check(key, getattr(self, key), int, PLAIN, None, "a whole number from 1 on")

    @classmethod
    def from_mapping(cls, values: object) -> WidthConfig:
        """From decoded JSON. Raises PluginConfigError naming the key, its value and what was expected."""
        return cls(**known_settings(values, cls, _WHERE))

    @property
    def widest(self) -> int:
        """The widest block that is asked for by number."""
        return max([PLAIN, *(self.widths or ()), *([self.fixed] if isinstance(self.fixed, int) else ())])

    def states(self, block: int) -> tuple[int, ...]:
        """The widths to serve for a draft of this block, ascending: 1 first, or only the fixed one.

        Start-up has checked `widest` against the block that is served.
        """
        if self.fixed is not None:
            return (block if isinstance(self.fixed, str) else self.fixed,)  # chains, of a fixed tree
        narrower = (width for width in DEFAULT_WIDTHS if width < block)
        return tuple(sorted({PLAIN, *(self.widths or (*narrower, block))}))


_NODES = f"whole numbers from 2 to {MAX_NODES}"


def _check(key: str, value: Any, kind: type, low: float, high: float | None, expected: str) -> None:
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or isinstance(value, bool) or not value >= low or (high is not None and value > high):
        raise _error(key, value, expected)


def _both(key: str, config: WidthConfig) -> PluginConfigError:
    given = f"fixed={config.fixed!r} and {key}={getattr(config, key)}"
    return PluginConfigError(f"{_WHERE}: {given}: give one of them.")


def _error(key: str, value: Any, expected: str) -> PluginConfigError:
    found = f"{key}={value!r} ({type(value).__name__})"
    return PluginConfigError(f"{_WHERE}: {found}: expected {expected}. Change it.")
