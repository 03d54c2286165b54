"""The target's token after every verified row, chosen as plain decoding chooses it.

Each row of a block is a decode step of its request: for greedy and seeded requests the argmax or SGLang's own
sampler runs over `[bs * block, vocab]` logits, every per-request parameter repeated for the rows of its block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dflash_sglang.sglang_names.scheduler import GrammarMask, LogitsProcessorOutput, SamplingBatchInfo

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler


def mask_and_bias(
    logits: torch.Tensor,  # [bs * block, vocab], changed in place
    info: SamplingBatchInfo,
    grammar_mask: GrammarMask | None,
    block_size: int,
) -> None:
    """Grammar, then logit bias, as SGLang's decode step applies them after the penalties."""
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.view(-1, block_size, logits.shape[-1]).add_(info.logit_bias[:, None])


def seeded_tokens(
    logits: torch.Tensor,  # [bs * block, vocab] adjusted; consumed
    info: SamplingBatchInfo,
    positions: torch.Tensor,  # [bs * block] position of the row's input token, as seeds count them
    sampler: Sampler,
    block_size: int,
) -> torch.Tensor:
    """[bs, block] int64: SGLang's sampler over all rows. A row's token follows from its seed, its position and
    its logits alone, so that it is the token of plain decoding whatever was proposed."""
    chosen = sampler(
        LogitsProcessorOutput(next_token_logits=logits),
        rows_of(info, block_size),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return chosen.long().view(-1, block_size)


def rows_of(info: SamplingBatchInfo, block_size: int) -> SamplingBatchInfo:
    """The parameters of a batch, one entry per verified row; what is in the logits already is left out."""
    return dataclasses.replace(
        info,
        temperatures=_repeat(info.temperatures, block_size),
        top_ps=_repeat(info.top_ps, block_size),
        top_ks=_repeat(info.top_ks, block_size),
        min_ps=_repeat(info.min_ps, block_size),
        sampling_seed=None if info.sampling_seed is None else _repeat(info.sampling_seed, block_size),
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_params=None,
        custom_logit_processor=None,
        sampling_mask_batch_indices=None,
    )


def _repeat(per_request: torch.Tensor, block_size: int) -> torch.Tensor:
    return per_request.repeat_interleave(block_size, dim=0)
