"""Step-3.5's own multi-token-prediction layers on a GPU with FlashAttention 3, at random widths.

Weights are random numbers of bfloat16. Each token of the output is compared with the target's likeliest one in a
prefill of them all, as in `test_width_gpu`; plain decoding's own output shows how many differ anyhow. Each
proposal is compared with the likeliest one of the reference, which computes in float32. The layers choose the
recorded continuation, with errors: steps commit 1 to 4 tokens. Sampled requests get what the layers draw.

All servers start at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_mtp import (
    COMMON,
    CONFIG,
    HOOKS,
    NEW_TOKENS,
    TYPES_OF_GROUPS,
    Noted,
    commits_of,
    noted,
    prompts,
)
from tests.gpu.test_width_gpu import TIE, gaps
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.zoo import step3p5
from tests.zoo.member import TEXT
from tests.zoo.step3p5 import MTP_LAYERS, TYPES, Reference

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZES = TEXT | dict(hidden_size=256, intermediate_size=384, head_dim=64)  # that a GPU's kernels take
FLAGS: dict[str, Any] = {
    **ON_DEVICE, **COMMON, "mem_fraction_static": 0.6, "max_running_requests": 8, "cuda_graph_max_bs_decode": 8,
}  # fmt: skip
ENVIRONMENT = {**DEVICE_ENVIRONMENT, "SGLANG_LOG_DECODE_GRAPH_KEY": "1"}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {  # types of layers, flags
    "graphs": (TYPES, {}),
    "graphs, two KV groups, pages of 64": (TYPES_OF_GROUPS, dict(page_size=64)),
    "no graphs": (TYPES, dict(disable_cuda_graph=True)),
}
FAR = 0.05  # share of the tokens that may be further than TIE from the likeliest one
TEMPERATURE, DRAWN_FROM, SAMPLED = 1.0, 16, 12


def asked() -> list[list[int]]:
    """Twice as many as `prompts`: at some random widths those alone give fewer than 100 proposals."""
    return [*prompts(), *(prompt[::-1] for prompt in prompts())]


def checkpoint(directory: Path, types: list[str]) -> Path:
    """The target's layers are the same, whatever those of MTP are. Experts are chosen by their biases: with almost
    equal scores bfloat16 might choose others."""
    target = step3p5.write(directory, types, SIZES)
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(target / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("router_bias"):
            tensors[name] *= 64
    tensors["lm_head.weight"][-1] = 0  # SGLang's logprobs of a prompt name this token 0: it is never the likeliest
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@contextmanager
def all_at_once(starts: Mapping[str, AbstractContextManager[Server]]) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(starts)) as pool:
            started = {name: pool.submit(start.__enter__) for name, start in starts.items()}
            wait(started.values())
        for name, future in started.items():
            if future.exception() is None:
                stack.push(starts[name])
        yield {name: future.result() for name, future in started.items()}


@dataclass
class Served:
    reference: Reference
    answers: list[dict[str, Any]]  # to `asked`, twice
    blocks: list[Noted]
    texts: dict[str, list[int]]  # by rid
    log: str
    plain: Server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    targets, records, starts = {}, {}, dict[str, AbstractContextManager[Server]]()
    for name, (types, flags) in CASES.items():
        directory = tmp_path_factory.mktemp("mtp")
        targets[name], records[name] = checkpoint(directory / "target", types), directory / "records"
        records[name].mkdir()
        variables = {**ENVIRONMENT, CONFIG_ENV: json.dumps(CONFIG)}
        environment = scheduler_hooks.hooked(records[name], f"mtp,{HOOKS}", **variables)
        starts[name] = serve(targets[name], targets[name], environment=environment, **{**FLAGS, **flags})
    starts["plain"] = serve(targets["graphs"], environment=ENVIRONMENT, **FLAGS)
    with all_at_once(starts) as servers:
        plain = servers.pop("plain")
        outputs = [ask(plain, prompt)["output_ids"] for prompt in asked()]
        found = {}
        for name, server in servers.items():
            answers, texts = [], {}
            for number, (prompt, output) in enumerate(zip(asked(), outputs, strict=True)):
                scheduler_hooks.record(records[name], prompt, output)
                answers.append(ask(server, prompt, rid=f"text {number}"))
                texts[f"text {number}"] = prompt + answers[-1]["output_ids"]
            together = server.generate(input_ids=asked(), sampling_params=greedy_params(NEW_TOKENS))
            for number in range(SAMPLED):
                prompt, rid = [20 + number, 6, 7], f"text drawn {number}"  # no prefix is another's
                sampling = dict(temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                answer = server.generate(input_ids=prompt, rid=rid, sampling_params=sampling)
                texts[rid] = prompt + answer["output_ids"]
            blocks, reference = noted(records[name]), Reference(targets[name])
            found[name] = Served(reference, answers + together, blocks, texts, server.log_text(), plain)
        yield found


def ask(server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return server.generate(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS), **fields)


def far(plain: Server, outputs: list[list[int]]) -> float:
    """Share of the tokens that the target's likeliest is likelier than by more than TIE. outputs: of `asked`, in
    turn."""
    found: list[float] = []
    for number, output in enumerate(outputs):
        found += gaps(plain, asked()[number % len(asked())], output)
    print(f"{len(found)} tokens, {sum(gap > 0 for gap in found)} not the likeliest, by {max(found):.3f} at most")
    return sum(gap > TIE for gap in found) / len(found)


def known(of: Served, drawn: bool) -> list[tuple[Noted, torch.Tensor]]:
    """The blocks of greedy or of sampled requests, with the reference's logits [proposals, vocab]."""
    out = []
    for block in of.blocks:
        text = of.texts[block.rid][: block.prefix + 1]
        if block.chosen and len(text) == block.prefix + 1 and block.rid.startswith("text drawn") == drawn:
            chosen = torch.tensor([*block.chosen, *[0] * (MTP_LAYERS - len(block.chosen))])
            logits = of.reference.propose(torch.tensor(text), chosen)[1]
            out.append((block, logits[: len(block.chosen)]))
    return out


