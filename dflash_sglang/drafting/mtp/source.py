"""MtpSource: a block's proposals by one forward of all multi-token-prediction layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dflash_sglang.attention.verifying import draft_forward, draft_input, slot_plan
from dflash_sglang.checkpoint.family_specs import DRAWN_FROM
from dflash_sglang.drafting.proposals import Proposals, exponential_like
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.models.mtp.recent_rows import Prompt, RecentRows
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.sglang_names.scheduler import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    SpecTpSync,
    SpecTpSyncSite,
    SpeculativeAlgorithm,
    async_h2d,
    draft_tp_context,
    get_dp_tp_group,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.drafting.block import Block
    from dflash_sglang.models.mtp.step3p5 import Step3p5MTPDraftModel


class Draws(NamedTuple):
    """How the requests of a step draw their proposals. Ranks have the same candidates, so with the same noise they
    draw alike."""

    temperatures: torch.Tensor  # [requests] float32
    greedy: torch.Tensor  # [requests] bool: those that get the likeliest candidates
    noise: torch.Tensor  # [requests, layers, candidates], as of `exponential_like`

    def set(self, info: Any, bs: int, tp_sync: SpecTpSync) -> None:
        """info: SGLang's sampling of the step's bs requests; None: all get the likeliest candidates."""
        if info is None:
            self.greedy[:bs] = True
            return
        self.temperatures[:bs], self.greedy[:bs] = info.temperatures.view(-1), info.top_ks <= 1
        self.noise[:bs] = tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, exponential_like(self.noise[:bs]))


class MtpSource:
    """The `ProposalSource` of a chain of layers.

    Its forward runs over the last committed rows of each request, as many as `draft_rows`, and so renews the keys
    and values of every row that an earlier step had made with a proposal that was rejected.

    A step of width 1 proposes nothing and runs no forward. After `draft_rows` such steps, or before a step that
    proposes again, a forward whose proposals nobody keeps runs over the rows before the last `draft_rows`.

    The draft's graph holds the whole forward with its proposals. What a step decides is therefore in tensors that
    the graph reads: whether proposals are kept (`RecentRows.proposing`), and how they are drawn (`Draws`).
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Step3p5MTPDraftModel,
        recent: RecentRows,
        parallel_layout: Any,
        drawn: bool,
    ) -> None:
        """drawn: whether sampled requests get drawn proposals."""
        self._runner, self._model, self._recent, self._layout = runner, model, recent, parallel_layout
        self._table = runner.req_to_token_pool.req_to_token
        self._behind = 0  # steps of width 1 since a forward
        # Graphs are padded to parts of one size for the ranks that share a batch.
        most = runner.req_to_token_pool.req_to_token.shape[0] + parallel_layout.attn_tp_size
        shape, count = (most, recent.layers), DRAWN_FROM if drawn else 1
        ones = torch.ones((*shape, count), dtype=torch.float32, device=runner.device)
        of_greedy = Draws(ones[:, 0, 0].clone(), ones[:, 0, 0] > 0, ones)
        self._draws = of_greedy if drawn else None
        # Of the latest forward: candidates, their probabilities, the likeliest one's logprob, what is proposed.
        self._ids = torch.zeros((*shape, count), dtype=torch.int64, device=runner.device)
        self._probs = torch.zeros((*shape, count), dtype=torch.float32, device=runner.device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=runner.device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=runner.device)
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        model.chooses(count, self._choose)
        recent.bind(self._run_prompt)

    def draft_rows(self, width: int) -> int:
        return self._model.spec.draft_rows(width)

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        """Drawn proposals are for sampled requests without seeds: a seed's output must not depend on them."""
        info, width, rows = batch.sampling_info, block.size, self._recent.rows
        self._recent.set_tokens(block.requests.long(), block.prefix_lens, block.ids[:, 0])
        if self._behind == rows or (self._behind and width > PLAIN):
            self._recent.proposing.zero_()
            self._forward(batch, block, block.prefix_lens - rows)
            self._recent.proposing.fill_(1)
            self._behind = 0
        if width == PLAIN:
            self._behind += 1
            return Proposals.certain(block.ids)
        drawn = self._draws is not None and not info.is_all_greedy and info.sampling_seed is None
        if self._draws is not None:
            self._draws.set(info if drawn else None, block.batch_size, self._tp_sync)
        self._model.serve_blocks_of(width)
        self._forward(batch, block, block.prefix_lens)
        proposed = slice(block.batch_size), slice(width - 1)
        block.ids[:, 1:], logprobs = self._tokens[proposed], self._logprobs[proposed]
        if not drawn:
            return Proposals.certain(block.ids, logprobs=logprobs)
        return Proposals(block.ids, self._ids[proposed], self._probs[proposed], logprobs)

    def _forward(self, batch: ScheduleBatch, block: Block, ends: torch.Tensor) -> None:
        """Over each request's window before `ends` [bs]."""
        positions = self._recent.window(block.requests.long(), ends)
        with torch.inference_mode(), draft_tp_context(self._layout):
            self._runner.forward(self._window_batch(batch, block, positions))

    def _choose(self, i: int, candidates: Candidates) -> torch.Tensor:
        """Layer i's proposals [bs], drawn from the softmax of its candidates at the request's temperature, or
        the likeliest: layer i + 1 scores its own given these. Part of the draft's graph."""
        ids, logprobs = candidates
        bs, tokens = len(ids), ids[:, 0]
        if self._draws is not None:
            temperatures, greedy, noise = (of[:bs] for of in self._draws)
            scores = ids[:, None], logprobs[:, None], temperatures, greedy
            of_step = Proposals.drawn(ids.new_empty((bs, 2)), *scores, noise[:, i : i + 1])
            tokens, self._probs[:bs, i] = of_step.tokens[:, 1], of_step.probs[:, 0]
        self._ids[:bs, i], self._logprobs[:bs, i], self._tokens[:bs, i] = ids, logprobs[:, 0], tokens
        return tokens

    def propose_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Nothing: no collective of `propose` spans ranks with other batches. SGLang decides what crosses
        ranks when it builds a layer, and these are built in their rank's attention group."""

    def examples(self, width: int) -> list[Proposals]:
        tokens = torch.zeros((1, width), dtype=torch.int64, device=self._runner.device)
        kinds = [Proposals.certain(tokens)] if width > PLAIN else []
        if kinds and self._draws is not None:
            ids = tokens[:, 1:, None].repeat(1, 1, DRAWN_FROM)
            kinds.append(Proposals(tokens, ids, torch.full(ids.shape, 1 / DRAWN_FROM, device=ids.device)))
        return kinds

    def _window_batch(self, batch: ScheduleBatch, block: Block, positions: torch.Tensor) -> ForwardBatch:
        rows, start = positions.shape[1], positions[:, 0].contiguous()
        # Rows behind the last committed one are in the block's slots, which the row may end before.
        columns = positions.clamp(max=self._table.shape[1] - 1)
        slots = self._table[block.requests.long()[:, None], columns].long().flatten()
        bounds = block.kv_len_bounds - block.size + rows  # no window ends behind a block of as many rows
        plan = slot_plan(self._runner, block.requests, start, bounds - rows, slots, rows)
        # Nobody's ids: the layers find their tokens by position. But the target's graphs pad with what is left of
        # them in the buffers that both share.
        of_rows = Rows(torch.zeros_like(slots), positions.flatten(), slots)
        return draft_forward(
            self._runner, of_rows, block.requests, start, bounds, block.prefix_bounds_sum,
            draft_input(rows, slots.device), plan, can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )  # fmt: skip

    def _run_prompt(self, batch: ScheduleBatch, plan: KVLocPlan, positions: torch.Tensor, prompt: Prompt) -> None:
        """The layers over the new tokens of a prefill, for their keys and values."""
        lens, prefixes = batch.extend_lens, batch.prefix_lens
        extend = async_h2d(lens, dtype=torch.int32, device=positions.device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(lens),
            input_ids=prompt.tokens[0],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=positions,
            extend_num_tokens=sum(lens),
            extend_seq_lens=extend,
            extend_prefix_lens=async_h2d(prefixes, dtype=torch.int32, device=positions.device),
            extend_start_loc=(extend.cumsum(0) - extend).int(),
            extend_seq_lens_cpu=list(lens),
            extend_prefix_lens_cpu=list(prefixes),
            is_extend_in_batch=True,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=sum(lens),
        )
        plan.bind(forward_batch, self._runner.kv_index_translator)
        self._model.reads(prompt)
        try:
            with torch.inference_mode(), draft_tp_context(self._layout):
                self._runner.forward(forward_batch)
        finally:
            self._model.reads(None)
