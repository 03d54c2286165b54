"""Where two outputs part, and whether the dtype's rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How far a token may lie below the likeliest one, in log probability, and still be taken in its place because the
# verify forward rounds differently from a decode forward.
# bfloat16, float16: two steps between neighbouring numbers of the dtype from 16 to 32, where the largest logits
# usually lie (8 and 11 significant bits: steps of 2**-3 and 2**-6), one for each of the two logits.
# float32: its step there is 2**-19, and sums over tens of layers add up some tens of roundings.
ROUNDING = {"float32": 1e-4, "float16": 2**-5, "bfloat16": 2**-2}


@dataclass(frozen=True)
class Likelihood:
    logprob: float
    rank: int | None  # 1 of the likeliest token; None of one beyond those that were ranked


@dataclass(frozen=True)
class Parting:
    """The first token at which the output of a prompt with DFLASH differs from plain decoding."""

    prompt: int
    position: int  # in the output, from 0 on
    plain: int | None  # the token; None where this output has ended
    dflash: int | None  # the same
    plain_rank: int | None
    dflash_rank: int | None
    margin: float | None  # `margin` by the plain server; None where an output has ended
    near_tie: bool


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, or at which one has ended; None where they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def margin(likelihoods: Sequence[Likelihood], likeliest: float) -> float:
    """How far the less likely of two tokens lies below the likeliest token of all, in log probability."""
    return likeliest - min(one.logprob for one in likelihoods)


def is_near_tie(margin: float, dtype: str) -> bool:
    """Whether the rounding of `dtype` explains that another token was taken. Raises KeyError for another dtype."""
    return margin <= ROUNDING[dtype]
