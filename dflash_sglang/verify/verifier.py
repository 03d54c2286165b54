"""One target forward over the block, and what the target says after every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dflash_sglang.attention.verifying import verify_problems
from dflash_sglang.drafting.step_slots import Accepted
from dflash_sglang.patches.graph_inputs import load_inputs_once
from dflash_sglang.sglang_names.scheduler import (
    CaptureHiddenMode,
    DFlashVerifyInput,
    GrammarMask,
    GrammarTree,
    SamplingBatchInfo,
    SpecTpSync,
    SpecTpSyncSite,
    build_grammar_vocab_mask,
    compute_spec_logprobs,
    envs,
    get_dp_tp_group,
    get_exec,
    get_parallel,
    get_schedule,
    sanitize_nan_logits,
)
from dflash_sglang.startup.facts import StartupError
from dflash_sglang.startup.launch_checks import reported_rows_problems
from dflash_sglang.verify.graph_tail import VerifyTail
from dflash_sglang.verify.penalties import PenalisedRequests
from dflash_sglang.verify.recurrent import RecurrentStates
from dflash_sglang.verify.sampling import mask_and_bias, sampling_mask_output, seeded_tokens
from dflash_sglang.verify.tables import Tables
from dflash_sglang.verify.target_logits import TargetLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

    from dflash_sglang.drafting.block import Block
    from dflash_sglang.drafting.proposals import Proposals
    from dflash_sglang.verify.ragged import RaggedRows


class Unwritten(NamedTuple):
    """Verified rows whose context KV is still to be written, for `ContextWriter.write_planned`."""

    features: torch.Tensor  # [rows, n_layers * hidden]
    positions: torch.Tensor  # [rows]
    loc_plan: KVLocPlan


class Verified(NamedTuple):
    """The outcome of one verify forward."""

    accepted: Accepted
    unwritten: Unwritten | None  # None where the graph has written the context KV
    forward: Any  # the target's GenerationBatchResult


class Verifier:
    def __init__(
        self,
        target_worker: TpModelWorker,
        block_size: int,
        logits: TargetLogits,
        tables: Tables,
        tail: VerifyTail,
    ):
        """tail: of the target's graphs, which uses these `logits` and the acceptor of these `tables`."""
        self._worker = target_worker
        self._logits = logits
        self._acceptor, self._penalties, self._sampler, self._processors = tables
        self._tail = tail
        self._runner = target_worker.model_runner
        self._block_size = block_size
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        self._by_kernels = get_exec().kernel.sampling_backend == "flashinfer"
        self._recurrent: RecurrentStates | None = None
        self._sanitizes = envs.SGLANG_SANITIZE_NAN_LOGITS.get()

    def bind_attention_backends(self) -> None:
        """Once the target's exist, and its pools. Raises StartupError where they cannot verify this target
        exactly, or its recurrent states cannot be committed."""
        runner, chunk = self._runner, get_schedule().chunked_prefill_size
        problems = [
            *verify_problems(runner.attn_backend),
            *reported_rows_problems(runner.server_args, chunk, runner.max_running_requests, self._block_size),
        ]
        if problems:
            raise StartupError(problems)
        self._recurrent = RecurrentStates.from_target(self._worker, self._block_size)

    def after_capture(self, proposals: Sequence[Proposals]) -> None:
        """Once the target's graphs exist, if it has any; proposals: one request's, of each kind and width there
        will be."""
        load_inputs_once(self._runner.decode_cuda_graph_runner)
        for kind in proposals:
            for logits in self._logits.examples(kind.tokens.shape[1], kind.tokens.device):
                self._sampler.warm_up(kind, logits)

    def forget_steps(self) -> None:
        """Sampled steps draw random numbers from the first on, as if there had been none."""
        self._sampler.forget_steps()

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """The target's own sampler draws the first tokens: give it the penalties, and outputs to processors."""
        self._penalties.begin(batch)
        self._processors.before_prefill(batch)

    def after_prefill(self, batch: ScheduleBatch, next_token_ids: torch.Tensor) -> None:
        """All ranks of a tensor-parallel group go on from rank 0's first tokens, [bs]."""
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, next_token_ids)
        penalised = self._penalties.penalised(batch)
        self._note(batch, penalised, next_token_ids[:, None], torch.ones_like(next_token_ids))

    def verify(
        self,
        batch: ScheduleBatch,
        block: Block,
        proposals: Proposals,
        ragged: RaggedRows | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> Verified:
        """Run the target over the proposals, or over the ragged rows of them, and accept. Changes `batch`, which
        the scheduler restores."""
        if ragged is not None:
            return self._verify_ragged(batch, block, ragged)
        tokens = proposals.tokens
        sampling_info = batch.sampling_info
        # The host copy of the proposals starts before the target forward and is read after its launch.
        grammar_tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
        forward = self._forward(batch, block, tokens)
        logits_output = forward.logits_output
        penalised = self._penalties.penalised(batch)
        adjusted = penalised is not None or batch.has_grammar or self._changes_logits(sampling_info)
        greedy = sampling_info.is_all_greedy and not adjusted
        reported = batch.return_logprob or sampling_info.sampling_mask_batch_indices is not None
        if reported or not greedy:
            # The rejection sampler reads them in any dtype.
            as_given = not (adjusted or reported or _is_drawn_by_rows(sampling_info, block))
            logits_output.next_token_logits = self._logits.whole(logits_output.next_token_logits, as_given)
        logits = logits_output.next_token_logits
        if greedy:
            accepted = self._accept_greedy(batch, block, tokens, forward)
        else:
            grammar_mask = None
            if grammar_tree is not None:
                grammar_mask = build_grammar_vocab_mask(
                    reqs=batch.reqs,
                    tree=grammar_tree,
                    sampling_info=sampling_info,
                    device=logits.device,
                    barrier=grammar_barrier,
                )
            self._adjust(logits, batch, block, tokens, penalised, grammar_mask)
            accepted = self._accept_adjusted(batch, block, proposals, logits)
        if self._recurrent is not None:
            self._recurrent.commit(batch, accepted.commit_lens, block.size)
        self._note(batch, penalised, accepted.target_ids, accepted.commit_lens)
        logits_output.sampling_mask_output = sampling_mask_output(
            logits, sampling_info, accepted.target_ids, accepted.commit_lens, self._by_kernels
        )
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, accepted.target_ids.view(-1), chain_stride=block.size)
        return self._verified(accepted, forward, block)

    def needs_full_blocks(self, batch: ScheduleBatch) -> bool:
        """Whether requests of this decode batch have their logits adjusted, sampled from or reported, row by row
        of a block."""
        info = batch.sampling_info
        return bool(
            not info.is_all_greedy
            or info.acc_additive_penalties is not None
            or info.sampling_mask_batch_indices is not None
            or batch.has_grammar
            or batch.return_logprob
            or self._changes_logits(info)
        )

    def _verify_ragged(self, batch: ScheduleBatch, block: Block, ragged: RaggedRows) -> Verified:
        """Greedily, the rows of a batch that needs no whole blocks."""
        ids = ragged.rows.ids
        forward = self._forward(batch, block, ids, ragged)
        if not forward.can_run_cuda_graph:  # else the graph has accepted
            target_ids = self._logits.best(forward.logits_output.next_token_logits)
            self._acceptor.accept(ids, target_ids, block.prefix_lens, batch.req_pool_indices, ragged.requests)
        accepted = self._acceptor.slots.outcome(block.batch_size, self._block_size)
        return self._verified(accepted, forward, ragged)

    def _verified(self, accepted: Accepted, forward: Any, of: Block | RaggedRows) -> Verified:
        output = forward.logits_output
        # None, or overlap scheduling copies them to the host.
        features, output.hidden_states = output.hidden_states, None
        if forward.can_run_cuda_graph and self._tail.writes_context:
            return Verified(accepted, None, forward)
        positions = of.rows.positions
        return Verified(accepted, Unwritten(features[: len(positions)], positions, of.loc_plan), forward)

    def _changes_logits(self, info: SamplingBatchInfo) -> bool:
        return self._sanitizes or info.logit_bias is not None or info.has_custom_logit_processor

    def _accept_greedy(self, batch: ScheduleBatch, block: Block, tokens: torch.Tensor, forward: Any) -> Accepted:
        """The target's best tokens as they are; every rank finds them in what all have gathered."""
        if not forward.can_run_cuda_graph:  # else the graph has accepted
            target_ids = self._logits.best(forward.logits_output.next_token_logits)
            self._accept(batch, block, tokens, target_ids.view(-1, block.size))
        return self._acceptor.slots.outcome(block.batch_size, block.size)

    def _adjust(
        self,
        logits: torch.Tensor,  # [bs * block, vocab], changed in place if at all
        batch: ScheduleBatch,
        block: Block,
        tokens: torch.Tensor,  # [bs, block]
        penalised: PenalisedRequests | None,
        grammar_mask: GrammarMask | None,
    ) -> None:
        """What requests ask of their logits, in the order of plain decoding."""
        if self._sanitizes:
            sanitize_nan_logits(logits, "verify")
        if penalised is not None:
            self._penalties.apply(logits, penalised, tokens, block.prefix_lens)
        mask_and_bias(logits, batch.sampling_info, grammar_mask, block.size)
        if batch.sampling_info.has_custom_logit_processor:
            self._processors.apply(logits, batch, tokens, block.prefix_lens)

    def _accept_adjusted(
        self, batch: ScheduleBatch, block: Block, proposals: Proposals, logits: torch.Tensor
    ) -> Accepted:
        """What adjusted logits commit, the same on all ranks of a tensor-parallel group. Keeps the logits."""
        info = batch.sampling_info
        if info.is_all_greedy:
            target_ids = self._logits.best(logits).view(-1, block.size)
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_ids)
        elif _is_drawn_by_rows(info, block):
            positions = block.positions.view(-1)
            target_ids = seeded_tokens(logits.clone(), info, positions, self._runner.sampler, block.size)
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target_ids)
        else:
            target_ids = self._sampler.target_tokens(logits, info, proposals, self._by_kernels)
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target_ids)
        self._accept(batch, block, proposals.tokens, target_ids)
        return self._acceptor.slots.outcome(block.batch_size, block.size)

    def _accept(self, batch: ScheduleBatch, block: Block, tokens: torch.Tensor, target_ids: torch.Tensor) -> None:
        self._acceptor.accept(tokens, target_ids, block.prefix_lens, batch.req_pool_indices)

    def _note(
        self,
        batch: ScheduleBatch,
        penalised: PenalisedRequests | None,
        token_ids: torch.Tensor,  # [bs, at most block], committed up to
        commit_lens: torch.Tensor,  # [bs]
    ) -> None:
        """What a step commits, for what depends on a request's output so far."""
        if penalised is not None:
            self._penalties.count(penalised, token_ids, commit_lens)
        self._processors.note(batch, token_ids, commit_lens)

    def verify_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Take part in the collectives of a verify that other data-parallel ranks run, in blocks of `width`."""
        self._acceptor.slots.pass_over()
        nothing = torch.empty(0, dtype=torch.int64, device=self._runner.device)
        verify_input = self._verify_input(nothing, None, width)
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._worker, defer_metadata_init=True)
        self._worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)

    def _forward(
        self, batch: ScheduleBatch, block: Block, tokens: torch.Tensor, ragged: RaggedRows | None = None
    ) -> Any:
        attn_dp = get_parallel().attn_dp_enabled
        if ragged is None:
            rows, verify_input = block.rows, self._verify_input(tokens.view(-1), block, block.size)
        else:  # with attention backends of the widest blocks
            rows, verify_input = ragged.rows, self._verify_input(tokens, ragged, self._block_size)
            verify_input.ragged_verify_layout = ragged.layout
        batch.out_cache_loc = rows.slots
        batch.req_pool_indices = block.requests
        batch.seq_lens = block.prefix_lens
        batch.seq_lens_cpu = block.kv_len_bounds
        batch.seq_lens_sum = block.prefix_bounds_sum
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._worker, defer_metadata_init=attn_dp)
        return self._worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=None if attn_dp else True,
        )

    def _verify_input(self, ids: torch.Tensor, of: Block | RaggedRows | None, width: int) -> DFlashVerifyInput:
        return DFlashVerifyInput(
            draft_token=ids,
            positions=ids if of is None else of.rows.positions,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=None if of is None else of.loc_plan,
        )


def _is_drawn_by_rows(info: SamplingBatchInfo, block: Block) -> bool:
    """Whether rows are drawn from as in plain decoding: a token follows from its seed, or nothing was proposed."""
    return info.sampling_seed is not None or block.size == 1
