"""Step-3.5's own multi-token-prediction layers as the draft, behind a real server in float32.

Weights are random, so the layers choose the recorded continuation, with errors: steps commit 1 to 4 tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import RANKS, RANKS_ENV
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.collectives import DIRECTORY_ENV
from tests.support.engines import RETRACTING, greedy, greedy_params, serve
from tests.zoo import step3p5
from tests.zoo.member import directory_of
from tests.zoo.step3p5 import MTP_LAYERS, Reference

pytestmark = pytest.mark.slow

CHUNK, NEW_TOKENS = 64, 40
LENGTHS = (1, 2, 33, 65, 100, 200)  # the longer ones are prefilled in chunks; the last chunk of 65 has one token
COMMON: dict[str, Any] = dict(chunked_prefill_size=CHUNK, max_total_tokens=4096)


@functools.cache
def checkpoint() -> Path:
    return step3p5.write(directory_of("Step-3.5"))


@functools.cache
def reference(target: Path | None = None) -> Reference:
    return Reference(target or checkpoint())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 250, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def both_turns() -> tuple[list[list[int]], list[list[int]]]:
    return two_turns(checkpoint(), prompts(), NEW_TOKENS, **COMMON)


def two_turns(
    target: Path, asked: list[list[int]], new_tokens: int, **arguments: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """What a server without speculation answers, and what then to prompts that begin with these answers."""
    with serve(target, **arguments) as server:
        first = greedy(server, asked, new_tokens)
        return first, greedy(server, next_prompts(asked, first), new_tokens)


def plain() -> list[list[int]]:
    return both_turns()[0]


def next_prompts(asked: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + output + [9, 8, 7] for prompt, output in zip(asked, outputs, strict=True)]


@contextmanager
def ours(
    directory: Path,
    hooks: str,
    *modules: str,
    config: dict[str, Any] | None = None,
    graphs: bool = False,
    **arguments: Any,
) -> Iterator[tuple[Server, Path]]:
    """modules: see `scheduler_hooks.install`; config: the plugin's; graphs: whether forwards run in recorded
    graphs."""
    records = directory / "records"
    records.mkdir()
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    variables = {RANKS_ENV: str(records), DIRECTORY_ENV: str(records), CONFIG_ENV: json.dumps(config or {})}
    environment = hooked(records, hooks, *modules, **variables)
    with serve(checkpoint(), checkpoint(), environment=environment, **{**COMMON, **arguments}) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure


class Noted(NamedTuple):
    """A block: the likeliest token of each layer, and what was chosen in its place."""

    rid: str
    prefix: int
    likeliest: list[int]
    chosen: list[int]


def noted(records: Path) -> list[Noted]:
    """The blocks of this test's requests."""
    blocks = [Noted(*row) for row in scheduler_hooks.noted(records, "mtp.jsonl")]
    return [block for block in blocks if block.rid.startswith("text")]


def commits_of(blocks: Sequence[Noted]) -> set[int]:
    """How many tokens steps committed, by the next block of the same request; other requests' may lie between."""
    prefixes: dict[str, set[int]] = {}
    for block in blocks:
        prefixes.setdefault(block.rid, set()).add(block.prefix)
    return {after - before for of in prefixes.values() for before, after in pairwise(sorted(of))}


def wrong_proposals(
    blocks: Sequence[Noted], texts: dict[str, list[int]], propose: Callable[..., list[int]] | None = None
) -> int:
    """Blocks whose proposals are not the reference's for the text before them; propose: another one's."""
    propose = propose or expected
    count = 0
    for block in blocks:
        text = texts[block.rid][: block.prefix + 1]
        if len(text) == block.prefix + 1:  # else the step began behind the request's end
            chosen = (*block.chosen, *[0] * (MTP_LAYERS - len(block.chosen)))
            proposed = propose(tuple(text), chosen)
            count += block.likeliest != proposed[: len(block.likeliest)]
    return count


@functools.cache
def expected(text: tuple[int, ...], chosen: tuple[int, ...], target: Path | None = None) -> list[int]:
    return reference(target).propose(torch.tensor(text), torch.tensor(chosen))[0].tolist()


def ask(server: Server, records: Path) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    return ask_each(server, records, prompts(), plain())


