"""Widths beside the block's: which are built, at which batch sizes, and what that does to the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

from dflash_sglang.patches import attention_room, graphs
from dflash_sglang.width import runtime_states
from dflash_sglang.width.runtime_states import RuntimeState, RuntimeStates, sparse
from tests.support.fakes import Settings


class Runner:
    """SGLang's model runner, as far as graphs are concerned."""

    attn_backend, model_config = "block's", SimpleNamespace(context_len=100)
    decode_cuda_graph_runner: Any

    def _get_attention_backend(self) -> str:
        return f"of {self.model_config.context_len} tokens"

    def decode_graph_gather_requirements(self) -> tuple[bool, bool]:
        return True, False


def served(block: int = 16) -> Any:
    states = object.__new__(RuntimeStates)
    states._widest, states._target = block, Runner()
    return states


def test_more_widths_are_added_the_most_useful_first_until_memory_is_short(monkeypatch) -> None:
    monkeypatch.setattr(runtime_states, "captured_sizes", lambda runner: [])

    def added(free: float, *widths: int) -> dict[int, float]:
        states, left = served(), [free]
        states.add = lambda width, sizes: left.append(left[-1] - 1.0)
        return states.add_while_free(widths, lambda: left[-1], 2.0)

    assert list(added(100, 1, 2, 4, 6, 8, 12, 16).items()) == [(width, 1.0) for width in (1, 4, 8, 2, 12, 6)]
    assert list(added(100, 3, 16)) == [1, 3]
    assert list(added(5.5, 1, 2, 4, 8, 16)) == [1, 4, 8]  # 2.5 are free, and the next one should take 1
    assert list(added(1.0, 1, 2, 4, 8, 16)) == [1], "plain decoding is always there"
    captured = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]
    assert sparse(captured) == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64]
    assert sparse([4, 8, 12, 28, 44, 52]) == [4, 8, 12, 52] and sparse([]) == []


MANY = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("captured", "ranks", "block", "sizes"),
    [
        # As many rows as a whole block; one batch between two powers of two within 64 rows.
        (MANY, 1, 16, {1: [1, 2, 4, 8, 14], 2: [8, 14], 4: [4, 8, 14], 6: [4, 8, 10, 12, 14]}),
        (MANY, 1, 16, {12: [2, 4, 5, 6, 8, 10, 12, 14]}),
        ([3, 6, 12, 24, 48], 1, 16, {1: [3, 6, 12, 24, 48], 2: [12, 24, 48]}),
        ([1, 2], 1, 16, {2: [2], 8: [2]}),
        # Ranks that cannot share rows evenly.
        ([1, 2, 3, 5], 1, 8, {1: [1, 2, 3, 5]}),
        ([1, 2, 3, 5], 2, 8, {1: [2, 4, 6]}),
        ([1], 8, 8, {1: [8]}),
        ([1, 2, 3, 4, 5], 8, 8, {6: [4]}),  # 8 would be 48 rows, of 40
        ([1, 2], 8, 8, {6: None}),  # none has as many rows on all
    ],
)
def test_a_width_is_captured_at_batches_whose_rows_are_worth_it_and_shared_evenly_by_ranks(
    captured: list[int], ranks: int, block: int, sizes: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alignment(gathered_buffer_required: bool) -> int:
        return ranks if gathered_buffer_required else 1

    monkeypatch.setattr(graphs, "get_cuda_graph_batch_size_alignment", alignment)
    monkeypatch.setattr(runtime_states, "captured_sizes", lambda runner: captured)
    states, added = served(block), {}
    states.add = added.__setitem__
    states.add_while_free([*sizes, block], lambda: 9.0, 1.0)
    assert {width: added.get(width) for width in sizes} == sizes and 1 in added


class Graphs:
    """SGLang's graphs."""

    settings = Settings(cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(bs=[1, 2, 7, 8])))
    capture_bs = [1, 2, 7, 8]

    def __init__(self, runner: Any, attn_backend: str, speculative_num_draft_tokens: int) -> None:
        self.made = (self.settings.cuda_graph_config.decode.bs, attn_backend, speculative_num_draft_tokens)


class Spec:
    """SGLang's settings of speculative decoding."""

    speculative_num_draft_tokens = 16

    @contextmanager
    def override(self, speculative_num_draft_tokens: int) -> Iterator[None]:
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        yield
        del self.speculative_num_draft_tokens


def test_graphs_of_more_widths_are_captured_at_fewer_batch_sizes_over_attention_with_windows(monkeypatch) -> None:
    spec, planned, runner = Spec(), list[Any](), Runner()
    runner.decode_cuda_graph_runner = object.__new__(Graphs)
    monkeypatch.setattr(graphs, "get_exec", lambda: SimpleNamespace(graph=Graphs.settings))
    monkeypatch.setattr(graphs, "get_cuda_graph_batch_size_alignment", lambda gathered_buffer_required: 1)
    for module in (runtime_states, attention_room):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    monkeypatch.setattr(runtime_states, "states_of_width", lambda runner, width: None)
    monkeypatch.setattr(runtime_states, "DecodeCudaGraphRunner", Graphs)
    monkeypatch.setattr(runtime_states, "plan_windows", planned.append)
    state = RuntimeState.build(runner, 4, sparse(runtime_states.captured_sizes(runner)))
    assert state.attention == "of 103 tokens" and state.graphs.made == ([1, 2, 8], "of 103 tokens", 4)
    assert planned == ["of 103 tokens"]
    assert Graphs.settings.cuda_graph_config.decode.bs == [1, 2, 7, 8]


def test_graphs_of_blocks_in_part_are_for_tokens_and_what_is_beyond_them_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InParts:
        capture_num_tokens = (16, 32, 96)

        def _ragged_capture_slots(self, tokens: int) -> int:
            return min(tokens, 6)

    monkeypatch.setattr(runtime_states, "DecodeCudaGraphRunner", InParts)
    built = served()
    built._ragged = RuntimeState(None, InParts())
    assert built.verify_budgets(6) == [16, 32, 96] and built.verify_budgets(2) == [16, 32]
    assert built.verify_budgets(20) == [16, 32, 96, 128, 160, 192, 256, 320]
    assert built.captured_requests(32, 6) == 6 and built.captured_requests(32, 7) is None
    assert built.captured_requests(128, 6) is None
    built._ragged = RuntimeState(None, None)
    assert built.verify_budgets(3) == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48]
    assert built.captured_requests(16, 1) is None
