"""The DFLASH worker: what SGLang's scheduler calls, and the step, top to bottom."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from dflash_sglang import assembly
from dflash_sglang.drafting.block import Block, BlockBuilder
from dflash_sglang.drafting.draft_input import DFlashDraftInput
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.proposer import Proposer
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.drafting.window import is_imposed
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.observe.step_split import StepSplit
from dflash_sglang.patches.graph_captures import heap_left_alone
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.sglang_names.scheduler import (
    BaseSpecWorker,
    CaptureHiddenMode,
    GenerationBatchResult,
    SpecTpSync,
    SpecTpSyncSite,
    async_h2d,
    compute_position,
    draft_pp_context,
    draft_tp_context,
    get_dp_tp_group,
    get_parallel,
)
from dflash_sglang.verify.rows import Shape, VerifyRows
from dflash_sglang.verify.step_clock import StepClock
from dflash_sglang.verify.step_result import StepResult, idle_result
from dflash_sglang.verify.tables import Tables, most_rows
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.warmup import first_requests
from dflash_sglang.warmup.dummy_batches import Rehearsal
from dflash_sglang.width.controller import WidthController

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DFlashWorker(BaseSpecWorker):
    """Drafts a block in one forward, verifies it in one forward, commits what agrees.

    SGLang's scheduler constructs it, gives it memory, backends and graphs in that order, and then calls
    `forward_batch_generation` once per step, in both overlap and synchronous scheduling.
    """

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__()
        self._target_worker, self.device = target_worker, target_worker.device
        self._config = PluginConfig.from_env()
        self._draft = assembly.load_draft(server_args, gpu_id, nccl_port, target_worker, self._config)
        self._draft_worker, self.draft_parallel_layout = self._draft.worker, self._draft.parallel_layout
        self._context_kv: ContextKV = self._draft.context_kv
        self.block_size = self.width = self._draft.block_size  # width: of the latest decode step's blocks
        # Taken now: SGLang gives the KV pools what is free after this.
        self._slots = StepSlots(most_rows(), self.block_size, self.device)
        model_config = target_worker.model_runner.model_config
        self._tables = Tables.taken(self._slots, model_config.vocab_size, self._config.simulated_acceptance)
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        self._split = StepSplit(StepClock(self.device))
        self._captures = ExitStack()
        self._learns = False  # from the results of steps
        if get_parallel().tp_rank == 0:
            logger.info(assembly.startup_line(self._draft, model_config.context_len))

    # ---- Start-up, in the order of the scheduler's calls -------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """The draft shares the target's requests and slots; its keys and values live in a pool of its own.

        A windowed draft reads them through a slot table of its own.
        """
        with draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=None if is_imposed() else req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        page_size = token_to_kv_pool_allocator.page_size
        parts = assembly.build_step(self._draft, self.target_worker, self._tables, page_size, self._config)
        self._parts, self._reservation = parts, parts.reservation
        self._blocks: BlockBuilder = parts.blocks
        self._proposer: Proposer = parts.proposer
        self._verifier: Verifier = parts.verifier

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.init_attention_backends()
        assembly.check_attention(self._draft, self.target_worker.model_runner, self._verifier)
        self._captures.enter_context(heap_left_alone())  # the target's come next

    def init_cuda_graphs(self) -> None:
        """Of the draft, then of the other widths; and what is measured at each of them."""
        draft, target = self._draft, self.target_worker.model_runner
        with self._captures:
            with draft.scope():
                self._draft_worker.init_cuda_graphs()
            served = assembly.add_widths(draft, target, self._parts, self._tables, self._config)
            self._states, self._ragged, self._trees = served.states, served.ragged, served.trees
            self._rehearsal = Rehearsal(
                target, self._reservation, decode=self._rehearsed_step, prefill=self._rehearsed_prefill
            )
            self._widths: WidthController = assembly.build_controller(
                draft, target, served, self._rehearsal, self._tables.acceptor.set_max_commit, self._split
            )
        self.width, self._learns = self._widths.choices[-1], self._widths.learns
        logger.info(assembly.memory_line(draft, self._tables))

    def _rehearsed_step(self, batch: ScheduleBatch, shape: Shape) -> None:
        self._tables.acceptor.start(batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens)
        self._states.use(shape)
        self._step(batch, shape, None, None)

    def _rehearsed_prefill(self, batch: ScheduleBatch) -> None:
        self._states.use_widest()
        self._extend(batch, None)

    def prewarm_sampling(self) -> Any:
        """Last of start-up, on the stream that forwards run on."""
        result = super().prewarm_sampling()
        shapes = self._states.shapes(self._widths.choices)
        first_requests.rehearse(self.target_worker.model_runner, self._rehearsal, shapes)
        self._states.use_widest()
        self.width = self._widths.choices[-1]
        self._slots.forget_steps()
        self._tables.sampler.forget_steps()
        return result

    # ---- What SGLang asks of a worker --------------------------------------------------------------------

    @property
    def speculative_num_draft_tokens(self) -> int:
        """What SGLang's metrics call the width in use."""
        return self.width

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self._widths.verified(num_correct_drafts_per_req)

    def dflash_state(self) -> dict[str, Any]:
        """For /server_info, see `patches.results`."""
        return self._widths.snapshot()

    def report_decode(self, reporter: Any) -> None:
        """After SGLang's decode line, see `patches.results`."""
        self._widths.report(reporter)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.target_worker.model_runner.attn_backend, self._draft.runner.attn_backend)

    @property
    def model_runner(self) -> ModelRunner:
        """The draft's, which SGLang writes to `draft_url` of `save_remote_model`."""
        return self._draft.runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self._draft.runner)]

    # ---- The step ----------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One step of a batch; `on_publish` takes the new lengths as soon as they are known on the device."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish, grammar_barrier)
        if batch.forward_mode.is_idle():
            return self._idle(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _decode(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        chains = self._verifier.full_blocks(batch) or ("context_end" if self._reservation.cut(batch) else None)
        shape = self._widths.next(batch, chains).shape
        result = self._step(batch, shape, on_publish, grammar_barrier)
        self._widths.returned(result)
        return result

    def _step(self, batch: ScheduleBatch, shape: Shape, on_publish: Any, grammar_barrier: Any) -> StepResult:
        """A decode step that verifies this shape."""
        self.width = shape.width
        block = self._blocks.build(batch, shape.width)
        proposals = self._proposer.propose(batch, block)
        proposals = self._tables.acceptor.clip_to_limits(proposals, block.requests, block.prefix_lens)
        self._split.drafted()
        rows = self._rows(batch, block, proposals, shape)
        verified = self._verifier.verify(batch, block, proposals, rows, grammar_barrier)
        accepted = verified.accepted
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        if verified.unwritten is not None:
            self._context_kv.write_planned(*verified.unwritten)
        if rows.paths is not None:
            self._trees.move_paths(rows.paths)
        next_input = DFlashDraftInput.create(accepted.bonus_tokens, accepted.new_seq_lens, self._reservation)
        return StepResult.from_verified(verified, proposals, rows, next_input, self._learns)

    def _rows(self, batch: ScheduleBatch, block: Block, proposals: Proposals, shape: Shape) -> VerifyRows:
        if shape.budget is not None:
            return self._ragged.choose(batch, block, proposals, shape.budget)
        if shape.nodes is not None:
            return self._trees.choose(batch, block, proposals, shape.nodes)
        return VerifyRows.of_block(block, proposals)

    def _prefill(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self._wait_for_fused_hicache_load(batch)
        self._widths.prefill(batch)
        if grammar_barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # A mixed batch samples for decoding requests too: their grammars must know the last step's tokens.
            grammar_barrier()
        return self._extend(batch, on_publish)

    def _extend(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """The target's prefill and the context KV of its tokens."""
        self._tables.adjustments.before_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        features, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)  # rank 0's are everyone's
        self._tables.adjustments.after_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if batch.forward_mode.is_idle():
            # A data-parallel neighbour prefills: the empty target forward above kept its collectives company.
            result.next_draft_input = self._idle_draft_input()
            return result
        result.next_draft_input = DFlashDraftInput.create(result.next_token_ids, batch.seq_lens, self._reservation)
        last_tokens = result.next_draft_input.bonus_tokens
        self._tables.acceptor.start(batch.req_pool_indices, last_tokens, result.new_seq_lens)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        num_tokens = sum(batch.extend_lens)
        positions, _ = compute_position(
            self.target_worker.model_runner.prefill_attention_backend_str,
            async_h2d(batch.prefix_lens, dtype=torch.int32, device=self.device),
            async_h2d(batch.extend_lens, dtype=torch.int32, device=self.device),
            num_tokens,
        )
        # Before the result is processed: the radix cache may take these slots right after.
        self._context_kv.write_planned(features[:num_tokens], positions, loc_plan)
        return result

    def _idle(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """A data-parallel rank without requests: the collectives of `_decode` (`collectives`), nothing written."""
        if get_parallel().attn_dp_enabled:
            self.width = self._widths.next(batch).width
            self._proposer.propose_idle(batch, self.width)
            self._verifier.verify_idle(batch, self.width)
        draft_input = self._idle_draft_input()
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return idle_result(draft_input, self.block_size)

    def _idle_draft_input(self) -> DFlashDraftInput:
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return DFlashDraftInput.create(empty, empty, self._reservation)
