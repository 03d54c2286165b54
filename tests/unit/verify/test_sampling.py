"""Sampled verification: C16 (output follows the target's filtered distribution, whatever is proposed), seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Ragged

VOCAB, BLOCK, REQUESTS = 7, 3, 20_000
OFF = dict(top_k=1 << 30, top_p=1.0, min_p=0.0)

FILTERS: dict[str, dict[str, Any]] = {
    "temperature 0.7": dict(temperature=0.7),
    "temperature 1": dict(),
    "top-k": dict(top_k=3),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.2),
    "top-k and top-p": dict(top_k=4, top_p=0.75),
    "all": dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    "top-k of one": dict(top_k=1),
}


def sampling_info(requests: int, temperature=1.0, top_k=OFF["top_k"], top_p=1.0, min_p=0.0, **fields: Any) -> Any:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo

    defaults = dict(
        temperatures=torch.full((requests, 1), temperature),
        top_ps=torch.full((requests,), top_p),
        top_ks=torch.full((requests,), top_k, dtype=torch.int32),
        min_ps=torch.full((requests,), min_p),
        is_all_greedy=top_k == 1,
        is_any_greedy=top_k == 1,
        need_top_p_sampling=top_p != 1.0,
        need_top_k_sampling=top_k != OFF["top_k"],
        need_min_p_sampling=min_p > 0,
        vocab_size=VOCAB,
        device="cpu",
    )
    return SamplingBatchInfo(**{**defaults, **fields})


def target_probs(logits: Tensor, temperature=1.0, top_k=OFF["top_k"], top_p=1.0, min_p=0.0) -> Tensor:
    """[R, vocab] of SGLang's own torch sampler."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    rows = len(logits)
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        (logits / temperature).softmax(-1),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        min_p > 0,
        None,
        torch.zeros(rows),
        return_filtered_probs=True,
    )
    probs = torch.zeros(logits.shape).scatter_(1, ids.long(), weights)
    return probs / probs.sum(-1, keepdim=True)


def some_rows(logprobs: Tensor, rows: int) -> Ragged:
    """So many rows of requests' blocks in all, as a ragged step has them for proposals with these logprobs."""
    from dflash_sglang.kernels.block.share_rows import share_rows

    lens = torch.zeros(len(logprobs), dtype=torch.int32)
    starts = torch.zeros(len(logprobs) + 1, dtype=torch.int32)
    share_rows(logprobs, rows, lens, starts)
    return Ragged(starts, lens, logprobs.shape[1] + 1)


def packed(blocks: Tensor, ragged: Ragged | None) -> Tensor:
    """blocks [bs, block, ...] -> [rows, ...]"""
    if ragged is None:
        return blocks.flatten(0, 1)
    return blocks[torch.arange(blocks.shape[1]) < ragged.lens[:, None]]


class Draft:
    """Proposes two tokens after a last one: its likeliest, its unlikeliest, or drawn from its distribution."""

    def __init__(self, kind: str, target: Tensor):
        noise = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
        self.kind, self.logits = kind, target + noise
        self.certain = self.logits.argmin(-1) if kind == "unlikeliest" else self.logits.argmax(-1)

    def propose(self, last: Tensor, temperature: float, greedy: bool) -> Proposals:
        first = self.certain[last]
        tokens = torch.stack([last, first, self.certain[first]], dim=1)
        if self.kind != "drawn":
            return Proposals.certain(tokens)
        # As in a block, the second proposal's distribution does not know what is drawn for the first.
        rows = torch.stack([self.logits[last], self.logits[first]], dim=1)
        logits, candidates = rows.topk(4, dim=-1)
        temperatures = torch.full((len(last),), temperature)
        return Proposals.drawn(tokens, candidates, logits, temperatures, torch.full((len(last),), greedy))


@pytest.mark.parametrize("kind", ["likeliest", "unlikeliest", "drawn"])
@pytest.mark.parametrize("name", FILTERS)
def test_output_follows_the_targets_filtered_distribution_whatever_is_proposed(name, kind):
    """A Markov target: the joint distribution of two output tokens, by chi-square at 0.001."""
    from dflash_sglang.verify.rejection import NOT_COMMITTED

    torch.manual_seed(11)
    table = markov_target()
    committed = first_step_of_two_tokens(table, FILTERS[name], Draft(kind, table).propose)
    if name != "top-k of one" and kind != "unlikeliest":
        assert 0 < int((committed[:, 1] != NOT_COMMITTED).sum()) < REQUESTS, "a second token comes in both ways"


