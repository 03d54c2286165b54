"""The requests of a soak, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_PROMPT, MOST_NEW_TOKENS = 400, 48
ABORTED_SHARE, LONGEST_DELAY = 0.12, 0.4
GRAMMARS = (
    dict(regex="(ab|cd){2,9}!"),
    dict(regex="[a-z_]{3,24}"),
    dict(regex=r"[0-9]{1,4}\.[0-9]{2}"),
    dict(regex="(yes|no|maybe)( (yes|no))*"),
    dict(ebnf='root ::= ("x" | "y")+ "."'),
    dict(json_schema='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
    dict(json_schema='{"type":"array","items":{"type":"boolean"},"maxItems":4}'),
    dict(json_schema='{"enum":["red","green","blue"]}'),
)


@dataclass(frozen=True)
class Corpus:
    """Text that prompts and stop conditions are cut from, and the ids at which a request may stop by itself."""

    ids: Sequence[int]
    text: str
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Request:
    body: Mapping[str, Any]  # of POST /generate
    abort: str | None = None  # "disconnect" or "abort_request", `delay` seconds after sending
    delay: float = 0.0

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.body["sampling_params"]

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0

    @property
    def samples(self) -> int:
        return self.sampling.get("n", 1)


def corpus_of(tokenizer_path: str) -> Corpus:
    """The held-out text of the package's pair, in the tokens of a server's tokenizer."""
    from transformers import AutoTokenizer

    from training.pair import held_out_prompts

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, model_max_length=1_000_000)
    text = "\n".join(held_out_prompts())
    return Corpus(tokenizer.encode(text, add_special_tokens=False), text, frozenset([tokenizer.eos_token_id]))


def requests(count: int, seed: int, corpus: Corpus) -> list[Request]:
    """`count` requests, the same for the same arguments."""
    rng = random.Random(seed)
    anchors = [rng.randrange(len(corpus.ids) - LONGEST_PROMPT) for _ in range(12)]
    return [_request(rng, f"soak-{seed}-{i:06d}", corpus, anchors) for i in range(count)]


def _request(rng: random.Random, rid: str, corpus: Corpus, anchors: Sequence[int]) -> Request:
    prompt = _prompt(rng, corpus, anchors)
    sampling = _sampling(rng, corpus, prompt)
    body: dict[str, Any] = dict(rid=rid, input_ids=prompt, sampling_params=sampling, stream=rng.random() < 0.3)
    if rng.random() < 0.15:
        body |= dict(return_logprob=True, top_logprobs_num=rng.randint(0, 3))
        if rng.random() < 0.3:
            body |= dict(logprob_start_len=rng.randrange(len(prompt)))
        if rng.random() < 0.3:
            body |= dict(token_ids_logprob=rng.sample(prompt, min(2, len(prompt))))
    if rng.random() >= ABORTED_SHARE:
        return Request(body)
    # /abort_request knows no id of a sample of n > 1: SGLang gives each an id of its own.
    ways = ["disconnect"] if sampling.get("n", 1) > 1 else ["disconnect", "abort_request"]
    return Request(body, rng.choice(ways), LONGEST_DELAY * rng.random() ** 3)


def _up_to(rng: random.Random, most: int) -> int:
    """1 to `most`, as many below the square root as above."""
    return min(most, int((most + 1) ** rng.random()))


def _prompt(rng: random.Random, corpus: Corpus, anchors: Sequence[int]) -> list[int]:
    """1 to LONGEST_PROMPT tokens; most begin like others."""
    length = _up_to(rng, LONGEST_PROMPT)
    start = rng.randrange(len(corpus.ids) - LONGEST_PROMPT)
    own = rng.choice([0, 0, length // 2, length])  # tokens at the end that are the prompt's own
    anchor = rng.choice(anchors)
    return [*corpus.ids[anchor : anchor + length - own], *corpus.ids[start : start + own]]


def _sampling(rng: random.Random, corpus: Corpus, prompt: Sequence[int]) -> dict[str, Any]:
    def chance(share: float) -> bool:
        return rng.random() < share

    most = _up_to(rng, MOST_NEW_TOKENS)
    out: dict[str, Any] = dict(temperature=0, max_new_tokens=most, ignore_eos=chance(0.5))
    if chance(0.45):
        out["temperature"] = round(rng.uniform(0.3, 1.2), 2)
        out |= dict(top_k=rng.randint(1, 50)) if chance(0.4) else {}
        out |= dict(top_p=round(rng.uniform(0.5, 1.0), 2)) if chance(0.4) else {}
        out |= dict(min_p=round(rng.uniform(0.0, 0.3), 2)) if chance(0.3) else {}
    if chance(0.08):  # alone: without overlap, the order of SGLang's penalties differs from process to process
        out |= dict(repetition_penalty=round(rng.uniform(0.7, 1.5), 2))
    else:
        out |= dict(frequency_penalty=round(rng.uniform(-0.5, 1.5), 2)) if chance(0.08) else {}
        out |= dict(presence_penalty=round(rng.uniform(-0.5, 1.5), 2)) if chance(0.08) else {}
    if chance(0.12):
        out["logit_bias"] = {str(rng.choice(corpus.ids)): rng.choice([-100, -2.5, 1.5, 4]) for _ in range(3)}
    if chance(0.12):
        # With ignore_eos, plain decoding goes on for one token after the grammar's end.
        out |= dict(rng.choice(GRAMMARS), ignore_eos=False)
    else:  # a grammar that asks for EOS and a minimum that forbids it leave no token
        if chance(0.14):
            starts = [rng.randrange(len(corpus.text) - 3) for _ in range(rng.randint(1, 3))]
            out["stop"] = [corpus.text[start : start + rng.randint(1, 3)] for start in starts]
            out |= dict(no_stop_trim=True) if chance(0.3) else {}
        if chance(0.14):
            ids = sorted({rng.choice(prompt) for _ in range(rng.randint(1, 3))})
            out |= dict(stop_token_ids=ids, ignore_eos=False)
        out |= dict(min_new_tokens=rng.randint(1, most)) if chance(0.12) else {}
    out |= dict(n=2) if chance(0.05) else {}
    return out
