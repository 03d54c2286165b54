"""The DFLASH worker: what SGLang's scheduler calls, and the step, top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from dflash_sglang.assembly import lines, steps
from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.draft_input import DFlashDraftInput
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.patches import arrivals
from dflash_sglang.prefill_worker import PrefillWorker
from dflash_sglang.sglang_names.scheduler import (
    GenerationBatchResult,
    ScheduleBatch,
    ServerArgs,
    TpModelWorker,
    draft_pp_context,
    draft_tp_context,
    get_disagg,
    get_parallel,
)
from dflash_sglang.startup.copying import chains_of
from dflash_sglang.verify.rows import Shape, VerifyRows
from dflash_sglang.verify.step_result import StepResult
from dflash_sglang.verify.tables import Tables
from dflash_sglang.warmup.dummy_batches import Rehearsal
from dflash_sglang.width.controller import WidthController

logger = logging.getLogger(__name__)


class DFlashWorker(PrefillWorker):
    """Drafts a block in one forward, verifies it in one forward, commits what agrees.

    It prefills as its base does, or takes over what a prefill server has prefilled.
    """

    drafts: ClassVar[bool] = True

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.width = self.block_size  # of the latest decode step's blocks
        chains = chains_of(self._config, self._draft.model.spec, self.block_size)
        self._slots = StepSlots(self._adjustments.max_requests, self.block_size, self.device, chains)
        self._tables = Tables.taken(self._slots, self._adjustments, steps.forced_answers(self._slots))
        self._learns = False  # from the results of steps

    # ---- Start-up, in the order of the scheduler's calls -------------------------------------------------

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        parts = steps.build_step(self._draft, self.target_worker, self._tables, self._reservation, self._config)
        self._blocks, self._proposer, self._verifier = parts.blocks, parts.proposer, parts.verifier
        self._parts, self._context, self._copies = parts, parts.context, parts.copies

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout), self._draft.rows():
            self._draft_worker.init_attention_backends()
        steps.check_attention(self._draft, self.target_worker.model_runner, self._verifier)

    def init_cuda_graphs(self) -> None:
        """Of the draft, then of the other widths; and what is measured at each of them."""
        draft, target = self._draft, self.target_worker.model_runner
        with draft.scope():
            self._draft_worker.init_cuda_graphs()
        served = steps.add_widths(draft, target, self._parts, self._tables, self._config)
        self._states, self._ragged, self._trees = served.states, served.ragged, served.trees
        self._rehearsal = Rehearsal(target, self._reservation, self._rehearsed_prefill, self._rehearsed_step)
        self._widths: WidthController = steps.build_controller(
            draft, target, served, self._rehearsal, self._tables.acceptor.set_max_commit, self._copies
        )
        self.width, self._learns = self._widths.choices[-1], self._widths.learns
        if get_disagg().disaggregation_mode == "decode":
            arrivals.hand_to(self._arrive)
        logger.info(lines.memory_line(draft, self._tables, self._copies))

    def _rehearsed_step(self, batch: ScheduleBatch, shape: Shape) -> None:
        self._start(batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens)
        self._states.use(shape)
        self._step(batch, shape, None, None)

    def _rehearsed_prefill(self, batch: ScheduleBatch) -> None:
        self._states.use_widest()
        super()._rehearsed_prefill(batch)

    def _shapes(self) -> Sequence[Shape]:
        return self._states.shapes(self._widths.choices)

    def prewarm_sampling(self) -> Any:
        result = super().prewarm_sampling()
        if self._parts.rings is not None:
            self._parts.rings.rehearse()
        self._states.use_widest()
        self.width = self._widths.choices[-1]
        self._slots.pass_over()
        self._tables.sampler.forget_steps()
        if self._copies is not None:
            self._copies.forget_steps()
        return result

    # ---- What SGLang asks of a worker --------------------------------------------------------------------

    @property
    def speculative_num_draft_tokens(self) -> int:
        """What SGLang's metrics call the width in use."""
        return self.width

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self._widths.verified(num_correct_drafts_per_req)

    def dflash_state(self) -> dict[str, Any]:
        copies = {} if self._copies is None else {"dflash_copy": self._copies.snapshot()}
        return {**self._widths.snapshot(), **copies}

    def report_decode(self, reporter: Any) -> None:
        """After SGLang's decode line, see `patches.results`."""
        self._widths.report(reporter)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.target_worker.model_runner.attn_backend, self._draft.runner.attn_backend)

    # ---- The step ----------------------------------------------------------------------------------------

    def _decode(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        shape = self._widths.next(batch, self._verifier.excluded(batch)).shape
        result = self._step(batch, shape, on_publish, grammar_barrier)
        self._widths.returned(result)
        return result

    def _step(self, batch: ScheduleBatch, shape: Shape, on_publish: Any, grammar_barrier: Any) -> StepResult:
        """A decode step that verifies this shape."""
        self.width = shape.width
        block = self._blocks.build(batch, shape.width)
        proposals = self._proposer.propose(batch, block)
        proposals = self._tables.acceptor.clip_to_limits(proposals, batch)
        rows = self._rows(block, proposals, shape)
        verified = self._verifier.verify(batch, block, proposals, rows, grammar_barrier)
        accepted = verified.accepted
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        if verified.unwritten is not None:
            self._context.write_planned(*verified.unwritten)
        if rows.paths is not None:
            self._trees.move_paths(rows.paths)
        next_input = DFlashDraftInput.create(accepted.bonus_tokens, accepted.new_seq_lens, self._reservation)
        return StepResult.from_verified(verified, proposals, rows, next_input, self._learns)

    def _rows(self, block: Block, proposals: Proposals, shape: Shape) -> VerifyRows:
        if shape.budget is not None:
            return self._ragged.choose(block, proposals, shape.budget)
        if shape.nodes is not None:
            return self._trees.choose(block, proposals, shape.nodes)
        if shape.chain is not None:
            assert self._copies is not None
            return VerifyRows.of_chains(block, self._copies.extend(block, proposals, shape.chain))
        return VerifyRows.of_block(block, proposals)

    def _prefill(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self._widths.prefill(batch)
        return super()._prefill(batch, on_publish, grammar_barrier)

    def _extend(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        if self._copies is not None:
            self._copies.prefill(batch)
        return super()._extend(batch, on_publish)

    def _start(self, requests: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._slots.start(requests, last_tokens, seq_lens)

    def _arrive(self, batch: ScheduleBatch, last_tokens: torch.Tensor) -> DFlashDraftInput:
        """Requests whose KV, context KV and first tokens [bs] come from a prefill server."""
        self._widths.admit(batch)
        self._adjustments.arrive(batch)
        if self._copies is not None:
            self._copies.arrive(batch)
        self._start(batch.req_pool_indices, last_tokens, batch.seq_lens)
        return DFlashDraftInput.create(last_tokens, batch.seq_lens, self._reservation)

    def _idle(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """A data-parallel rank without requests: the collectives of `_decode` (`collectives`), nothing written."""
        if get_parallel().attn_dp_enabled:
            self.width = self._widths.next(batch).width
            self._proposer.propose_idle(batch, self.width)
            self._verifier.verify_idle(batch, self.width)
        return super()._idle(batch, on_publish)
