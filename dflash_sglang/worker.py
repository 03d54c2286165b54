"""The DFLASH worker: its life from construction to serving, and the step, top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dflash_sglang.attention.visibility import check_visibility
from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import draft_config
from dflash_sglang.checkpoint.token_map import read_token_map
from dflash_sglang.drafting.block import BlockBuilder
from dflash_sglang.drafting.draft_input import DFlashDraftInput, SlotReservation
from dflash_sglang.drafting.proposer import Proposer
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.drafting.window import DraftWindow, is_imposed
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.models.context_kv.target_features import ensure_capture
from dflash_sglang.models.loading import updates
from dflash_sglang.patches import stops
from dflash_sglang.patches.flash3 import spare_launches
from dflash_sglang.patches.flashinfer_windows import plan_windows
from dflash_sglang.patches.graph_captures import heap_left_alone, warm_up_less
from dflash_sglang.patches.half_precision_logits import TargetLogits
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.sglang_names.scheduler import (
    BaseSpecWorker,
    CaptureHiddenMode,
    GenerationBatchResult,
    async_h2d,
    build_draft_tp_worker,
    compute_position,
    draft_pp_context,
    draft_tp_context,
    envs,
    get_parallel,
    get_spec,
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from dflash_sglang.startup import TargetFacts
from dflash_sglang.startup.lines import memory_line, startup_line
from dflash_sglang.verify.graph_tail import VerifyTail, names_slots_alike
from dflash_sglang.verify.ragged import RaggedVerify
from dflash_sglang.verify.step_clock import StepClock
from dflash_sglang.verify.step_result import StepResult
from dflash_sglang.verify.tables import Tables, most_rows
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.warmup import first_requests
from dflash_sglang.warmup.dummy_batches import Rehearsal
from dflash_sglang.width import startup
from dflash_sglang.width.controller import WidthController
from dflash_sglang.width.ranks import width_group
from dflash_sglang.width.runtime_states import RuntimeStates

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
        self._target_worker = target_worker
        self.device = target_worker.device
        target_runner = target_worker.model_runner
        target_model = target_runner.model
        config, _ = draft_config(
            get_spec().speculative_draft_model_path, get_spec().speculative_draft_model_revision
        )
        self.draft_spec = DraftSpec.from_config(config)
        stops.install()
        target = TargetFacts.from_config(target_runner.model_config.hf_text_config)
        self.feature_layer_ids = self.draft_spec.feature_layer_ids(target.num_layers)
        ensure_capture(target_model, self.feature_layer_ids)
        self.draft_parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(
                target_runner.spec_aux_config.draft_model_config, spec_algorithm=target_runner.spec_algorithm
            ),
            collapse_cp=True,
        )
        # The draft's max_position_embeddings bounds nothing: SGLang makes its RoPE tables as long as this context.
        longer = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True)
        with longer, draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=target_runner.model_config,
                algo_label="DFLASH",
            )
        self._draft_worker = bundle.draft_worker
        self._draft_runner: ModelRunner = bundle.draft_model_runner
        self._draft_model = bundle.draft_model
        self._draft_backend = bundle.resolved_attention_backend
        self._captures = ExitStack()
        self.block_size = int(get_spec().speculative_num_draft_tokens)
        self.width = self.block_size  # of the latest decode step's blocks

        path = get_spec().speculative_token_map
        self._token_map = None if path is None else read_token_map(path)
        self._config = PluginConfig.from_env()
        borrowed = self._draft_model.bind_target(
            target_model, self.draft_parallel_layout.attn_tp_size, self._token_map, self._config.draft_head
        )
        self._head_copy, self.head_decision = borrowed.head_copy, borrowed.head_form
        scope = partial(draft_tp_context, self.draft_parallel_layout)
        self._context_kv = ContextKV(self._draft_model, self._config.context_kv, scope)
        refresh_head = None if self._head_copy is None else self._head_copy.refresh
        updates.install(target_runner, self._draft_runner, self._context_kv.refresh, refresh_head)
        # Taken now: SGLang gives the KV pools what is free after this.
        self._slots = StepSlots(most_rows(), self.block_size, self.device)
        self._tables = Tables.taken(
            self._slots, target_runner.model_config.vocab_size, self._config.simulated_acceptance
        )
        self._acceptor = self._tables.acceptor
        if get_parallel().tp_rank == 0:
            logger.info(startup_line(self, self._draft_backend))

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
        rows, row_width = req_to_token_pool.req_to_token.shape
        self._reservation = SlotReservation(
            rows, self.block_size, row_width, token_to_kv_pool_allocator.page_size, self.device
        )
        assert self.draft_spec.mask_token_id is not None  # start-up validation refuses a draft without
        target_runner = self.target_worker.model_runner
        self._slots.fit(rows)
        self._blocks = BlockBuilder(
            target_runner,
            self.block_size,
            self.draft_spec.mask_token_id,
            self._slots,
            in_place=names_slots_alike(target_runner, self._draft_runner) and not is_imposed(),
        )
        self._proposer = Proposer(
            self._draft_runner,
            self._draft_model,
            self.block_size,
            self.draft_parallel_layout,
            drawn=self.draws_proposals,
            confident=self._config.width.ragged,
            window=DraftWindow.imposed(
                token_to_kv_pool_allocator.page_size,
                req_to_token_pool.req_to_token,
                self._draft_runner.req_to_token_pool.req_to_token,
            ),
        )
        logits = TargetLogits(target_runner)
        tail = VerifyTail(target_runner, self._draft_runner, logits, self._acceptor, self._context_kv)
        self._verifier = Verifier(self.target_worker, self.block_size, logits, self._tables, tail)
        self._context_kv.bind(self._draft_runner.token_to_kv_pool, self._draft_runner.kv_index_translator)
        if get_parallel().tp_rank == 0:
            logger.info("dflash_sglang context KV: %s", self.context_kv_decision)

    def init_attention_backends(self) -> None:
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.init_attention_backends()
        for backend in self.spec_v2_attn_backends:
            spare_launches(backend)
            plan_windows(backend)
        with self._draft_scope():
            check_visibility(self._draft_runner, self._draft_model, self.block_size, self._draft_backend)
        self._verifier.bind_attention_backends()
        for runner in (self.target_worker.model_runner, self._draft_runner):
            warm_up_less(runner)
        self._captures.enter_context(heap_left_alone())  # the target's come next

    def init_cuda_graphs(self) -> None:
        with self._captures:
            with self._draft_scope():
                self._draft_worker.init_cuda_graphs()
            self._start_widths()
        logger.info(memory_line(self._draft_runner, self._draft_model, self._head_copy, self._tables))

    def _start_widths(self) -> None:
        """Graphs of the widths that steps are to choose from, and what compiles or is measured at each of them."""
        runner, block = self.target_worker.model_runner, self.block_size
        config = startup.servable(self._config.width, runner, block)
        lanes = RuntimeStates(runner, self._draft_runner, self._draft_model, block, self._draft_scope)
        group = width_group(runner.server_args.nnodes)
        ragged = startup.can_be_ragged(config, runner, group, self._proposer.confident)
        config = startup.add_widths(config, lanes, block, startup.free_memory(runner), ragged)
        self._ragged = RaggedVerify(runner, block, lanes.captured_requests)
        kinds = [kind for width in config.states(block) for kind in self._proposer.examples(width)]
        self._verifier.after_capture(kinds)
        policy = startup.policy_of(config, runner, block, group, lanes)
        self._lanes = lanes
        self._rehearsal = Rehearsal(
            runner, self._reservation, decode=self._rehearsed_step, prefill=self._rehearsed_prefill
        )
        if config.fixed is None:
            startup.measure(policy, runner, self._rehearsal, group)
        self._widths = WidthController(
            policy,
            lanes,
            self._acceptor.set_max_commit,
            StepClock(self.device),
            speaks=get_parallel().tp_rank == 0,
        )
        self.width = self._widths.choices[-1]

    def _rehearsed_step(self, batch: ScheduleBatch, width: int, tokens: int | None) -> None:
        self._slots.start(batch.req_pool_indices, batch.spec_info.bonus_tokens, batch.seq_lens)
        self.width = width
        self._lanes.use(width, ragged=tokens is not None)
        self._step(batch, None, None, tokens)

    def _rehearsed_prefill(self, batch: ScheduleBatch) -> None:
        self._lanes.use_widest()
        self._extend(batch, None)

    def prewarm_sampling(self) -> Any:
        """Last of start-up, on the stream that forwards run on."""
        result = super().prewarm_sampling()
        first_requests.rehearse(self.target_worker.model_runner, self._rehearsal, self._widths.choices)
        self._lanes.use_widest()
        self.width = self._widths.choices[-1]
        self._slots.forget_steps()
        self._verifier.forget_steps()
        return result

    @contextmanager
    def _draft_scope(self) -> Iterator[None]:
        # SGLang's draft scope keeps this flag of the target's, and graphs would wait for other ranks' batches.
        alone = get_parallel().override(attn_dp_enabled=False)
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout), alone:
            yield

    @property
    def draws_proposals(self) -> bool:
        """Whether sampled requests get drawn proposals."""
        return self._config.draws(joint=self._draft_model.candidate_selector is not None)

    @property
    def context_kv_decision(self) -> str:
        return self._context_kv.reason

    @property
    def proposed_tokens(self) -> int | None:
        """Tokens of --speculative-token-map, None without."""
        return None if self._token_map is None else len(self._token_map)

    @property
    def speculative_num_draft_tokens(self) -> int:
        """What SGLang's metrics call the width in use."""
        return self.width

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self._widths.verified(num_correct_drafts_per_req)

    def width_metrics(self) -> dict[str, Any]:
        """For /server_info, see `hooks.get_internal_state`."""
        return self._widths.snapshot()

    @property
    def own_modules(self) -> str:
        return self._draft_model.own_modules

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.target_worker.model_runner.attn_backend, self._draft_runner.attn_backend)

    @property
    def model_runner(self) -> ModelRunner:
        """The draft's, which SGLang writes to `draft_url` of `save_remote_model`."""
        return self._draft_runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self._draft_runner)]

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
        decision = self._widths.next(batch, needs_full_blocks=self._verifier.needs_whole_blocks(batch))
        self.width = decision.width
        result = self._step(batch, on_publish, grammar_barrier, decision.verify_budget)
        self._widths.returned(result)
        return result

    def _step(
        self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any, budget: int | None = None
    ) -> StepResult:
        """A decode step in blocks of `self.width`; budget: rows that a ragged step verifies of them."""
        block = self._blocks.build(batch, self.width)
        proposals = self._proposer.propose(batch, block)
        proposals = self._acceptor.clip_to_limits(proposals, block.requests)
        ragged = None if budget is None else self._ragged.choose(batch, block, proposals, budget)
        verified = self._verifier.verify(batch, block, proposals, ragged, grammar_barrier)
        accepted = verified.accepted
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        if verified.unwritten is not None:
            self._context_kv.write_planned(*verified.unwritten)
        return StepResult(
            logits_output=verified.forward.logits_output,
            next_token_ids=accepted.target_ids.view(-1),
            accept_lens=accepted.commit_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=self._draft_input(accepted.bonus_tokens, accepted.new_seq_lens),
            can_run_cuda_graph=verified.forward.can_run_cuda_graph,
            speculative_num_draft_tokens=accepted.target_ids.shape[1],
            routed_experts_output=verified.forward.routed_experts_output,
            indexer_topk_output=verified.forward.indexer_topk_output,
            packed=accepted.packed,
            # The next step writes to the same buffers while these are copied.
            logprobs=None if proposals.logprobs is None else proposals.logprobs.clone(),
            verified_lens=None if ragged is None else ragged.requests.lens.clone(),
        )

    def _prefill(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self._wait_for_fused_hicache_load(batch)
        self._widths.prefill(batch)
        if grammar_barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # A mixed batch samples for decoding requests too: their grammars must know the last step's tokens.
            grammar_barrier()
        return self._extend(batch, on_publish)

    def _extend(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """The target's prefill and the context KV of its tokens."""
        self._verifier.before_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        features, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        self._verifier.after_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if batch.forward_mode.is_idle():
            # A data-parallel neighbour prefills: the empty target forward above kept its collectives company.
            result.next_draft_input = self._idle_draft_input()
            return result
        result.next_draft_input = self._draft_input(result.next_token_ids, result.new_seq_lens)
        self._slots.start(batch.req_pool_indices, result.next_draft_input.bonus_tokens, result.new_seq_lens)
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
        return GenerationBatchResult(
            next_token_ids=draft_input.bonus_tokens,
            accept_lens=draft_input.new_seq_lens.int(),
            new_seq_lens=draft_input.new_seq_lens,
            next_draft_input=draft_input,
            can_run_cuda_graph=False,
            speculative_num_draft_tokens=self.block_size,
        )

    def _draft_input(self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> DFlashDraftInput:
        return DFlashDraftInput.create(bonus_tokens, new_seq_lens, self._reservation)

    def _idle_draft_input(self) -> DFlashDraftInput:
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return self._draft_input(empty, empty)
