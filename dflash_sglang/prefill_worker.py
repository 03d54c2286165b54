"""The worker of a prefill server, and the part of every worker that prefills."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dflash_sglang.assembly import lines, loading
from dflash_sglang.drafting.draft_input import DFlashDraftInput
from dflash_sglang.drafting.window import is_imposed
from dflash_sglang.models.context_kv.base import ContextWriter
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.sglang_names.scheduler import (
    BaseSpecWorker,
    CaptureHiddenMode,
    GenerationBatchResult,
    SpecTpSync,
    SpecTpSyncSite,
    async_h2d,
    compute_position,
    draft_tp_context,
    get_disagg,
    get_dp_tp_group,
    get_parallel,
)
from dflash_sglang.verify.adjustments import Adjustments
from dflash_sglang.verify.step_result import idle_result
from dflash_sglang.verify.tables import most_rows
from dflash_sglang.warmup import first_requests
from dflash_sglang.warmup.dummy_batches import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from dflash_sglang.verify.rows import Shape

logger = logging.getLogger(__name__)


class PrefillWorker(BaseSpecWorker):
    """Prefills requests that another server decodes: the target's KV, the draft's context KV of the same tokens,
    and first tokens. The draft itself never runs.

    SGLang's scheduler constructs it, gives it memory, backends and graphs in that order, and then calls
    `forward_batch_generation` once per step, in both overlap and synchronous scheduling.
    """

    drafts: ClassVar[bool] = False

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__()
        self._target_worker, self.device = target_worker, target_worker.device
        self._config = PluginConfig.from_env()
        self._draft = loading.load_draft(server_args, gpu_id, nccl_port, target_worker, self._config, self.drafts)
        self._draft_worker, self.draft_parallel_layout = self._draft.worker, self._draft.parallel_layout
        self._context: ContextWriter = self._draft.context_kv
        self.block_size = self._draft.block_size
        model_config = target_worker.model_runner.model_config
        # Taken now: SGLang gives the KV pools what is free after this.
        self._adjustments = Adjustments(most_rows(), self.block_size, model_config.vocab_size, self.device)
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        if get_parallel().tp_rank == 0:
            logger.info(lines.worker_line(self._draft, model_config.context_len, self._config))

    # ---- Start-up, in the order of the scheduler's calls -------------------------------------------------

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """The draft shares the target's requests and slots; its keys and values live in a pool of its own.

        A windowed draft reads them through a slot table of its own; so does one whose rows are in rings.
        """
        draft = self._draft
        with draft_tp_context(self.draft_parallel_layout):
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=draft.pool_config(memory_pool_config),
                req_to_token_pool=None if is_imposed() or draft.has_rings else req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        page_size = token_to_kv_pool_allocator.page_size
        target = self.target_worker.model_runner
        self._reservation = loading.bind_pools(self._draft, target, page_size)
        loading.agree(self._draft, target, self._config)

    def init_attention_backends(self) -> None:
        """Of the draft: none, as it never runs."""

    def init_cuda_graphs(self) -> None:
        """Of the draft: none."""
        target = self.target_worker.model_runner
        self._rehearsal = Rehearsal(target, self._reservation, self._rehearsed_prefill)
        logger.info(lines.memory_line(self._draft))

    def _rehearsed_prefill(self, batch: ScheduleBatch) -> None:
        self._extend(batch, None)

    def prewarm_sampling(self) -> Any:
        """Last of start-up, on the stream that forwards run on."""
        result = super().prewarm_sampling()
        prefills = get_disagg().disaggregation_mode != "decode"
        first_requests.rehearse(self.target_worker.model_runner, self._rehearsal, prefills, self._shapes())
        return result

    def _shapes(self) -> Sequence[Shape]:
        """Of the decode steps that will be."""
        return ()

    # ---- What SGLang asks of a worker --------------------------------------------------------------------

    def dflash_state(self) -> dict[str, Any]:
        """For /server_info, see `patches.results`."""
        return {}

    @property
    def model_runner(self) -> ModelRunner:
        """The draft's, which SGLang writes to `draft_url` of `save_remote_model`."""
        return self._draft.runner

    @property
    def draft_swa_window(self) -> int:
        """Sliding slots behind the last committed token that the scheduler's prefix cache keeps."""
        return self._draft.swa_window

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
        raise RuntimeError(
            f"a batch of {len(batch.reqs)} requests that decode: expected none, since another server decodes."
        )

    def _prefill(self, batch: ScheduleBatch, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self._wait_for_fused_hicache_load(batch)
        if grammar_barrier is not None and batch.has_grammar and batch.forward_mode.is_mixed():
            # A mixed batch samples for decoding requests too: their grammars must know the last step's tokens.
            grammar_barrier()
        return self._extend(batch, on_publish)

    def _extend(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """The target's prefill and the context KV of its tokens."""
        self._adjustments.before_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        loc_plan, result.kv_loc_plan = result.kv_loc_plan, None
        features, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        if batch.return_logprob and all(req.sampling_params.max_new_tokens == 0 for req in batch.reqs):
            result.logits_output.next_token_logprobs = None  # as in plain decoding, which samples no token then
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)  # rank 0's are everyone's
        self._adjustments.after_prefill(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if batch.forward_mode.is_idle():
            # A data-parallel neighbour prefills: the empty target forward above kept its collectives company.
            result.next_draft_input = self._idle_draft_input()
            return result
        result.next_draft_input = DFlashDraftInput.create(result.next_token_ids, batch.seq_lens, self._reservation)
        last_tokens = result.next_draft_input.bonus_tokens
        self._start(batch.req_pool_indices, last_tokens, result.new_seq_lens)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        num_tokens = sum(batch.extend_lens)
        positions, _ = compute_position(
            self.target_worker.model_runner.prefill_attention_backend_str,
            async_h2d(batch.prefix_lens, dtype=torch.int32, device=self.device),
            async_h2d(batch.extend_lens, dtype=torch.int32, device=self.device),
            num_tokens,
        )
        # Before the result is processed: the radix cache may take these slots right after, or they are sent.
        self._context.write_prefill(features[:num_tokens], positions, loc_plan, batch, last_tokens)
        return result

    def _start(self, requests: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Requests [bs], rows of req_to_token, are prefilled. Their decode steps are another server's."""

    def _idle(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult:
        """A data-parallel rank without requests."""
        draft_input = self._idle_draft_input()
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return idle_result(draft_input, self.block_size)

    def _idle_draft_input(self) -> DFlashDraftInput:
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return DFlashDraftInput.create(empty, empty, self._reservation)