@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype, fa3", outcome="works")
@pytest.mark.parametrize("name", CASES)
def test_output_is_plain_decodings(served: dict[str, Served], name: str) -> None:
    of = served[name]
    plain = [ask(of.plain, prompt)["output_ids"] for prompt in asked()]
    assert far(of.plain, [answer["output_ids"] for answer in of.answers]) <= far(of.plain, plain) + FAR


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_every_layers_likeliest_token_is_the_references(served: dict[str, Served], name: str, drawn: bool) -> None:
    """Also where a layer reads what the one before has drawn."""
    found = [
        float(of_layer.max() - of_layer[token])
        for block, logits in known(served[name], drawn)
        for token, of_layer in zip(block.likeliest, logits, strict=True)
    ]
    others = sum(gap > 0 for gap in found)
    print(f"{len(found)} proposals, {others} not the likeliest, by {max(found):.3f} at most")
    assert len(found) > 100 and sum(gap > TIE for gap in found) <= FAR * len(found)


@pytest.mark.parametrize("name", CASES)
def test_the_likeliest_token_is_drawn_as_often_as_it_is_likely(served: dict[str, Served], name: str) -> None:
    """By four standard deviations at most."""
    drawn, shares = 0, []
    for block, logits in known(served[name], drawn=True):
        for token, chosen, of_layer in zip(block.likeliest, block.chosen, logits, strict=True):
            likely = of_layer.topk(DRAWN_FROM).values / TEMPERATURE
            shares.append(float((of_layer[token] / TEMPERATURE - likely.logsumexp(0)).exp()))
            drawn += token == chosen
    spread = sum(share * (1 - share) for share in shares) ** 0.5
    print(f"{len(shares)} draws, {drawn} of the likeliest, expected {sum(shares):.1f}, deviation {spread:.1f}")
    assert len(shares) > 100 and abs(drawn - sum(shares)) <= 4 * spread


@pytest.mark.parametrize("name", CASES)
def test_the_draft_ran_in_graphs_where_they_are_captured(served: dict[str, Served], name: str) -> None:
    of = served[name]
    replayed = of.log.count("Decode graph replay: worker=draft")
    drafted = sum(bool(block.chosen) for block in of.blocks)
    assert replayed == 0 if "no graphs" in name else replayed > drafted > 100
    assert {len(block.chosen) + 1 for block in of.blocks} == {1, 2, 3, 4}
    commits = commits_of(of.blocks)
    assert commits >= {1, 2, 3, 4}, commits
