"""One target forward over the block, and what the target says after every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dflash_sglang.attention.verifying import verify_problems
from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.replays import replay_of
from dflash_sglang.drafting.step_slots import Accepted
from dflash_sglang.sglang_names.scheduler import (
    CaptureHiddenMode,
    DFlashVerifyInput,
    GenerationBatchResult,
    GrammarTree,
    KVLocPlan,
    ScheduleBatch,
    TpModelWorker,
    compute_spec_logprobs,
    envs,
    get_exec,
    get_parallel,
    get_schedule,
    sanitize_nan_logits,
)
from dflash_sglang.startup.facts import StartupError
from dflash_sglang.startup.launch_checks import reported_rows_problems
from dflash_sglang.verify.graph_tail import VerifyTail
from dflash_sglang.verify.recurrent import RecurrentStates
from dflash_sglang.verify.rows import Excluded, VerifyRows
from dflash_sglang.verify.sampling import sampling_mask_output
from dflash_sglang.verify.tables import Tables
from dflash_sglang.verify.target_logits import TargetLogits
from dflash_sglang.verify.target_tokens import TargetTokens


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
        self._acceptor, self._adjustments, self._sampler = tables
        self._tail = tail
        self._runner = target_worker.model_runner
        self._block_size = block_size
        self._by_kernels = get_exec().kernel.sampling_backend == "flashinfer"
        self._target_tokens = TargetTokens(logits, self._sampler, self._runner.sampler, self._by_kernels)
        self._recurrent: RecurrentStates | None = None
        self._sanitizes = envs.SGLANG_SANITIZE_NAN_LOGITS.get()

    def bind_attention_backends(self) -> None:
        """Once the target's exist, and its pools. Raises StartupError where they cannot verify this target
        exactly, or its recurrent states cannot be committed."""
        runner, chunk, ranks = self._runner, get_schedule().chunked_prefill_size, get_parallel().attn_dp_size
        problems = [
            *verify_problems(runner.attn_backend),
            *reported_rows_problems(
                runner.server_args, ranks, chunk, runner.max_running_requests, self._block_size
            ),
        ]
        if problems:
            raise StartupError(problems)
        self._recurrent = RecurrentStates.from_target(self._worker, self._block_size)

    def after_capture(self, proposals: Sequence[Proposals]) -> None:
        """Once the target's graphs exist, if it has any; proposals: one request's, of each kind and width there
        will be."""
        for kind in proposals:
            logits = torch.zeros(
                (kind.tokens.shape[1], self._runner.model_config.vocab_size), device=kind.tokens.device
            )
            self._sampler.warm_up(kind, logits)

    def excluded(self, batch: ScheduleBatch) -> Excluded:
        """Forms that a step of this decode batch may not have: logits are adjusted along a chain, custom
        processors and reports take whole blocks, and copies beyond blocks are for greedy requests."""
        info = batch.sampling_info
        whole = "adjusted" if info.has_custom_logit_processor else None
        whole = whole or ("reported" if _is_reported(batch) else None)
        chain = whole or ("adjusted" if self._adjusts(batch) else None)
        copies = chain or (None if info.is_all_greedy else "sampled")
        return Excluded(whole, chain or batch.spec_info.no_trees, copies)

    def verify(
        self,
        batch: ScheduleBatch,
        block: Block,
        proposals: Proposals,
        of: VerifyRows,
        grammar_barrier: Callable[[], None] | None,
    ) -> Verified:
        """Run the target over these rows of the block's proposals, and accept. Changes `batch`, which the
        scheduler restores.

        of: of a form that `excluded` allows.
        """
        as_asked = self._adjusts(batch) or _is_reported(batch) or not batch.sampling_info.is_all_greedy
        if of.ragged is not None and as_asked:
            proposals = proposals.copied()  # the forward takes the rows' ids in the place of the block's
        # The host copy of the proposals starts before the target forward and is read after its launch.
        grammar_tree = GrammarTree.from_linear_chain(proposals.tokens) if batch.has_grammar else None
        forward = self._forward(batch, block, of)
        unwritten = self._unwritten(forward, block, of)
        if as_asked:
            accepted = self._accept_as_asked(batch, block, proposals, of, forward, grammar_tree, grammar_barrier)
        else:
            accepted = self._accept_greedy(block, of, forward)
        if self._recurrent is not None:
            self._recurrent.commit(batch, accepted.commit_lens, block.size)
        return Verified(accepted, unwritten, forward)

    def _adjusts(self, batch: ScheduleBatch) -> bool:
        info = batch.sampling_info
        return bool(
            self._sanitizes
            or info.acc_additive_penalties is not None
            or batch.has_grammar
            or info.logit_bias is not None
            or info.has_custom_logit_processor
        )

    def _unwritten(self, forward: Any, block: Block, of: VerifyRows) -> Unwritten | None:
        output = forward.logits_output
        # None, or overlap scheduling copies them to the host.
        features, output.hidden_states = output.hidden_states, None
        if forward.can_run_cuda_graph and self._tail.writes_context:
            return None
        positions = of.rows.positions
        return Unwritten(features[: len(positions)], positions, of.plan(block))

    def _accept_greedy(self, block: Block, of: VerifyRows, forward: Any) -> Accepted:
        """The target's best tokens as they are; every rank finds them in what all have gathered."""
        target_ids = None
        if not forward.can_run_cuda_graph:  # else the graph has accepted
            target_ids = self._logits.best(forward.logits_output.next_token_logits)
        return self._accepted(block, of, target_ids)

    def _accepted(self, block: Block, of: VerifyRows, target_ids: torch.Tensor | None) -> Accepted:
        """What the step commits by the target's tokens [rows]; None: what the graph has accepted."""
        if target_ids is not None:
            ids, target_ids = of.by_request(of.rows.ids), of.by_request(target_ids)
            self._acceptor.accept(ids, target_ids, block.prefix_lens, block.requests, of.ragged, of.paths)
        return self._acceptor.slots.outcome(block.batch_size, of.committed)

    def _accept_as_asked(
        self,
        batch: ScheduleBatch,
        block: Block,
        proposals: Proposals,
        of: VerifyRows,
        forward: Any,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> Accepted:
        """Adjust the logits, choose the target's tokens, accept, and report, as the requests of the batch ask."""
        info, output, tokens = batch.sampling_info, forward.logits_output, proposals.tokens
        adjusts, penalised, target_ids = self._adjusts(batch), None, None
        logits = output.next_token_logits = self._logits.whole(output.next_token_logits)
        if self._sanitizes:
            sanitize_nan_logits(logits, "verify")
        if adjusts:
            places = of.places(*tokens.shape)
            penalised = self._adjustments.apply(
                logits, batch, tokens, block.prefix_lens, places, grammar_tree, grammar_barrier
            )
        if adjusts or not info.is_all_greedy or not forward.can_run_cuda_graph:  # else the graph has accepted
            target_ids = self._target_tokens.choose(logits, info, block, proposals, of)
        accepted = self._accepted(block, of, target_ids)
        output.sampling_mask_output = sampling_mask_output(
            logits, info, accepted.target_ids, accepted.commit_lens, self._by_kernels
        )
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, accepted.target_ids.view(-1), chain_stride=block.size)
        self._adjustments.note(batch, penalised, accepted.target_ids, accepted.commit_lens)
        return accepted

    def verify_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Take part in the collectives of a verify that other data-parallel ranks run, in blocks of `width`."""
        self._acceptor.slots.pass_over()
        nothing = torch.empty(0, dtype=torch.int64, device=self._runner.device)
        verify_input = _verify_input(nothing, nothing, width)
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._worker, defer_metadata_init=True)
        self._worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)

    def _forward(self, batch: ScheduleBatch, block: Block, of: VerifyRows) -> Any:
        batch.seq_lens = block.prefix_lens
        tokens = None if of.ragged is None else len(of.rows.ids)
        replay = replay_of(self._runner, block.batch_size, tokens) if self._tail.writes_context else None
        if replay is not None and replay.takes(block.padded, *of.rows, block.prefix_lens, block.requests):
            return GenerationBatchResult(logits_output=replay.run(), can_run_cuda_graph=True)
        attn_dp = get_parallel().attn_dp_enabled
        verify_input = _verify_input(of.rows.ids, of.rows.positions, of.size, of.plan(block))
        verify_input.ragged_verify_layout = of.layout
        batch.out_cache_loc = of.rows.slots
        batch.req_pool_indices = block.requests
        batch.seq_lens_cpu = block.kv_len_bounds
        batch.seq_lens_sum = block.prefix_bounds_sum
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._worker, defer_metadata_init=attn_dp)
        return self._worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=None if attn_dp else True,
        )


def _verify_input(
    ids: torch.Tensor, positions: torch.Tensor, size: int, loc_plan: KVLocPlan | None = None
) -> DFlashVerifyInput:
    return DFlashVerifyInput(
        draft_token=ids,
        positions=positions,
        draft_token_num=size,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=loc_plan,
    )


def _is_reported(batch: ScheduleBatch) -> bool:
    return batch.return_logprob or batch.sampling_info.sampling_mask_batch_indices is not None
