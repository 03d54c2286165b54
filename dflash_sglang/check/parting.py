"""Where two outputs part, and whether the dtype's rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_sglang.demo.server import Client

# How far a token may lie below the likeliest one, in log probability, and still be taken in its place because the
# verify forward rounds differently from a decode forward.
# bfloat16, float16: two steps between neighbouring numbers of the dtype from 16 to 32, where the largest logits
# usually lie (8 and 11 significant bits: steps of 2**-3 and 2**-6), one for each of the two logits.
# float32: its step there is 2**-19, and sums over tens of layers add up some tens of roundings.
ROUNDING = {"float32": 1e-4, "float16": 2**-5, "bfloat16": 2**-2}
RANKED = 20  # likeliest tokens whose rank is known


@dataclass(frozen=True)
class Parting:
    """The first token at which the output of a prompt with DFLASH differs from plain decoding."""

    prompt: int
    position: int  # in the output, from 0 on
    plain: int | None  # the token; None where this output has ended
    dflash: int | None  # the same
    plain_rank: int | None  # 1 of the likeliest token; None of one beyond `RANKED`
    dflash_rank: int | None
    margin: float | None  # of the less likely token to the likeliest of all; None where an output has ended
    near_tie: bool  # rounding explains the margin


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, or at which one has ended; None where they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def first_parting(
    plain_server: Client, dtype: str, number: int, prompt: list[int], dflash: list[int], plain: list[int]
) -> Parting | None:
    """Judge the first difference of two outputs of prompt `number`, by what the plain server has after the tokens
    before; None where they are equal. dtype: one of `ROUNDING`."""
    at = first_difference(dflash, plain)
    if at is None:
        return None
    if at in (len(plain), len(dflash)):
        one, other = (of[at] if at < len(of) else None for of in (plain, dflash))
        return Parting(number, at, one, other, None, None, None, near_tie=False)
    parted = plain[at], dflash[at]
    info = plain_server.generate(
        input_ids=prompt + plain[:at],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=RANKED,
        token_ids_logprob=list(parted),
    )["meta_info"]
    (likeliest,), (asked,) = info["output_top_logprobs"], info["output_token_ids_logprobs"]
    rank = {token: rank for rank, (_, token, _) in enumerate(likeliest, start=1)}
    margin = likeliest[0][0] - min(logprob for logprob, _, _ in asked)
    ranks = rank.get(parted[0]), rank.get(parted[1])
    return Parting(number, at, *parted, *ranks, margin, near_tie=margin <= ROUNDING[dtype])
