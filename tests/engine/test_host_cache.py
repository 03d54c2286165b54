"""Prefixes that `--enable-hierarchical-cache` brings back from the host, float32 on the CPU.

The device's pool holds three requests. Others run in between: what is asked again is on the host only. After such
a hit the draft proposes what it proposed cold, token by token. It reads the context's keys and values for that,
and the pool has only those that came back. `test_host_cache_gpu` does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.engine.test_recurrent_serving import GRID, random_ids
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.zoo.member import pair
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

LENGTH, NEW_TOKENS, OTHERS = 300, 40, 4
ON_HOST: dict[str, Any] = dict(enable_hierarchical_cache=True, max_total_tokens=1024, hicache_ratio=4)
TARGETS: dict[str, dict[str, Any]] = {
    "the trained pair, pages of 16": dict(page_size=16, grid=16),
    "Qwen3.5": dict(mamba_track_interval=GRID, grid=GRID),  # recurrent states beside keys and values
    # Keys and values in two pools, and a window on the draft.
    "gpt-oss": dict(moe_runner_backend="triton", swa_full_tokens_ratio=0.4, speculative_draft_window_size=64),
}

Proposals = dict[int, list[int]]  # of each step, by the tokens before its block


@dataclass
class Asking:
    """A server whose drafts write their proposals to a file, one request at a time."""

    server: Server
    directory: Path

    def ask(self, prompt: list[int]) -> tuple[dict[str, Any], Proposals]:
        before = len(scheduler_hooks.noted(self.directory, "proposals.jsonl"))
        answer = self.server.generate(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS))
        return answer, dict(scheduler_hooks.noted(self.directory, "proposals.jsonl")[before:])

    def record(self, prompt: list[int], output: list[int]) -> None:
        """The oracle, where the server has one, proposes this output from now on."""
        scheduler_hooks.record(self.directory, prompt, output)


def prompts_of(target: str) -> list[list[int]]:
    if "pair" not in target:
        return [random_ids(LENGTH, seed) for seed in range(1 + OTHERS)]
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[1000 * i : 1000 * i + LENGTH]) for i in range(1 + OTHERS)]


def checkpoints(target: str) -> tuple[Path, Path]:
    if "pair" not in target:
        return pair(target)
    of_pair = pair_directories()
    return Path(of_pair["target"]), Path(of_pair["draft"])


@pytest.fixture(scope="module", params=TARGETS)
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """Random drafts have an oracle beside them, whose blocks the target verifies in place of theirs."""
    arguments = {name: value for name, value in TARGETS[request.param].items() if name != "grid"}
    directory = tmp_path_factory.mktemp("proposals")
    environment = scheduler_hooks.hooked(directory, "proposals,oracle")
    with serve(*checkpoints(request.param), environment=environment, **ON_HOST, **arguments) as server:
        yield Asking(server, directory)
        print(server.log_tail(40))  # shown with a failure


def test_a_prefix_from_the_host_gives_the_output_and_the_proposals_of_a_cold_run(asking, request):
    target = request.node.callspec.params["asking"]
    grid = TARGETS[target].get("grid", 1)
    prompt, *others = prompts_of(target)
    cold, proposed = asking.ask(prompt)
    assert cold["meta_info"]["cached_tokens"] == 0
    if "pair" not in target:
        asking.record(prompt, cold["output_ids"])
    question = prompt + cold["output_ids"] + prompt[:7]
    for turn, length in ((prompt, LENGTH - 1), (question, LENGTH + NEW_TOKENS - 1)):
        for other in others:
            asking.ask(other)
        warm, proposed_again = asking.ask(turn)
        cached = warm["meta_info"]["cached_tokens_details"]
        # The last token's are there too, where its block went on past the end of the request.
        assert cached["device"] == 0 and cached["host"] in {length // grid * grid, (length + 1) // grid * grid}
        if turn is question:
            asking.server.post("/flush_cache?timeout=60")
            cold, proposed = asking.ask(turn)
            assert cold["meta_info"]["cached_tokens"] == 0
        assert warm["output_ids"] == cold["output_ids"]
        alike = proposed.keys() & proposed_again.keys()
        assert len(alike) >= 5
        assert {at: proposed_again[at] for at in alike} == {at: proposed[at] for at in alike}
        accepted = cold["meta_info"]["spec_accept_length"], warm["meta_info"]["spec_accept_length"]
        if "pair" in target:
            assert accepted[0] == accepted[1] > 3
