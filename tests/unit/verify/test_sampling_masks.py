"""`return_sampling_mask`: what is reported is what was sampled from, for every committed token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.drafting.proposals import Proposals

BS, BLOCK, VOCAB, CAP = 60, 8, 400, 300
OK, OVERFLOW, INVALID = range(3)


@pytest.fixture(autouse=True)
def cap(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_sglang.verify import sampling

    features = SimpleNamespace(features=SimpleNamespace(sampling_mask_max_tokens=CAP))
    monkeypatch.setattr(sampling, "get_exec", lambda: features)
    torch.manual_seed(0)


def info(top_ks: list[int], top_p: float = 1.0, asking: list[int] | None = None, **fields: Any) -> Any:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo

    number, asking = len(top_ks), list(range(len(top_ks))) if asking is None else asking
    return SamplingBatchInfo(
        temperatures=torch.full((number, 1), 0.8),
        top_ps=torch.full((number,), top_p),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        min_ps=torch.zeros(number),
        is_all_greedy=all(top_k == 1 for top_k in top_ks),
        is_any_greedy=1 in top_ks,
        need_top_p_sampling=top_p != 1,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        device="cpu",
        sampling_mask_batch_indices=torch.tensor(asking),
        sampling_mask_top_ks=[top_ks[i] for i in asking],
        **fields,
    )


def sampled(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(target ids, committed, the output) of a step that proposes the likeliest tokens"""
    from dflash_sglang.verify.rejection import rejection_sample
    from dflash_sglang.verify.sampling import sampling_mask_output

    bs = len(batch.top_ks)
    best = logits.view(bs, BLOCK, VOCAB)[:, :-1].argmax(dim=-1)
    tokens = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), best], dim=1)
    ids = rejection_sample(logits, batch, Proposals.certain(tokens), kernels=True)
    lens = (ids >= 0).sum(dim=1)
    ids = ids.clamp(min=0)
    return ids, lens, sampling_mask_output(logits, batch, ids, lens, kernels=True)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_a_committed_token_is_among_those_it_was_drawn_from_with_its_probability(top_p: float, ties: bool) -> None:
    from dflash_sglang.verify.sampling import Filters, filtered_probs

    logits = 2 * torch.randn(BS * BLOCK, VOCAB)
    logits = logits.bfloat16().float() if ties else logits
    batch = info([12] * BS, top_p, sampling_support_logprobs_capture_indices=torch.arange(BS))
    ids, lens, output = sampled(logits, batch)
    whole = filtered_probs(logits, Filters.from_batch(batch, True).repeat(BLOCK)).view(BS, BLOCK, VOCAB)
    assert output.num_accept_tokens.tolist() == lens.tolist()
    for request in range(BS):
        for row in range(int(lens[request])):
            expected, length = whole[request, row], int(output.lengths[request, row])
            support = output.token_ids[request, row, :length]
            assert output.statuses[request, row] == OK and ids[request, row] in support
            assert set(support.tolist()) == set(expected.nonzero().flatten().tolist())
            assert torch.allclose(output.support_logprobs[request, row, :length].exp(), expected[support])
            assert torch.isclose(output.selected_logprobs[request, row].exp(), expected[ids[request, row]])


def test_supports_that_are_too_large_and_tokens_outside_are_told() -> None:
    from dflash_sglang.verify.sampling import sampling_mask_output

    logits = torch.zeros(BLOCK, VOCAB)
    logits[1, :200] = 5.0  # so many tokens tie for the 4 that are asked for
    logits[2, :5] = 5.0
    ids = torch.zeros(1, BLOCK, dtype=torch.int64)
    ids[0, 2] = 6
    output = sampling_mask_output(logits, info([4]), ids, torch.tensor([3]), kernels=True)
    assert output.statuses[0, :3].tolist() == [OVERFLOW, OK, INVALID]
    assert output.lengths[0, :3].tolist() == [256, 200, 5]


def test_a_token_at_the_cut_is_in_however_the_cut_is_rounded() -> None:
    from dflash_sglang.verify.sampling import sampling_mask_output

    logits = torch.full((BLOCK, VOCAB), -20.0)
    logits[:, :3] = torch.tensor([2.0, 1.0, 0.999])
    ids = torch.full((1, BLOCK), 2)
    batch = info([2])
    output = sampling_mask_output(logits, batch, ids, torch.tensor([1]), kernels=True)
    assert output.statuses[0, 0] == OK and output.token_ids[0, 0].tolist()[:3] == [0, 1, 2]
    ratio = output.selected_logprobs[0, 0] - torch.log(torch.tensor(1 / (1 + torch.e ** (1 / 0.8))))
    assert ratio.item() == pytest.approx(-0.001 / 0.8, abs=1e-5)
