"""Sampled output over multi-token-prediction layers: argmax and drawn proposals give the target's distribution."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV
from tests.engine.test_sampled_serving import (
    GREEDY_TOKENS,
    PROMPT,
    TEMPERATURE,
    TOP_K,
    assert_sampled_from,
    distribution,
)
from tests.support import recorded_graphs
from tests.support.engines import greedy, serve
from tests.zoo import step3p5

pytestmark = pytest.mark.slow

LIKELY = slice(40, 52)  # tokens that all heads favour, so that random layers propose what the target samples


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = step3p5.write(tmp_path_factory.mktemp("mtp") / "target")
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("lm_head.weight", "shared_head.output.weight")):
            tensor[LIKELY] *= 3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[dict[str, Any]]:
    with serve(checkpoint) as server:
        yield dict(greedy=greedy(server, [PROMPT], GREEDY_TOKENS)[0], expected=distribution(server, PROMPT))


@pytest.mark.parametrize(
    ("proposals", "graphs"),
    [("argmax", False), pytest.param("drawn", False, marks=pytest.mark.release), ("drawn", True)],
)
def test_sampled_tokens_follow_the_targets_distribution(
    proposals: str, graphs: bool, checkpoint: Path, plain: dict[str, Any], tmp_path: Path
) -> None:
    """Beside greedy requests, whose output is plain decoding's."""
    environment = {REQUIRE_ENV: "1", CONFIG_ENV: json.dumps({"proposals": proposals})}
    if graphs:
        environment |= recorded_graphs.recording(tmp_path)
    # Of argmax proposals 3 to 4 % are accepted.
    sampling = dict(temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=3, ignore_eos=True, n=400)
    arguments: dict[str, Any] = dict(environment=environment, max_running_requests=48)
    with serve(checkpoint, checkpoint, **arguments) as server, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(greedy, server, [PROMPT] * 3, GREEDY_TOKENS)
        assert_sampled_from(server, PROMPT, plain["expected"])
        assert beside.result() == [plain["greedy"]] * 3
        steps = [
            one["meta_info"]["spec_verify_ct"]
            for one in server.generate(input_ids=PROMPT, sampling_params=sampling)
        ]
        assert f"proposals: {proposals}" in server.log_tail(2000)
    assert 0 < steps.count(1) < len(steps), "two tokens of one step, and of two"
    assert not graphs or {replay.role for replay in recorded_graphs.replays(tmp_path)} == {"draft", "target"}
