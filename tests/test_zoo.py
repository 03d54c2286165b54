"""Every zoo target on a real engine: output equal to plain decoding's, and the features of its layers (C11).

Drafts are random, so an oracle drives accept lengths through their whole range.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server
from tests import scheduler_hooks
from tests.engines import greedy, greedy_params, serve
from tests.zoo import ZOO, pair, reference
from tests.zoo.member import BLOCK, LAYERS

pytestmark = pytest.mark.slow

CHUNK = 64
NEW_TOKENS = 40
LENGTHS = (5, 33, 100, 200)  # the longer ones are prefilled in chunks
COMMON: dict[str, Any] = dict(chunked_prefill_size=CHUNK, max_total_tokens=4096, skip_server_warmup=True)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "overlap": dict(),
    "synchronous, pages of 16": dict(page_size=16, disable_overlap_schedule=True),
}


def matrix(name: str) -> pytest.MarkDecorator:
    return pytest.mark.matrix(target=name, draft="z-lab", kv="model dtype", outcome="works")


TARGETS = [
    pytest.param(name, id=name, marks=matrix(name)) for name, member in ZOO.items() if member.on_gpu_only is None
]


def prompts(name: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def next_turns(name: str, outputs: list[list[int]]) -> list[list[int]]:
    """Prompts that begin with what the server has just computed."""
    return [prompt + output + [9, 8, 7] for prompt, output in zip(prompts(name), outputs, strict=True)]


@functools.cache
def plain(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs without speculation of the prompts, and of their next turns."""
    with serve(pair(name)[0], **COMMON, **ZOO[name].arguments) as server:
        first = greedy(server, prompts(name), NEW_TOKENS)
        return first, greedy(server, next_turns(name, first), NEW_TOKENS)


@contextmanager
def ours(name: str, directory: Path, **arguments: Any) -> Iterator[tuple[Server, Path]]:
    """A server of the member with our worker, and where its instruments leave their files."""
    records = directory / "records"
    records.mkdir()
    environment = {
        "DFLASH_SGLANG_REQUIRE": "1",
        "PYTHONPATH": f"{scheduler_hooks.install(directory / 'hooks')}:{Path(__file__).parents[1]}",
        scheduler_hooks.HOOKS_ENV: "oracle,features",
        scheduler_hooks.RECORDS_ENV: str(records),
    }
    with serve(*pair(name), environment=environment, **COMMON, **ZOO[name].arguments, **arguments) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_output_equals_plain_decoding_and_the_draft_sees_the_target_as_transformers_does(
    target: str, configuration: str, tmp_path: Path
) -> None:
    expected, expected_next = plain(target)
    with ours(target, tmp_path, **CONFIGURATIONS[configuration]) as (server, records):
        (unaided,) = greedy(server, prompts(target)[2:3], NEW_TOKENS)
        captured = scheduler_hooks.features_at(records)
        for asked, outputs in (prompts(target), expected), (next_turns(target, expected), expected_next):
            for prompt, output in zip(asked, outputs, strict=True):
                scheduler_hooks.record(records, prompt, output)
        server.post("/flush_cache?timeout=60")
        first = generate(server, prompts(target))
        second = generate(server, next_turns(target, expected))
        borrowed = scheduler_hooks.borrowed(records)
    assert unaided == expected[2]
    assert [answer["output_ids"] for answer in first] == expected
    assert [answer["output_ids"] for answer in second] == expected_next
    for prompt, answer in zip(prompts(target), second, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(prompt) // 16 * 16
    histogram = accept_histogram([*first, *second])
    assert sum(count > 0 for count in histogram) >= BLOCK - 1, f"accepted proposals per step: {histogram}"
    assert_features(target, captured)
    assert_borrowed(target, *borrowed)


def generate(server: Server, asked: list[list[int]]) -> list[dict[str, Any]]:
    return server.generate(input_ids=asked, sampling_params=greedy_params(NEW_TOKENS))


def accept_histogram(answers: list[dict[str, Any]]) -> list[int]:
    histogram = [0] * BLOCK
    for answer in answers:
        for accepted, count in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            histogram[accepted] += count
    return histogram


def assert_features(name: str, captured: dict[int, torch.Tensor]) -> None:
    """Of the third prompt and its unaided output: the first, the last and a middle layer, in the draft's order."""
    expected = layer_outputs(name)
    features = torch.stack([captured[i] for i in range(len(expected[0]))])
    ids = ZOO[name].feature_layers
    assert {0, LAYERS - 1} < set(ids) and list(ids) != sorted(ids)
    for layer, feature in zip(ids, features.chunk(len(ids), dim=-1), strict=True):
        torch.testing.assert_close(
            feature, expected[layer], rtol=1e-4, atol=1e-4, msg=lambda m, i=layer: f"layer {i}: {m}"
        )


@functools.cache
def layer_outputs(name: str) -> list[torch.Tensor]:
    """What each layer of the target in transformers gives for the third prompt and its output, [tokens, hidden]."""
    model = reference(name)
    outputs: list[torch.Tensor] = []
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(lambda module, args, out: outputs.append(out[0] if out.ndim == 3 else out))
    with torch.no_grad():
        model(torch.tensor([prompts(name)[2] + plain(name)[0][2][:-1]]))
    return outputs


def assert_borrowed(name: str, ids: torch.Tensor, embeddings: torch.Tensor, logits: torch.Tensor) -> None:
    """Scaled embeddings are scaled once, and the head has the vocabulary's rows and no padding."""
    model = reference(name)
    with torch.no_grad():
        torch.testing.assert_close(embeddings, model.get_input_embeddings()(ids))
        torch.testing.assert_close(logits, model.get_output_embeddings()(embeddings), rtol=1e-4, atol=1e-4)
