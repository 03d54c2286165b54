"""WidthConfig: what an operator sets of the width policy, checked against the checkpoint's block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_sglang.settings.schema import known_settings

PLAIN = 1  # the width of plain decoding: nothing is drafted
DEFAULT_WIDTHS = (16, 12, 8, 6, 4, 2, PLAIN)
BLOCK: Literal["block"] = "block"  # the width of the block that is served

RENAMED = {"per_request": "ragged"}


class WidthConfigError(ValueError):
    """A setting of the width policy is unknown, of the wrong type or out of range."""


@dataclass(frozen=True)
class WidthConfig:
    """Settings of the width policy.

    ``widths``: the verify widths to choose from; by default those of 16, 12, 8, 6, 4, 2 that fit the block, and
    the block itself. Width 1, plain decoding, is always among them: a request may ask for it.

    ``fixed``: always this width, "block" for that of the served block; nothing is measured, estimated or probed.

    ``ragged``: a step verifies another number of tokens of each request, up to the width that is drafted.

    ``margin``: a width is left for another only if that one promises this much more throughput.

    ``probe_budget``: share of the time that may be spent on steps at widths that look worse.

    ``prior_acceptance``: conditional acceptance of a proposal before anything was verified.

    ``prior_strength``: pseudo-count, in rejections, by which a request starts as the average request.

    ``memory``: verify steps of its own after which a request's history weighs 1/e.

    ``exchange_every``: steps between two exchanges of measured step times in a group of ranks.

    ``memory_reserve``: GB (2**30 bytes) of the device that graphs of more widths must leave free.

    ``highest_min_width``: the most that a request may ask for as its `min_width`, which widens the steps of all
    requests beside it. 1: requests widen no step.

    ``lowest_max_width``: the least that a request may ask for as its `max_width`. 1: any.
    """

    widths: tuple[int, ...] | None = None
    fixed: int | Literal["block"] | None = None
    ragged: bool = False
    margin: float = 0.02
    probe_budget: float = 0.01
    prior_acceptance: float = 0.8
    prior_strength: float = 2.0
    memory: int = 64
    exchange_every: int = 64
    memory_reserve: float = 2.0
    highest_min_width: int = PLAIN
    lowest_max_width: int = PLAIN

    def __post_init__(self) -> None:
        if self.widths is not None:
            if not isinstance(self.widths, Sequence) or isinstance(self.widths, str) or not self.widths:
                raise _error("widths", self.widths, "a list of whole numbers from 1 to the draft's block")
            for width in self.widths:
                _check("widths", width, int, 1, None, "whole numbers from 1 to the draft's block")
            object.__setattr__(self, "widths", tuple(self.widths))
            if self.fixed is not None:
                raise WidthConfigError(f"width: fixed={self.fixed} and widths={self.widths}: give one of them.")
        if self.fixed not in (None, BLOCK):
            expected = f"a whole number from 1 to the draft's block, or {BLOCK!r} for that"
            _check("fixed", self.fixed, int, 1, None, expected)
        if not isinstance(self.ragged, bool):
            raise _error("ragged", self.ragged, "true or false")
        if self.ragged and self.fixed is not None:
            raise WidthConfigError(f"width: fixed={self.fixed!r} and ragged=true: give one of them.")
        _check("margin", self.margin, float, 0.0, 0.5, "a share from 0 to 0.5")
        _check("probe_budget", self.probe_budget, float, 0.0, 0.1, "a share of the time from 0 to 0.1")
        _check("prior_acceptance", self.prior_acceptance, float, 0.01, 0.99, "a probability from 0.01 to 0.99")
        _check("prior_strength", self.prior_strength, float, 0.1, 1000.0, "a count from 0.1 to 1000")
        _check("memory", self.memory, int, 2, 100_000, "a whole number of steps from 2 to 100000")
        _check("exchange_every", self.exchange_every, int, 1, 100_000, "a whole number of steps from 1 to 100000")
        _check("memory_reserve", self.memory_reserve, float, 0.0, 1000.0, "GB from 0 to 1000")
        for key in ("highest_min_width", "lowest_max_width"):
            _check(key, getattr(self, key), int, PLAIN, None, "a whole number from 1 on")

    @classmethod
    def from_mapping(cls, values: object) -> WidthConfig:
        """From decoded JSON. Raises WidthConfigError naming the key, its value and what was expected."""
        for key in RENAMED.keys() & (values if isinstance(values, dict) else {}):
            raise WidthConfigError(f"width: {key}: renamed to {RENAMED[key]}. Rename it.")
        return cls(**known_settings(values, cls, "width", WidthConfigError))

    @property
    def widest(self) -> int:
        """The widest block that is asked for by number."""
        return max([PLAIN, *(self.widths or ()), *([self.fixed] if isinstance(self.fixed, int) else ())])

    def states(self, block: int) -> tuple[int, ...]:
        """The widths to serve for a draft of this block, ascending: 1 first, or the fixed one alone.

        Raises WidthConfigError.
        """
        if self.widest > block:
            key, value = ("fixed", self.fixed) if self.widths is None else ("widths", list(self.widths))
            raise WidthConfigError(
                f"width: {key}={value}: expected at most {block}, the block that is served; a draft may be served "
                f"narrower than its block, not wider. Lower it, or leave {key} out."
            )
        if self.fixed is not None:
            return (block if isinstance(self.fixed, str) else self.fixed,)
        narrower = (width for width in DEFAULT_WIDTHS if width < block)
        return tuple(sorted({PLAIN, *(self.widths or (*narrower, block))}))


def _check(key: str, value: Any, kind: type, low: float, high: float | None, expected: str) -> None:
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or isinstance(value, bool) or not value >= low or (high is not None and value > high):
        raise _error(key, value, expected)


def _error(key: str, value: Any, expected: str) -> WidthConfigError:
    return WidthConfigError(f"width: {key}={value!r} ({type(value).__name__}): expected {expected}. Change it.")
