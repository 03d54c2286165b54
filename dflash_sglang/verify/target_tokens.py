"""The target's token after every row of a block: its best one, a seeded one, or one by rejection sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.sglang_names.scheduler import (
    Sampler,
    SamplingBatchInfo,
    SpecTpSync,
    SpecTpSyncSite,
    get_dp_tp_group,
)
from dflash_sglang.verify.rejection import RejectionSampler
from dflash_sglang.verify.rows import VerifyRows
from dflash_sglang.verify.sampling import seeded_tokens
from dflash_sglang.verify.target_logits import TargetLogits


class TargetTokens:
    """Chooses the target's token after every row, the same on all ranks of a tensor-parallel group."""

    def __init__(self, logits: TargetLogits, rejection: RejectionSampler, sampler: Sampler, by_kernels: bool):
        """sampler: SGLang's; by_kernels: as `kernels` of `Filters.from_batch`."""
        self._logits, self._rejection, self._sampler = logits, rejection, sampler
        self._by_kernels = by_kernels
        self._tp_sync = SpecTpSync(get_dp_tp_group())

    def choose(
        self,
        logits: Tensor,
        info: SamplingBatchInfo,
        block: Block,
        proposals: Proposals,
        of: VerifyRows,
    ) -> Tensor:
        """logits [rows, vocab] of these rows, of any float dtype, adjusted, are kept -> [rows] int64."""
        if info.is_all_greedy:
            target_ids = self._logits.best(logits)
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, target_ids)
            return target_ids
        # A token follows from its seed, or there is no proposal, or several: one is drawn at every node.
        if info.sampling_seed is not None or block.size == 1 or of.paths is not None:
            own = logits.to(torch.float32, copy=True)
            lens = of.size if of.ragged is None else of.ragged.lens
            index = torch.arange(block.batch_size, device=logits.device)
            index = index.repeat_interleave(lens, output_size=len(logits))
            target_ids = seeded_tokens(own, info, of.rows.positions, self._sampler, index)
        else:
            target_ids = self._rejection.target_tokens(logits, info, proposals, self._by_kernels, of.ragged)
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, target_ids)
        return target_ids
