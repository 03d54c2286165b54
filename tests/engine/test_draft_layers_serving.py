"""Drafts whose layers differ from Qwen3's, or are in NVFP4, behind a real server in float32: lossless on two ranks
whose blocks have another width at every step (C21), sampled output of the target's distribution (C16)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.engine.test_dflash2_serving import (
    PLAIN_DRAFT,
    TARGET,
    assert_accept_lengths,
    assert_distributed,
    assert_every_width_ran,
    draws,
    expected,
    prompts,
    request,
    target,
    three_tokens,
)
from tests.support import scheduler_hooks
from tests.support.engines import serve
from tests.support.reference_layers import LAGUNA, SWIGLU, is_norm, laguna_tensors
from tests.support.tiny import write_checkpoint
from training.quantise import SCHEMES, quantise

__all__ = ["expected", "target"]
pytestmark = [pytest.mark.slow, pytest.mark.full]
NVFP4 = SCHEMES["nvfp4-a16"]


class Served(NamedTuple):
    """A server on two ranks, the draft's checkpoint, and where its instruments have their files."""

    server: Server
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    records: Path


def gemma_norms() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The trained draft, written down for norms that scale by 1 + weight."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(PLAIN_DRAFT / "model.safetensors").items()}
    tensors = {name: tensor - 1 if is_norm(name) else tensor for name, tensor in tensors.items()}
    return {**config, "use_gemma_norm": True, "dtype": "float32"}, tensors


def gemma_norms_and_swigluoai() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The same, written down for gate * sigmoid(alpha * gate) * (up + 1), where silu(gate) * up is what it was
    trained with: with gates a part of alpha as large and `up` four times, it is silu(gate) * (up + 1 / 4)."""
    config, tensors = gemma_norms()
    alpha, times = SWIGLU["swiglu_alpha"], 4
    scales = {"gate_proj": 1 / alpha, "up_proj": times, "down_proj": alpha / times}
    tensors = {name: tensor * scales.get(name.split(".")[-2], 1) for name, tensor in tensors.items()}
    return {**config, **SWIGLU, "swiglu_limit": 4.0}, tensors


def laguna() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The trained draft with random norms of features and gates, in the class that published drafts name."""
    config, tensors = gemma_norms()
    tensors = {name: tensor + 1 if is_norm(name) else tensor for name, tensor in tensors.items()}
    config = {**config, "use_gemma_norm": False, "model_type": "laguna"}
    config |= {name: LAGUNA[name] for name in ("architectures", "gating")}
    return config, {**tensors, **laguna_tensors(config)}


def nvfp4() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The trained draft and the embedding of its target, in NVFP4."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    config |= {"has_embed_tokens": True, "quantization_config": dict(NVFP4.config)}
    embedding = {"embed_tokens.weight": load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]}
    return config, quantise({**load_file(PLAIN_DRAFT / "model.safetensors"), **embedding}, NVFP4)


def family(name: str, make: Any, *marks: pytest.MarkDecorator) -> Any:
    works = pytest.mark.matrix(target="Qwen3", draft=name, kv="model dtype, two ranks", outcome="works")
    return pytest.param(make, id=name, marks=(works, *marks))


@pytest.fixture(
    scope="module",
    params=[
        family("Gemma norms", gemma_norms, pytest.mark.release),
        family("Gemma norms and swigluoai", gemma_norms_and_swigluoai),
        family("Laguna", laguna),
        family("NVFP4 with an embedding of its own, stand-ins for its kernels", nvfp4),
    ],
)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config, tensors = request.param()
    directory = tmp_path_factory.mktemp("served")
    draft = write_checkpoint(directory / "draft", config, tensors)
    records = directory / "records"
    records.mkdir()
    stand_ins = ["support.quantised_twins"] if "quantization_config" in config else []
    settings = {scheduler_hooks.HOOKS_ENV: "widths,oracle,poison", CONFIG_ENV: '{"copy": "off", "width": {}}'}
    environment = test_parallel.watched(records, *stand_ins, **settings)
    with serve(TARGET, draft, environment=environment, tp_size=2, **test_parallel.RANKS) as server:
        assert f"\n  draft_quantization: {'modelopt' if stand_ins else 'none'}\n" in server.log_text()
        yield Served(server, config, tensors, records)
        print(server.log_tail(60))  # shown with a failure


def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(served, expected):
    asked = [request(prompt) for prompt in prompts()]
    unaided = test_parallel.ask(served.server, asked, together=False)
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(served.records, prompt, output)
    answers = test_parallel.ask(served.server, asked, together=True)
    assert [answer["output_ids"] for answer in unaided] == expected
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in unaided)
    assert sum(map(len, expected)) > 1.5 * steps, "the draft is of use"
    assert [answer["output_ids"] for answer in answers] == expected
    assert_accept_lengths(answers, at_least=6)
    assert_every_width_ran(served.server)
    whole = dict(sampled=[*unaided, *answers], directory=served.records)
    test_parallel.assert_same_tokens_on(range(2), whole)


def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(served, target, expected):
    with ThreadPoolExecutor(1) as pool:
        asked = [request(prompt) for prompt in prompts()]
        beside = pool.submit(test_parallel.ask, served.server, asked, together=False)
        sampled = draws(served.server)
        assert [answer["output_ids"] for answer in beside.result()] == expected
    assert_distributed(served.server, sampled, three_tokens(target))
