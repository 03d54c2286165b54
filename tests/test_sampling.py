"""Sampled verification: C16 (output follows the target's filtered distribution, whatever is proposed), seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals

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
    from dflash_sglang.compat import SamplingBatchInfo

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


def markov_target() -> Tensor:
    """[VOCAB, VOCAB]: logits after each token."""
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))


def first_step_of_two_tokens(
    table: Tensor, filters: dict[str, Any], propose: Callable[[Tensor, float, bool], Proposals]
) -> Tensor:
    """Asserts that the first two output tokens of REQUESTS requests follow the target's filtered distribution, and
    returns what the first step committed. `propose` takes the last tokens, the temperature and whether greedy."""
    from dflash_sglang.verify.rejection import NOT_COMMITTED, rejection_sample

    info = sampling_info(REQUESTS, **filters)

    def step(last: Tensor) -> Tensor:
        proposals = propose(last, filters.get("temperature", 1.0), filters.get("top_k") == 1)
        return rejection_sample(table[proposals.tokens].view(-1, VOCAB), info, proposals, kernels=False)

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
    assert chi_square <= chi_square_bound(int(possible.sum()) - 1)
    return committed


def chi_square_bound(degrees: int, quantile: float = 3.0902) -> float:
    """Wilson and Hilferty's 0.999 quantile of the chi-square distribution."""
    if degrees == 0:
        return 1e-3
    return degrees * (1 - 2 / (9 * degrees) + quantile * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
def test_the_bounds_of_a_filtered_distribution_hold_at_any_size_of_vocabulary(scale, kernels):
    """Flat and peaked rows of 5000 tokens, where a top-p or a top-k need not be made of likely tokens."""
    from dflash_sglang.verify.filters import LIKELY, Filters, filtered_probs, kept

    rows, vocab = 64, 5000
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(rows, vocab, generator=generator)
    choices = dict(
        top_ks=torch.tensor([1, 20, 900, 1 << 30]),
        top_ps=torch.tensor([0.3, 0.95, 1.0]),
        min_ps=torch.tensor([0.0, 0.001, 0.2]),
    )
    picked = {
        key: values[torch.randint(len(values), (rows,), generator=generator)] for key, values in choices.items()
    }
    info = sampling_info(
        rows, 0.8, **picked, need_top_k_sampling=True, need_top_p_sampling=True, need_min_p_sampling=True
    )
    filters = Filters.of(info, kernels)
    log_normaliser = (logits / 0.8).logsumexp(-1)
    raw = logits / 0.8 - log_normaliser[:, None]
    bounds = kept(logits, filters, log_normaliser)
    probs = filtered_probs(logits, filters)
    certainly = raw >= bounds.floor[:, None]
    assert (probs[certainly] > 0).all(), "what is said to be kept is kept"
    mass = raw.exp().where(probs > 0, 0.0).sum(-1)
    assert (bounds.mass >= mass - 1e-5).all()
    likely = raw.exp() >= 1 / LIKELY
    # Exact where the filters end within the likely tokens, and what top-k leaves is known.
    k_known = (filters.top_ks <= likely.sum(-1)) | (filters.top_ks >= vocab)
    exact = (likely & (probs == 0)).any(-1) & k_known
    torch.testing.assert_close(bounds.mass[exact], mass[exact], atol=1e-5, rtol=0)
    assert (certainly == (probs > 0))[exact].all()
    if scale == 6.0:
        assert exact.sum() > rows / 3


def test_greedy_requests_beside_sampled_ones_commit_what_agrees_with_the_argmax():
    from dflash_sglang.verify.rejection import committed, rejection_sample

    logits = torch.randn(4 * BLOCK, VOCAB, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1).view(4, BLOCK)
    tokens = torch.cat([torch.zeros(4, 1, dtype=torch.long), best[:, :-1]], dim=1)
    tokens[1, 2] = (tokens[1, 2] + 1) % VOCAB
    tokens[2, 1] = (tokens[2, 1] + 1) % VOCAB
    logits[1 * BLOCK + 1] = logits[2 * BLOCK] = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0, 0.0, 2.0])  # ties
    best[1, 1] = best[2, 0] = 1
    tokens[2, 1] = 3
    info = sampling_info(4, is_any_greedy=True, need_top_k_sampling=True)
    info.top_ks[:3] = 1
    token_ids = rejection_sample(logits, info, Proposals.certain(tokens), kernels=False)
    accepted = committed(token_ids, torch.tensor([10, 20, 30, 40]))
    assert accepted.commit_lens[:3].tolist() == [3, 2, 1]
    assert accepted.new_seq_lens[:3].tolist() == [13, 22, 31]
    assert accepted.bonus_tokens[:3].tolist() == [best[0, 2], best[1, 1], best[2, 0]]
    assert [accepted.target_ids[i, :n].tolist() for i, n in enumerate([3, 2, 1])] == [
        best[0].tolist(), best[1, :2].tolist(), best[2, :1].tolist(),
    ]  # fmt: skip


