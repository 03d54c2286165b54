"""Which graphs are replayed without a batch of SGLang's, and on which inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as graphs_of_sglang
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

from dflash_sglang.drafting import replays
from dflash_sglang.drafting.replays import Replay, most_padded, replay_of

ROWS, SIZES = 4, [1, 2, 4, 8]
ROOM = {"input_ids": 32, "positions": 32, "out_cache_loc": 32, "seq_lens": 8, "req_pool_indices": 8}


class Runner(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def execution() -> Any:
    features = SimpleNamespace(enable_return_routed_experts=False)
    return SimpleNamespace(features=features, moe=SimpleNamespace(expert_distribution_recorder_mode=None))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a runner, with graphs of 1, 2, 4 and 8 requests of 4 rows, as is looked at."""
    replays.forget()
    monkeypatch.setattr(replays, "get_exec", execution)
    graphs: Any = object.__new__(graphs_of_sglang.DecodeCudaGraphRunner)
    none = ("hisparse_coordinator", "canary_manager", "msprobe_debugger", "lora_manager", "device_timer")
    runner = Runner(
        **dict.fromkeys(none), enable_elastic_ep=False, model=SimpleNamespace(), decode_cuda_graph_runner=graphs,
        model_config=SimpleNamespace(model_is_mrope=False),
    )  # fmt: skip
    buffers = {name: torch.zeros(size, dtype=torch.int64) for name, size in ROOM.items()}
    slots = {name: SimpleNamespace(name=name, enabled=True, buffer=of) for name, of in buffers.items()}
    no = (
        "require_mlp_sync", "ragged_verify_mode", "is_dllm", "disable_padding", "enable_two_batch_overlap",
        "enable_pdmux",
    )  # fmt: skip
    vars(graphs).update(
        **dict.fromkeys(no, False), model_runner=runner, attn_backend=SimpleNamespace(prepares_in_graph=True),
        buffers=SimpleNamespace(**buffers), buffer_registry=SimpleNamespace(_slots=slots), max_bs=SIZES[-1],
        capture_bs=SIZES, captured_req_width=ROWS, seq_len_fill_value=1, in_graph_metadata_prep_done="prepared",
        deepep_adapter=SimpleNamespace(_captured_deepep_mode=None), published=[],
        backend=SimpleNamespace(replay=lambda key, batch: runner.output), _captured_ragged_layouts={},
    )  # fmt: skip
    runner.output = None
    return runner


def found(runner: Any, requests: int) -> Replay:
    replay = replay_of(runner, requests)
    assert replay is not None
    return replay


def graphs(**changed: Any) -> Any:
    return lambda runner: vars(runner.decode_cuda_graph_runner).update(changed)


def of_runner(**changed: Any) -> Any:
    return lambda runner: vars(runner).update(changed)


def with_slot(name: str) -> Any:
    slot = SimpleNamespace(name=name, enabled=True, buffer=torch.zeros(1))
    return lambda runner: runner.decode_cuda_graph_runner.buffer_registry._slots.update({name: slot})


ORDINARY: dict[str, Any] = {
    "no graphs": of_runner(decode_cuda_graph_runner=None),
    "a backend that prepares before": graphs(attn_backend=SimpleNamespace()),
    "another input": with_slot("mamba_track_indices"),
    "padding of experts": with_slot("num_token_non_padded"),
    "ranks with batches of their own": graphs(require_mlp_sync=True),
    "graphs of exact sizes": graphs(disable_padding=True),
    "two batches at once": graphs(enable_two_batch_overlap=True),
    "shared streams": graphs(enable_pdmux=True),
    "experts elsewhere": graphs(deepep_adapter=SimpleNamespace(_captured_deepep_mode="low_latency")),
    "parts of a graph": graphs(backend=object.__new__(BreakableCudaGraphBackend)),
    "three rows of positions": lambda runner: setattr(runner.model_config, "model_is_mrope", True),
    "adapters": of_runner(lora_manager="adapters"),
    "a coordinator": of_runner(hisparse_coordinator="hisparse"),
    "a canary": of_runner(canary_manager="canary"),
    "a debugger": of_runner(msprobe_debugger="msprobe"),
    "elastic experts": of_runner(enable_elastic_ep=True),
    "a model that prepares": of_runner(model=SimpleNamespace(prepare_for_forward=print)),
}