def test_sglangs_kernels_filter_what_the_filter_before_has_left() -> None:
    """With a min-p among the requests: top-k, top-p and min-p one after the other, each of a distribution."""
    from dflash_sglang.verify.sampling import Filters, filtered_probs

    generator, rows, vocab = torch.Generator().manual_seed(0), 200, 50

    def uniform(least: float, most: float) -> Tensor:
        return least + (most - least) * torch.rand(rows, generator=generator)

    logits = 2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)
    temperatures, top_ps, min_ps = uniform(0.3, 1.3), uniform(0.05, 0.95), uniform(0.0, 0.2)
    top_ks = torch.randint(2, 30, (rows,), generator=generator)
    probs, ids = (logits / temperatures[:, None]).softmax(dim=-1).sort(dim=-1, descending=True)
    for outside in (
        lambda p: torch.arange(vocab) >= top_ks[:, None],
        lambda p: p.cumsum(dim=-1) - p > top_ps[:, None],
        lambda p: p < min_ps[:, None] * p[:, :1],
    ):
        probs = probs.masked_fill(outside(probs), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    got = filtered_probs(logits, Filters(temperatures, top_ks, top_ps, min_ps, True, True, True, True))
    torch.testing.assert_close(got, torch.zeros_like(probs).scatter(1, ids, probs), atol=1e-6, rtol=0)


def markov_target() -> Tensor:
    """[VOCAB, VOCAB]: logits after each token."""
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


class ConfidentlyWrong:
    """Draws two proposals, mostly a token that the target finds unlikely, of some requests more than of others."""

    def __init__(self, target: Tensor):
        self.target, self.favourite = target, target.argsort(-1)[:, 1]
        self.sureness = torch.arange(REQUESTS) % 4 / 2 + 0.5

    def propose(self, last: Tensor, temperature: float, greedy: bool) -> Proposals:
        """With logprobs of what is likeliest."""
        first = self.favourite[last]
        tokens = torch.stack([last, first, self.favourite[first]], dim=1)
        logits = self.target[tokens[:, :2]].clone()
        best = logits.amax(-1) + self.sureness[:, None]
        logits, candidates = logits.scatter(2, tokens[:, 1:, None], best[..., None]).topk(4, dim=-1)
        temperatures = torch.full((len(last),), temperature)
        proposals = Proposals.drawn(tokens, candidates, logits, temperatures, torch.full((len(last),), greedy))
        return proposals._replace(logprobs=logits.log_softmax(-1)[..., 0])


@pytest.mark.parametrize("decides", ["what is likeliest", "what was drawn"])
@pytest.mark.parametrize("name", ["temperature 0.7", "temperature 1"])
def test_rows_may_be_given_by_what_is_likeliest_and_not_by_what_was_drawn(name, decides):
    """Half of all proposals are verified: with rows for proposals that turned out likely, the draft's favourite,
    drawn again where it was not verified, comes too often."""
    torch.manual_seed(12)
    table = markov_target()

    def rows(proposals: Proposals) -> Ragged:
        of_drawn = (proposals.candidates == proposals.tokens[:, 1:, None]) * proposals.probs
        logprobs = proposals.logprobs if decides == "what is likeliest" else of_drawn.sum(-1).log()
        ragged = some_rows(logprobs, 2 * REQUESTS)
        assert set(ragged.lens.tolist()) == {1, 2, 3}
        return ragged

    draft = ConfidentlyWrong(table)
    if decides == "what is likeliest":
        committed = first_step_of_two_tokens(table, FILTERS[name], draft.propose, rows)
        assert 0 < int((committed[:, 1] >= 0).sum()) < REQUESTS
    else:
        with pytest.raises(AssertionError, match="chi-square"):
            first_step_of_two_tokens(table, FILTERS[name], draft.propose, rows)


def first_step_of_two_tokens(
    table: Tensor,
    filters: dict[str, Any],
    propose: Callable[[Tensor, float, bool], Proposals],
    rows: Callable[[Proposals], Ragged | None] = lambda _: None,
) -> Tensor:
    """Asserts that the first two output tokens of REQUESTS requests follow the target's filtered distribution, and
    returns what the first step committed. `propose` takes the last tokens, the temperature and whether greedy;
    `rows` says which rows are verified."""
    from dflash_sglang.verify.rejection import NOT_COMMITTED, rejection_sample

    info = sampling_info(REQUESTS, **filters)

    def step(last: Tensor) -> Tensor:
        proposals = propose(last, filters.get("temperature", 1.0), filters.get("top_k") == 1)
        ragged = rows(proposals)
        logits = packed(table[proposals.tokens], ragged)
        return rejection_sample(logits, info, proposals, kernels=False, ragged=ragged)

    committed = step(torch.zeros(REQUESTS, dtype=torch.long))
    first = committed[:, 0]
    next_step = step(first)  # of the requests that committed one token
    second = torch.where(committed[:, 1] != NOT_COMMITTED, committed[:, 1], next_step[:, 0])
    conditional = target_probs(table, **filters)
    expected = (conditional[0][:, None] * conditional).flatten() * REQUESTS
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).float()
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = float(((observed - expected) ** 2 / expected)[possible].sum())
    bound = chi_square_bound(int(possible.sum()) - 1)
    assert chi_square <= bound, f"chi-square {chi_square:.1f} above {bound:.1f}"
    return committed


