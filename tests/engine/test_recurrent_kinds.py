"""Targets with recurrent layers beside gated delta nets, whose tests are `test_recurrent_serving`.

Output through our worker equals plain decoding's, float32 on the CPU. A state of a rejected row, or one that the
prefix cache keeps at the wrong place, shows in what follows. The reference keeps no prefixes at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.engine.test_recurrent_serving import (
    GRID,
    LENGTHS,
    NEW_TOKENS,
    Answered,
    ask_turns,
    assert_equal,
    assert_every_number_was_accepted,
    plain_answers,
    random_ids,
    recorded,
    request,
)
from tests.support import scheduler_hooks
from tests.support.engines import RETRACTING, ask_at_once, serve
from tests.zoo import ZOO
from tests.zoo.member import pair

CHUNK = 128
# By the target and what its server is told. Without buffers, as SGLang serves short convolutions, the prefix cache
# keeps a state wherever a prefix ends.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2_chunked_retracting": ("LFM2", dict(chunked_prefill_size=CHUNK, env=RETRACTING)),
    "lfm2_moe": ("LFM2-MoE", dict()),
}

pytestmark = [pytest.mark.slow, pytest.mark.full]


def rows() -> list[Any]:
    """Each configuration, marked as a row of the support matrix."""
    return [
        pytest.param(
            name,
            id=name,
            marks=pytest.mark.matrix(target=target, draft="z-lab", kv="model dtype", outcome="works"),
        )
        for name, (target, _) in CONFIGURATIONS.items()
    ]


@pytest.fixture(scope="module", params=rows())
def configuration(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain(configuration) -> list[Answered]:
    return plain_answers(CONFIGURATIONS[configuration][0])


@pytest.fixture(scope="module")
def ours(configuration, plain, tmp_path_factory) -> Iterator[Server]:
    """Our server of one configuration, with an oracle that accepts anything from none to the whole block."""
    target, overrides = CONFIGURATIONS[configuration]
    arguments = {"mamba_track_interval": GRID, **ZOO[target].arguments, **overrides}
    records = recorded(tmp_path_factory.mktemp("records"), plain)
    environment = scheduler_hooks.hooked(records, "oracle", **arguments.pop("env", {}))
    with serve(*pair(target), environment=environment, **arguments) as server:
        yield server
        print(server.log_tail(40))  # shown with a failure
        if configuration.endswith("retracting"):
            assert "Testing retraction" in server.log_text()


def test_turns_of_a_conversation_equal_plain_decoding_cold_and_on_states_that_verify_wrote(
    ours, plain, configuration
):
    ours.post("/flush_cache?timeout=60")
    answers = ask_turns(ours, plain)
    assert_equal(answers, plain)
    assert all(len(output) < NEW_TOKENS for _, output in plain[: len(LENGTHS)])
    assert_every_number_was_accepted(answers)
    # A next turn goes on from a state that a verify wrote, if it has the whole output before it.
    grid = ZOO[CONFIGURATIONS[configuration][0]].prefix_grid
    for length, answer in zip(LENGTHS, answers[2 * len(LENGTHS) :: 2], strict=True):
        assert answer["meta_info"]["cached_tokens"] >= (length + NEW_TOKENS - 1) // grid * grid


def test_outputs_equal_plain_decoding_in_a_batch_with_sampled_neighbours(ours, plain):
    """A sampled neighbour sends the whole batch through rejection sampling."""
    ours.post("/flush_cache?timeout=60")
    sampled = [request(random_ids(40, seed=i), temperature=1.0) for i in range(3)]
    for _ in ("cold", "warm"):
        answers = ask_at_once(ours, [asked for asked, _ in plain] + sampled)
        assert_equal(answers[: len(plain)], plain)
