"""Graphs of SGLang's that are replayed without a batch of SGLang's: where their inputs are all that changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.attention.verifying import prepares_in_graph
from dflash_sglang.patches.graphs import GraphInputs
from dflash_sglang.sglang_names.scheduler import (
    BreakableCudaGraphBackend,
    DecodeCudaGraphRunner,
    ModelRunner,
    device_timer_ctx,
    get_exec,
)

# Inputs of a graph by SGLang's names. Those that nothing reads: a mirror on the host for attention's metadata,
# three rows of positions of other models, counts of ranks that share a batch.
INPUTS = {*GraphInputs._fields}
UNUSED = {"seq_lens_cpu", "mrope_positions", "global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"}


class Replay:
    """The graph of one number of requests, or of the tokens of a ragged verify.

    It finds everything in its inputs, attention's metadata too.

    Between a batch and a graph SGLang makes and checks a `ForwardBatch`, a third of a step's time on the host.
    Here nothing is made: a step writes to `inputs`.
    """

    def __init__(
        self, runner: ModelRunner, graphs: DecodeCudaGraphRunner, requests: int, tokens: int | None
    ) -> None:
        self._runner, self._graphs = runner, graphs
        self.filler = graphs.seq_len_fill_value  # the length of requests that only pad
        if tokens is None:
            width = graphs.captured_req_width
            self.requests = graphs._pad_to_bucket(requests, graphs.capture_bs)  # that it was captured with
            self._rows, self._padded_rows = requests * width, self.requests * width
        else:
            self.requests = graphs._ragged_capture_slots(tokens)
            self._rows = self._padded_rows = tokens
        self._key = graphs._make_graph_key(
            graphs._capture_graph_size(bs=self.requests, num_tokens=self._padded_rows)
        )
        # Of a ragged verify, what `Ragged` has of each request, where the graph reads it.
        layout = None if tokens is None else graphs._captured_ragged_layouts[tokens]
        self.ragged = None if layout is None else (layout.verify_lens, layout.qo_indptr_device)
        self.inputs = GraphInputs(*(getattr(graphs.buffers, name) for name in GraphInputs._fields))
        self._places = [buffer.data_ptr() for buffer in self.inputs]
        # A graph needs none of it.
        self._batch: Any = SimpleNamespace(batch_size=requests, **self.inputs._asdict())
        self._whole: Any = None
        self._output: Any = None

    def reads(self, inputs: GraphInputs) -> bool:
        """Whether the graph finds all its rows in these."""
        room = len(inputs.seq_lens) >= self.requests and len(inputs.input_ids) >= self._padded_rows
        return room and [buffer.data_ptr() for buffer in inputs] == self._places

    def takes(self, padded: int, *sources: Tensor) -> bool:
        """Whether the graph can run on these, in the order of `inputs`. What lies elsewhere is copied to them, in
        one launch. padded: requests of which there are rows behind the sources, if nothing is copied."""
        places, wanted = [source.data_ptr() for source in sources], self._places
        there = padded >= self.requests
        if there and self.ragged is None and places == wanted:  # most steps
            return True
        # What is copied has to be of as many rows and requests as were captured.
        rows_fit = there and self.ragged is None and places[:3] == wanted[:3]
        if not (rows_fit or len(sources[0]) == self._padded_rows):
            return False
        if not (there and places[3:] == wanted[3:] or len(sources[-1]) == self.requests):
            return False
        moved = [n for n, place in enumerate(places) if place != wanted[n]]
        if moved:
            into = [self.inputs[n][: len(sources[n])] for n in moved]
            torch._foreach_copy_(into, [sources[n] for n in moved])
        return True

    def run(self) -> Any:
        """The output of the real rows, the same tensors each time, in an object that the caller may change."""
        graphs = self._graphs
        with device_timer_ctx(self._runner.device_timer, "target_verify"):
            whole = graphs.backend.replay(self._key, self._batch)
        # The scheduler writes to what attention has read by then.
        graphs._publish_read_done(in_graph=graphs.in_graph_metadata_prep_done is not None)
        if whole is not self._whole:
            rows = {
                name: tensor[: self._rows]
                for name in ("next_token_logits", "hidden_states", "last_hidden_states")
                if (tensor := getattr(whole, name)) is not None
            }
            self._whole, self._output = whole, replace(whole, **rows)
        return copy.copy(self._output)


@cache
def _replay(runner: ModelRunner, graphs: Any, requests: int, tokens: int | None) -> Replay | None:
    if not isinstance(graphs, DecodeCudaGraphRunner) or requests > graphs.max_bs or not _takes_inputs(graphs):
        return None
    if graphs.ragged_verify_mode != (tokens is not None) or not _does_nothing_else(runner):
        return None
    if tokens is not None:
        captured = tokens in graphs._captured_ragged_layouts
        if not captured or requests > graphs._ragged_capture_slots(tokens):
            return None
    return Replay(runner, graphs, requests, tokens)


def replay_of(runner: ModelRunner, requests: int, tokens: int | None = None) -> Replay | None:
    """How the graphs in use run so many requests; None where SGLang has to prepare each of their forwards.

    tokens: of a ragged verify, of all requests together."""
    return _replay(runner, runner.decode_cuda_graph_runner, requests, tokens)


def most_padded(runner: ModelRunner, requests: int, inputs: GraphInputs) -> tuple[int, int]:
    """(requests, those that only pad among them, of which the graphs in use may read rows of these inputs where
    they run so many; the length of the padding)"""
    graphs = runner.decode_cuda_graph_runner
    if isinstance(graphs, DecodeCudaGraphRunner) and graphs.ragged_verify_mode:
        shared = inputs.seq_lens.data_ptr() == graphs.buffers.seq_lens.data_ptr()
        return (min(graphs.max_bs, len(inputs.seq_lens)) if shared else requests), graphs.seq_len_fill_value
    replay = replay_of(runner, requests)
    if replay is None or not replay.reads(inputs):
        return requests, 1
    return replay.requests, replay.filler


def forget() -> None:
    """Graphs are dropped, whose memory a `Replay` keeps."""
    _replay.cache_clear()


def _takes_inputs(graphs: Any) -> bool:
    """Whether nothing but `INPUTS` differs between two replays of the same graph."""
    slots = graphs.buffer_registry._slots.values()
    return (
        prepares_in_graph(graphs.attn_backend)
        and {slot.name for slot in slots if slot.enabled and slot.buffer is not None} <= INPUTS | UNUSED
        and not graphs.model_runner.model_config.model_is_mrope
        and not (graphs.require_mlp_sync or graphs.is_dllm or graphs.disable_padding)
        and not (graphs.enable_two_batch_overlap or graphs.enable_pdmux)
        and graphs.deepep_adapter._captured_deepep_mode is None
        and not isinstance(graphs.backend, BreakableCudaGraphBackend)  # Python runs between its parts
    )


def _does_nothing_else(runner: Any) -> bool:
    """Whether SGLang does nothing around a forward of this runner that a step would miss."""
    execution = get_exec()
    return (
        runner.lora_manager is None
        and runner.hisparse_coordinator is None
        and runner.canary_manager is None
        and runner.msprobe_debugger is None
        and not runner.enable_elastic_ep
        and not hasattr(runner.model, "prepare_for_forward")
        and not execution.features.enable_return_routed_experts
        and execution.moe.expert_distribution_recorder_mode is None
    )