def chi_square_bound(degrees: int, quantile: float = 3.0902) -> float:
    """Wilson and Hilferty's 0.999 quantile of the chi-square distribution."""
    if degrees == 0:
        return 1e-3
    return degrees * (1 - 2 / (9 * degrees) + quantile * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("ragged", [None, [1, 3, 2, 2, 1, 3, 1]])
def test_a_batch_larger_than_one_sequence_of_launches_takes_is_sampled_in_parts(monkeypatch, ragged):
    from dflash_sglang.kernels.sampled.tokens import RowFilters, SampledRows, Workspace
    from dflash_sglang.verify import rejection

    sizes = []

    def greedy_part(rows: SampledRows, filters: RowFilters, work: Workspace, out: Tensor) -> None:
        logits, *proposals, of_part = rows
        sizes.append(len(rows.tokens))
        coins = torch.zeros(sizes[-1], BLOCK + 1)
        found = rejection.sample_with(logits, filters, Proposals(*proposals), coins, ragged=of_part).clamp(min=0)
        for request, tokens in enumerate(found):
            start, number = (request * BLOCK, BLOCK) if of_part is None else [n[request] for n in of_part[:2]]
            out[start : start + number] = tokens[:number]

    monkeypatch.setattr(rejection, "AT_ONCE", 3)
    monkeypatch.setattr(rejection, "target_tokens_triton", greedy_part)
    table = markov_target()
    proposals = Draft("likeliest", table).propose(torch.arange(VOCAB), 1.0, True)
    if ragged is not None:
        lens = torch.tensor(ragged, dtype=torch.int32)
        ragged = Ragged(torch.cat([lens.new_zeros(1), lens.cumsum(0).int()]), lens, BLOCK)
    logits, info = packed(table[proposals.tokens], ragged), sampling_info(VOCAB, top_k=1)
    sampler = rejection.RejectionSampler(VOCAB, BLOCK, VOCAB, "cpu")
    whole = sampler.target_tokens(logits, info, proposals, False, ragged)
    assert len(whole) == len(logits)
    sampler._work = Workspace(3, BLOCK, VOCAB, "cpu")
    assert torch.equal(sampler.target_tokens(logits, info, proposals, False, ragged), whole)
    assert sizes == [3, 3, 1]


def test_a_batch_that_does_not_fit_the_workspace_is_refused():
    from dflash_sglang.kernels.sampled.tokens import Workspace
    from dflash_sglang.verify.rejection import RejectionSampler

    sampler = RejectionSampler(2, BLOCK, VOCAB, "cpu")
    sampler._work = Workspace(2, BLOCK, VOCAB, "cpu")
    proposals = Proposals.certain(torch.zeros(3, BLOCK, dtype=torch.long))
    message = "a workspace for 2 x 3 rows of 7 logits cannot take 3 x 3 rows of 7"
    with pytest.raises(ValueError, match=message):
        sampler.target_tokens(torch.zeros(3 * BLOCK, VOCAB), sampling_info(3), proposals, kernels=False)


def test_drawn_proposals_give_greedy_requests_the_likeliest_candidate():
    torch.manual_seed(0)
    tokens, candidates = torch.zeros(64, 3, dtype=torch.long), torch.arange(4).expand(64, 2, 4) + 5
    greedy = torch.arange(64) < 32
    proposals = Proposals.drawn(tokens, candidates, torch.zeros(64, 2, 4), torch.ones(64), greedy)
    assert (proposals.tokens[:32, 1:] == 5).all() and (proposals.probs[:32, :, 0] == 1).all()
    assert set(proposals.tokens[32:, 1:].flatten().tolist()) == {5, 6, 7, 8}
    assert (proposals.probs[32:] == 0.25).all()


def test_sglangs_sampler_draws_from_a_float32_copy_of_the_logits(monkeypatch):
    """Of blocks without proposals: the logits stay as they are for what reports them."""
    from dflash_sglang.drafting.block import Rows
    from dflash_sglang.verify import target_tokens
    from dflash_sglang.verify.rows import VerifyRows

    monkeypatch.setattr(target_tokens, "get_dp_tp_group", mock.Mock())
    monkeypatch.setattr(target_tokens, "SpecTpSync", mock.Mock())

    def draw(output: Any, info: Any, positions: Tensor, **_: Any) -> Tensor:
        assert output.next_token_logits.dtype == torch.float32
        return output.next_token_logits.mul_(2).argmax(dim=-1)  # as SGLang's, in place

    chooser = target_tokens.TargetTokens(mock.Mock(), mock.Mock(), mock.Mock(side_effect=draw), by_kernels=True)
    logits, positions = torch.randn(2, VOCAB).bfloat16(), torch.arange(2)
    before, block = logits.clone(), SimpleNamespace(size=1, batch_size=2)
    of = VerifyRows(Rows(positions, positions, positions), 1, 1)
    chosen = chooser.choose(logits, sampling_info(2), block, mock.Mock(), of)
    assert torch.equal(chosen, before.float().argmax(dim=-1)) and torch.equal(logits, before)