def test_a_graph_is_replayed_as_it_is_but_for_what_sglang_has_to_do_before(runner, monkeypatch):
    assert replay_of(runner, 3) is not None and replay_of(runner, 9) is None
    before = vars(runner.decode_cuda_graph_runner).copy()
    for why, change in ORDINARY.items():
        replays.forget()
        saved = {**vars(runner)}
        change(runner)
        assert replay_of(runner, 3) is None, why
        vars(runner).update(saved)
        vars(runner.decode_cuda_graph_runner).update(before)
        runner.decode_cuda_graph_runner.buffer_registry._slots = {
            name: slot for name, slot in before["buffer_registry"]._slots.items() if name in ROOM
        }
        runner.model_config.model_is_mrope = False
    replays.forget()
    assert replay_of(runner, 3) is not None
    for part, name in (("features", "enable_return_routed_experts"), ("moe", "expert_distribution_recorder_mode")):
        asked = execution()
        setattr(getattr(asked, part), name, True)
        monkeypatch.setattr(replays, "get_exec", lambda asked=asked: asked)
        replays.forget()
        assert replay_of(runner, 3) is None, name


def test_what_lies_in_its_inputs_is_taken_with_its_padding_and_what_lies_elsewhere_copied_where_it_is_whole(
    runner,
):
    replay = found(runner, 3)
    assert replay.requests == 4
    assert most_padded(runner, 3, replay.inputs) == (4, 1)
    here = [of[: 3 * ROWS if n < 3 else 3] for n, of in enumerate(replay.inputs)]
    assert replay.takes(4, *here) and not replay.takes(3, *here), "padding that nobody has written"
    elsewhere = [torch.arange(len(of)) + 1 for of in here]
    assert not replay.takes(4, *elsewhere), "three of four requests"
    whole = found(runner, 4)
    rows = [torch.arange(4 * ROWS) + 7 * n for n in range(3)]
    assert whole.takes(4, *rows, *(of[:4] for of in replay.inputs[3:]))
    assert [of[: 4 * ROWS].tolist() for of in replay.inputs[:3]] == [of.tolist() for of in rows]
    other = [torch.zeros_like(of) for of in replay.inputs]
    assert most_padded(runner, 3, type(replay.inputs)(*other)) == (3, 1), "of other inputs"


def test_the_lengths_of_a_ragged_verify_are_where_its_graph_reads_them(runner):
    layout = SimpleNamespace(verify_lens=torch.zeros(8), qo_indptr_device=torch.zeros(9))
    graphs(ragged_verify_mode=True, _captured_ragged_layouts={16: layout})(runner)
    assert replay_of(runner, 3) is None and replay_of(runner, 3, tokens=12) is None
    replay = replay_of(runner, 3, tokens=16)
    assert replay is not None and replay.ragged == (layout.verify_lens, layout.qo_indptr_device)
    assert replay.requests == 8 and most_padded(runner, 3, replay.inputs) == (8, 1)
    rows = [torch.arange(16) for _ in range(3)]
    assert replay.takes(8, *rows, *(of[:3] for of in replay.inputs[3:]))
    assert not replay.takes(4, *rows, *(of[:3] for of in replay.inputs[3:]))


def test_its_output_has_the_real_rows_in_an_object_of_its_own(runner):
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    made, published = LogitsProcessorOutput(torch.arange(64.0).view(32, 2), torch.zeros(32, 3)), []
    runner.output = made
    runner.decode_cuda_graph_runner._publish_read_done = lambda in_graph: published.append(in_graph)
    first, second = found(runner, 3).run(), found(runner, 3).run()
    assert torch.equal(first.next_token_logits, made.next_token_logits[: 3 * ROWS]) and published == [True, True]
    assert len(first.hidden_states) == 3 * ROWS and first.last_hidden_states is None
    first.hidden_states = None
    assert second.hidden_states is not None and made.hidden_states is not None