def ask_each(
    server: Server, records: Path, asked: list[list[int]], outputs: list[list[int]]
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Answers to prompts, one after the other, and texts by rid. The draft aims at the outputs."""
    answers, texts = [], {}
    for prompt, output in zip(asked, outputs, strict=True):
        scheduler_hooks.record(records, prompt, output)
        rid = f"text {len(prompt)}"
        answers.append(server.generate(input_ids=prompt, rid=rid, sampling_params=greedy_params(len(output))))
        texts[rid] = prompt + output
    return answers, texts


def test_the_target_alone_is_the_reference() -> None:
    for prompt, output in zip(prompts(), plain(), strict=True):
        logits = reference().logits(torch.tensor(prompt + output[:-1]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output


@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype", outcome="works")
@pytest.mark.parametrize("page_size", [1, 16])
def test_output_is_plain_decodings_and_proposals_are_the_references(page_size: int, tmp_path: Path) -> None:
    with ours(tmp_path, "mtp", page_size=page_size) as (server, records):
        unaided = greedy(server, prompts(), NEW_TOKENS)
        after_hits = greedy(server, next_prompts(prompts(), plain()), NEW_TOKENS)
        server.post("/flush_cache?timeout=60")
        answers, texts = ask(server, records)
        assert "draft: MTP(3 layers: sliding, sliding, sliding; own heads)" in server.log_tail(2000)
    assert unaided == plain()
    assert after_hits == both_turns()[1]
    assert [answer["output_ids"] for answer in answers] == plain()
    blocks = noted(records)
    assert wrong_proposals(blocks, texts) == 0
    commits = commits_of(blocks)
    assert commits >= set(range(1, MTP_LAYERS + 2)), commits


def test_a_window_of_one_row_fewer_proposes_otherwise(tmp_path: Path) -> None:
    with ours(tmp_path, "mtp,mtp_short") as (server, records):
        answers, texts = ask(server, records)
    assert [answer["output_ids"] for answer in answers] == plain()
    assert wrong_proposals(noted(records), texts) > 0


FIELDS: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency_penalty": dict(frequency_penalty=0.7),
    "presence_penalty": dict(presence_penalty=1.5),
    "repetition_penalty": dict(repetition_penalty=1.4),
    "logit_bias": dict(logit_bias={"7": 9.0}),
    "min_p": dict(temperature=1.3, min_p=1.0),
    "top_k": dict(temperature=1.3, top_k=1),
    "max_new_tokens": dict(max_new_tokens=7),
    "max_width": dict(custom_params={"dflash": {"max_width": 2}}),
}
WITHOUT_EFFECT = ("min_p", "top_k", "max_width")  # one token is left, or it only bounds a step


def by_field(server: Server) -> dict[str, list[int]]:
    """Output of a prompt with each field, one beside the other."""
    asked = {name: greedy_params(NEW_TOKENS) | fields for name, fields in FIELDS.items()}
    answers = server.generate(input_ids=[prompts()[4]] * len(asked), sampling_params=list(asked.values()))
    return {name: answer["output_ids"] for name, answer in zip(asked, answers, strict=True)}


@pytest.mark.full
def test_request_fields_act_as_in_plain_decoding(tmp_path: Path) -> None:
    """In synchronous steps, with requests that are retracted and go on."""
    with serve(checkpoint(), disable_overlap_schedule=True, **COMMON) as server:
        expected = by_field(server)
    with serve(
        checkpoint(), checkpoint(), environment=RETRACTING, disable_overlap_schedule=True, **COMMON
    ) as server:
        got = by_field(server)
        assert "Testing retraction" in server.log_text()
    assert got == expected
    same = [name for name in FIELDS if expected[name] == expected["none"]]
    assert same == ["none", *WITHOUT_EFFECT]


@pytest.mark.full
@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype, two ranks", outcome="works")
def test_two_ranks_propose_alike(tmp_path: Path) -> None:
    """Both note every block: the reference's proposals where the oracle chooses, and the same drawn ones, although
    their random numbers differ."""
    sampled = dict(temperature=1.5, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with ours(tmp_path, "mtp", "engine.test_parallel", tp_size=2, **RANKS) as (server, records):
        answers, texts = ask(server, records)
        server.generate(input_ids=[5, 6, 7], rid="text drawn", sampling_params=sampled)
    assert [answer["output_ids"] for answer in answers] == plain()
    blocks = noted(records)
    drawn = [block for block in blocks if block.rid == "text drawn"]
    assert wrong_proposals([block for block in blocks if block not in drawn], texts) == 0
    assert any(block.chosen != block.likeliest for block in drawn)
    assert {drawn.count(block) for block in drawn} == {2}
