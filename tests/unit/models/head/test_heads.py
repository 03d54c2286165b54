"""The borrowed head: where it is found, and greedy proposals from a vocabulary in shards (C13)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.lora.layers import BaseLayerWithLoRA
from torch import nn

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.kernels.head.pack_shard import Candidates, pack_best
from dflash_sglang.models.head import target_head
from dflash_sglang.models.head.draft_head import DraftHead
from dflash_sglang.models.head.target_head import TargetHead, find_embedding, find_head
from tests.support.fakes import Together

VALUES = (-3e38, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3e38)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    vocabulary=st.integers(1, 40),
    offset=st.sampled_from([0, 70_000]),
    values=st.lists(st.sampled_from(VALUES), min_size=80, max_size=80),
)
@example(ranks=2, vocabulary=2, offset=0, values=[-0.0, 0.0] * 40)
def test_the_best_token_of_a_sharded_head_is_that_of_the_vocabulary_with_ties_to_the_lowest_id(
    ranks, vocabulary, offset, values
):
    """The last shards may be short or empty."""
    logits, together = torch.tensor(values).view(2, 40)[:, :vocabulary], Together(ranks)
    rows = -(-vocabulary // ranks)

    def of_rank(rank: int) -> list[int]:
        own = logits[:, rank * rows : (rank + 1) * rows]
        head = nn.Linear(1, rows, bias=False)
        head.tp_group = together.of(rank)
        start = offset + rank * rows
        head.shard_indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=own.shape[1])
        return TargetHead(head).best(own).tolist()

    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(of_rank, range(ranks)):
            assert found == [offset + row.index(max(row)) for row in logits.tolist()]


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 4),
    vocabulary=st.integers(4, 40),
    count=st.sampled_from([1, 3, 8]),
    mapped=st.booleans(),
    beyond=st.sampled_from([0, 0, 1, 30]),
)
def test_all_ranks_of_a_sharded_head_get_the_likeliest_tokens_of_the_whole_vocabulary(
    ranks, vocabulary, count, mapped, beyond
):
    """In one gather, of as many numbers from each rank, though the last shards may be short or empty, or hold only
    rows beyond the target's vocabulary, which would win."""
    held = vocabulary + beyond
    rows = -(-held // ranks)
    # Sums of multiples of 1/16 are exact, so that equal tokens are equal in whatever shard.
    weight, hidden = (torch.randint(-9, 10, (rows_of, 8)) / 4 for rows_of in (vocabulary, 3))
    together = Together(ranks)
    weight[1] = weight[-1]  # the lower id comes first, of whichever shard
    spec = VocabularySpec(None, None, None, 1.0, 0.5, 3.0)
    target_ids = torch.randperm(1000)[:vocabulary] if mapped else None
    gathers = []

    def of_rank(rank: int) -> Candidates:
        start, end = min(rank * rows, held), min((rank + 1) * rows, held)
        known = weight[start:end]
        lm_head = nn.Linear(8, rows, bias=False)
        lm_head.weight.data = torch.cat((known, 100.0 * hidden.sign()[:1].expand(rows - len(known), 8)))  # padding
        lm_head.tp_group = group = together.of(rank)
        lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=end - start)
        gather = group.all_gather_into_tensor

        def noted(out: torch.Tensor, own: torch.Tensor) -> None:
            gathers.append(own.shape)
            gather(out, own)

        group.all_gather_into_tensor = noted
        out = Candidates(torch.full((3, count), -7), torch.zeros(3, count))
        tokens = vocabulary if beyond else None
        found = DraftHead(lm_head, spec, target_ids, None, tokens).likeliest(hidden, count, out)
        assert all(a is b for a, b in zip(found, out, strict=True))
        return found

    def in_two_parts(logits: torch.Tensor, first_id: int, *settings: Any) -> torch.Tensor:
        half = logits.shape[1] // 2
        parts = (logits[:, :half], first_id), (logits[:, half:], first_id + half)
        return torch.cat([pack_best(*part, *settings) for part in parts])

    with ThreadPoolExecutor(ranks) as pool, mock.patch.object(target_head, "pack_best", in_two_parts):
        found = list(pool.map(of_rank, range(ranks)))
    assert gathers == ([(count + 1, 3)] * ranks if ranks > 1 else [])
    logits = 3 * torch.tanh(hidden @ weight.T * 0.5 / 3)
    expected, ids = logits.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    ids, expected = (
        torch.nn.functional.pad(of, (0, max(0, count - vocabulary)))[:, :count] for of in (ids, expected)
    )
    expected[:, vocabulary:] = float("-inf")
    for got in found:
        assert got.ids.tolist() == (ids if target_ids is None else target_ids[ids]).tolist()
        torch.testing.assert_close(got.logprobs, expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any),
    same_batch=st.sampled_from([1, 2]),
    count=st.sampled_from([1, 7]),
    into=st.booleans(),
)
def test_a_head_sharded_over_data_parallel_ranks_gives_each_its_own_rows_tokens(rows, same_batch, count, into):
    """Ranks with no rows are IDLE."""
    ranks = len(rows) * same_batch
    weight = torch.randn(ranks * 5, 8)
    hidden = [torch.randn(count, 8) for count in rows]
    together = Together(ranks)

    def rank(i: int) -> Candidates:
        lm_head = nn.Linear(8, 5, bias=False)
        lm_head.weight.data = weight[5 * i : 5 * i + 5]
        lm_head.tp_group = together.of(i)
        lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=5 * i, num_org_elements=5)
        head = TargetHead(lm_head, same_batch)
        assert head.all_rows is not None
        head.all_rows.expect(max(rows))
        own = hidden[i // same_batch]
        shape = (len(own), count)
        out = Candidates(torch.full(shape, -7), torch.zeros(shape)) if into else None
        found = head.likeliest(own, count, out)
        assert out is None or all(a is b for a, b in zip(found, out, strict=True))
        return found

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    for i, found in enumerate(results):
        logprobs, ids = (hidden[i // same_batch] @ weight.T).log_softmax(-1).topk(count, dim=-1)
        assert found.ids.tolist() == ids.tolist()
        torch.testing.assert_close(found.logprobs, logprobs)


def test_a_head_of_a_type_that_no_method_serves_is_refused():
    head = nn.Module()
    head.weight = nn.Parameter(torch.zeros(100, 16, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="torch.int8: expected float16, bfloat16 or float32"):
        TargetHead(head)


def test_head_and_embedding_are_found_tied_nested_behind_lora_or_by_their_weight():
    def module(**children) -> nn.Module:
        made = nn.Module()
        for name, child in children.items():
            setattr(made, name, child)
        return made

    table, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    tied = module(model=module(embed_tokens=table), lm_head=table)
    assert find_embedding(tied) is table and find_head(tied) is table
    wrapped = BaseLayerWithLoRA(head, None)
    nested = module(language_model=module(model=module(embed_tokens=table), lm_head=wrapped))
    assert find_embedding(nested) is table and find_head(nested) is head
    by_weight = module(output=head)
    by_weight.get_input_embeddings = lambda: table
    by_weight.get_embed_and_head = lambda: (table.weight, head.weight)
    assert find_embedding(by_weight) is table and find_head(by_weight) is head
    with pytest.raises(ValueError, match=r"no LM head.*looked for lm_head"):
        find_head(module(model=module(embed_tokens=table)))
    table.tp_size = 4
    with pytest.raises(ValueError, match=r"shards its embedding over 4 ranks: expected at most 2"):
        find_embedding(tied, same_batch=2)
    assert find_embedding(tied, same_batch=4) is table
    with pytest.raises(ValueError, match=r"no token embedding.*get_input_embeddings"):
        find_embedding(module(lm_head=head))
