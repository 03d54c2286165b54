"""What a server is asked: greedy completions, and how likely the tokens were at which two outputs part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_sglang.check.parting import Likelihood
from dflash_sglang.demo.server import Client
from dflash_sglang.requests.limits import COPY, KEY

RANKED = 20  # likeliest tokens whose rank is known
# Accepted copies would say nothing of the draft. Another worker, and a server without one, read nothing of it.
NO_COPIES = {KEY: {COPY: False}}


@dataclass(frozen=True)
class Answer:
    """One greedy completion."""

    ids: list[int]
    histogram: list[int]  # how many verify steps accepted 0, 1, 2, ... proposals; empty without speculation


def answers(
    client: Client,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    concurrency: int,
    on_done: Callable[[int], None],
) -> tuple[list[Answer], list[float]]:
    """(completions of all prompts, each to its EOS or limit, seconds of each `concurrency` of them, which are
    asked at a time); on_done(number done)."""
    out: list[Answer] = []
    seconds: list[float] = []
    for start in range(0, len(prompts), concurrency):
        began = time.perf_counter()
        found = client.generate(
            input_ids=prompts[start : start + concurrency],
            sampling_params={"temperature": 0, "max_new_tokens": max_new_tokens, "custom_params": NO_COPIES},
        )
        seconds.append(time.perf_counter() - began)
        out += [
            Answer(one["output_ids"], one["meta_info"].get("spec_correct_drafts_histogram", [])) for one in found
        ]
        on_done(len(out))
    return out, seconds


def likelihoods(client: Client, ids: list[int], tokens: Sequence[int]) -> tuple[list[Likelihood], float]:
    """(how likely each of `tokens` is after `ids`, log probability of the likeliest token)"""
    answer = client.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=RANKED,
        token_ids_logprob=list(tokens),
    )
    info: dict[str, Any] = answer["meta_info"]
    ranked = [entry[1] for entry in info["output_top_logprobs"][0]]
    logprobs = {entry[1]: entry[0] for entry in info["output_token_ids_logprobs"][0]}
    found = [Likelihood(logprobs[token], ranked.index(token) + 1 if token in ranked else None) for token in tokens]
    return found, info["output_top_logprobs"][0][0][0]
