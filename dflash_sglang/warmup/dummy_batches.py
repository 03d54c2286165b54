"""Prefills and decode steps of requests that nobody sent, before there are others: they compile and load kernels
and say how long a step takes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch

from dflash_sglang.drafting.block import longest_prefix
from dflash_sglang.drafting.draft_input import DFlashDraftInput, SlotReservation
from dflash_sglang.sglang_names.scheduler import (
    ForwardMode,
    ModelRunner,
    Req,
    SamplingBatchInfo,
    SamplingParams,
    ScheduleBatch,
    assign_req_to_token_pool_func,
    get_exec,
    get_parallel,
    mamba_checkpoint_grid,
    mambaish_config,
    require_mlp_sync,
    require_mlp_tp_gather,
    write_cache_indices,
)
from dflash_sglang.verify.rows import Shape
from dflash_sglang.verify.step_clock import StepClock

_SPREAD = 7919  # a prime: tokens that differ from request to request, so that experts share the work
GREEDY: Mapping[str, Any] = {"temperature": 0}  # as SamplingParams


class Rehearsal:
    """Requests in rows 1, 2, ... of `req_to_token`, while none of the rows is taken.

    Decode steps read slots all over the pool, as real ones would. Keys and values are written to slot 0, and
    outcomes to rows of requests that are still to come: whatever reads one of either was written before by its own
    request. All rehearsed requests have the recurrent states of slot 0, which no other request gets. Ranks that
    share forwards rehearse alike, at the same time.
    """

    def __init__(
        self,
        runner: ModelRunner,
        reservation: SlotReservation,
        prefill: Callable[[ScheduleBatch], object],
        decode: Callable[[ScheduleBatch, Shape], object] | None = None,
    ) -> None:
        """prefill, decode: one step of a batch. The latter verifies a shape; it is None on a server that only
        prefills."""
        self._runner, self._reservation = runner, reservation
        self._decode, self._prefill = decode, prefill
        self._table = runner.req_to_token_pool.req_to_token
        self._device = runner.device
        self._clock = StepClock(runner.device)
        self.recurrent = mambaish_config(runner.model_config) is not None  # whether requests have states

    @property
    def longest(self) -> int:
        """Tokens of context that a request's step may have."""
        return longest_prefix(self._runner)

    @property
    def most_requests(self) -> int:
        return self._table.shape[0] - 1

    @property
    def kept(self) -> int | None:
        """SGLang's prefix cache keeps states at multiples of so many tokens of a prompt. None: of no prompt."""
        keeps = self.recurrent and get_exec().mamba.enable_mamba_extra_buffer
        return mamba_checkpoint_grid(self._reservation.page_size) if keeps else None

    @property
    def seeded(self) -> bool:
        """Whether every request is sampled by a seed, as under --enable-deterministic-inference."""
        return self._batch(1, 1, GREEDY).sampling_info.sampling_seed is not None

    def reserve(self) -> None:
        """What writes the slots of a prompt, and of blocks in batches of every size, to rows; it writes none."""
        most = self._table.shape[0]
        rows = torch.zeros(most, dtype=torch.int64, device=self._device)
        prompt = [rows[:1], rows[:1].cpu()]  # a row or a length, as SGLang has each on the device and the host
        allocated = torch.zeros(most, dtype=torch.int32, device=self._device)
        for offset in (0, 1):
            slots = self._slots(1, offset)
            write_cache_indices(slots, *prompt, *prompt, *prompt, *prompt, [slots], self._runner.req_to_token_pool)
            for power in range((most - 1).bit_length() + 1):
                bs = min(1 << power, most)
                assign_req_to_token_pool_func(rows[:bs], self._table, allocated[:bs], allocated[:bs], slots, bs)

    def prefill(self, tokens: int, sampling: Mapping[str, Any], offset: int = 0, requests: int = 1) -> None:
        """Whole prompts of `tokens` each, written to slot 0 and read from there; offset: see `_slots`."""
        with torch.no_grad():
            self._prefill(self._prompts(requests, tokens, sampling, offset))

    def step(self, context: int, sampling: Mapping[str, Any], shape: Shape) -> None:
        """A decode step of one request with `context` tokens, of two for ragged chains."""
        assert self._decode is not None
        requests = 1 if shape.budget is None else 2
        with torch.no_grad(), self._contexts(requests, context):
            self._decode(self._decoding(requests, context, sampling), shape)

    def seconds(self, requests: int, context: int, shape: Shape) -> tuple[float, float]:
        """Of a greedy step of so many requests with `context` tokens each, which verifies this shape: of the
        device, and of the host that launches it where that is a GPU. One before it is not timed."""
        assert self._decode is not None
        with torch.no_grad(), self._contexts(requests, context):
            batch = self._decoding(requests, context, GREEDY)
            begin = time.perf_counter()
            self._decode(copy(batch), shape)
            self._clock.delay(2 * (time.perf_counter() - begin))
            start, begin = self._clock.mark(), time.perf_counter()
            self._decode(copy(batch), shape)
            host = time.perf_counter() - begin
            return self._clock.seconds(start, self._clock.mark()), host if self._clock.on_gpu else 0.0

    @contextmanager
    def _contexts(self, requests: int, context: int) -> Iterator[None]:
        """Rows name a slot for each token of their context, another one each as far as there are; columns after
        it, where blocks are written, name slot 0; and so does everything while no other slot has memory
        (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING): contexts then seem to be read sooner than they are."""
        page = self._reservation.page_size
        slots = torch.arange(requests * context, device=self._device)
        slots = page + slots % (self._runner.max_total_num_tokens // page * page)
        if self._runner.token_to_kv_pool.post_capture_active:
            slots.zero_()
        rows = self._table[1 : requests + 1, :context]
        rows.copy_(slots.view(requests, context))
        self._clear_states()
        try:
            yield
        finally:
            rows.zero_()
            self._clear_states()

    def _clear_states(self) -> None:
        """A recurrent state that many steps have moved on may no longer be finite."""
        if self.recurrent:
            first = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._runner.req_to_token_pool.mamba_pool.clear_slots(first)

    def _slots(self, tokens: int, offset: int) -> torch.Tensor:
        """[tokens] int64: slot 0. A pool without pages gives slots as a view from anywhere in the free ones, and
        Triton compiles a kernel anew for odd offsets."""
        return torch.zeros(offset + tokens, dtype=torch.int64, device=self._device)[offset:]

    def _prompts(self, requests: int, tokens: int, sampling: Mapping[str, Any], offset: int) -> ScheduleBatch:
        batch, total = self._batch(requests, tokens, sampling), requests * tokens
        for request in batch.reqs:
            request.full_untruncated_fill_ids, request.extend_end = request.origin_input_ids, tokens
        batch.forward_mode, batch.is_extend_in_batch = ForwardMode.EXTEND, True
        batch.prefix_lens, batch.extend_lens, batch.extend_num_tokens = [0] * requests, [tokens] * requests, total
        batch.extend_logprob_start_lens = [tokens] * requests
        batch.input_ids = self._ids(total)
        batch.out_cache_loc = self._slots(total, offset)
        if (grid := self.kept) is not None:
            self._keep_states(batch, tokens, grid)
        self._tell_ranks(batch, total)
        return batch

    def _keep_states(self, batch: ScheduleBatch, tokens: int, grid: int) -> None:
        """As the prefix cache asks for, of prompts that are long enough; in slot 0."""
        requests, kept = len(batch.reqs), tokens >= grid
        batch.mamba_prefill_track_mask_cpu = [kept] * requests
        batch.mamba_track_seqlens_cpu = [tokens if kept else -1] * requests
        batch.mamba_track_mask = torch.full((requests,), kept, device=self._device)
        batch.mamba_track_seqlens = torch.full((requests,), tokens if kept else -1, device=self._device)
        batch.mamba_track_indices = torch.zeros(requests, dtype=torch.int64, device=self._device)

    def _decoding(self, requests: int, context: int, sampling: Mapping[str, Any]) -> ScheduleBatch:
        batch = self._batch(requests, context, sampling)
        batch.forward_mode, batch.can_run_decode_cuda_graph = ForwardMode.DECODE, True
        self._tell_ranks(batch, requests)
        batch.spec_info = DFlashDraftInput.create(self._ids(requests), batch.seq_lens, self._reservation)
        return batch

    def _batch(self, requests: int, length: int, sampling: Mapping[str, Any]) -> ScheduleBatch:
        """Requests of `length` tokens each, for either."""
        runner = self._runner
        params = SamplingParams(**sampling)
        params.normalize(None)
        batch = ScheduleBatch.init_new(
            [Req("", "", array("q", [0]) * length, params) for _ in range(requests)],
            runner.req_to_token_pool,
            None,
            SimpleNamespace(page_size=self._reservation.page_size),  # all that a commit asks of the prefix cache
            runner.model_config,
            False,
            runner.spec_algorithm,
        )
        batch.req_pool_indices_cpu = torch.arange(1, requests + 1)
        batch.req_pool_indices = batch.req_pool_indices_cpu.to(self._device)
        batch.seq_lens_cpu = torch.full((requests,), length)
        batch.seq_lens, batch.seq_lens_sum = batch.seq_lens_cpu.to(self._device), requests * length
        batch.orig_seq_lens = batch.seq_lens.int()
        batch.multimodal_inputs = [None] * requests
        batch.mamba_lazy_spec_track_positions_cpu = [0] * requests
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, runner.model_config.vocab_size)
        return batch

    def _ids(self, count: int) -> torch.Tensor:
        """[count] int64"""
        return torch.arange(count, device=self._device) * _SPREAD % self._runner.model_config.vocab_size

    def _tell_ranks(self, batch: ScheduleBatch, tokens: int) -> None:
        """What data-parallel ranks tell each other of their batches; all have `tokens`."""
        if require_mlp_sync():
            ranks = get_parallel().num_dp_ranks if require_mlp_tp_gather() else 1
            batch.global_num_tokens = [tokens] * ranks
            batch.global_num_tokens_for_logprob = [len(batch.reqs)] * ranks