def test_drawn_proposals_give_greedy_requests_the_likeliest_candidate():
    torch.manual_seed(0)
    tokens, candidates = torch.zeros(64, 3, dtype=torch.long), torch.arange(4).expand(64, 2, 4) + 5
    greedy = torch.arange(64) < 32
    proposals = Proposals.drawn(tokens, candidates, torch.zeros(64, 2, 4), torch.ones(64), greedy)
    assert (proposals.tokens[:32, 1:] == 5).all() and (proposals.probs[:32, :, 0] == 1).all()
    assert set(proposals.tokens[32:, 1:].flatten().tolist()) == {5, 6, 7, 8}
    assert (proposals.probs[32:] == 0.25).all()


class Recorded:
    """Stands in for SGLang's sampler: keeps what it was given."""

    def __call__(self, logits_output: Any, info: Any, **kwargs: Any) -> Tensor:
        self.info, self.positions = info, kwargs["positions"]
        return logits_output.next_token_logits.argmax(-1).int()


def test_every_row_of_a_block_has_its_requests_seed_parameters_and_position():
    from dflash_sglang.verify.sampling import seeded_tokens

    sampler = Recorded()
    info = sampling_info(
        2,
        temperatures=torch.tensor([[0.5], [2.0]]),
        top_ps=torch.tensor([0.9, 0.8]),
        top_ks=torch.tensor([3, 4]),
        min_ps=torch.tensor([0.1, 0.2]),
        sampling_seed=torch.tensor([7, 9]),
    )
    positions = torch.tensor([10, 11, 12, 40, 41, 42])
    logits = torch.eye(6, VOCAB)
    assert seeded_tokens(logits, info, positions, sampler, BLOCK).tolist() == [[0, 1, 2], [3, 4, 5]]
    rows = sampler.info
    assert rows.temperatures.flatten().tolist() == [0.5] * 3 + [2.0] * 3
    assert rows.top_ks.tolist() == [3] * 3 + [4] * 3
    assert rows.sampling_seed.tolist() == [7] * 3 + [9] * 3
    torch.testing.assert_close(rows.top_ps, torch.tensor([0.9] * 3 + [0.8] * 3))
    torch.testing.assert_close(rows.min_ps, torch.tensor([0.1] * 3 + [0.2] * 3))
    assert sampler.positions is positions
    assert len(rows) == 6


def test_bias_reaches_every_row_of_its_request_only():
    from dflash_sglang.verify.sampling import mask_and_bias

    bias = torch.zeros(2, VOCAB)
    bias[1, 2] = 5.0
    logits = torch.ones(6, VOCAB)
    mask_and_bias(logits, sampling_info(2, logit_bias=bias), None, BLOCK)
    first, second = logits.view(2, BLOCK, VOCAB)
    assert first.tolist() == [[1.0] * VOCAB] * BLOCK
    assert second.tolist() == [[1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0]] * BLOCK
