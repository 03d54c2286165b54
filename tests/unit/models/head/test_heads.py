"""The borrowed head: where it is found, and greedy proposals from a vocabulary in shards (C13)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import sglang_layers as layers
from tests.support.fakes import Together

VALUES = (-3e38, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3e38)


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@layers.cpu_only
@settings(max_examples=200, deadline=None)
@given(
    shards=st.sampled_from([1, 2, 4]),
    vocabulary=st.integers(1, 40),
    offset=st.sampled_from([0, 70_000, 2**31 - 100]),
    values=st.lists(st.sampled_from(VALUES), min_size=80, max_size=80),
)
@example(shards=2, vocabulary=2, offset=0, values=[-0.0, 0.0] * 40)
def test_the_argmax_over_shards_is_the_argmax_over_the_vocabulary_with_ties_to_the_lowest_id(
    shards, vocabulary, offset, values
):
    from dflash_sglang.kernels.head.pack_shard import merge_shards, pack_shard

    logits = torch.tensor(values).view(2, 40)[:, :vocabulary]
    rows = -(-vocabulary // shards)  # the last shards may be short or empty
    parts = [logits[:, i * rows : (i + 1) * rows] for i in range(shards)]
    packed = torch.stack([pack_shard(part, offset + i * rows) for i, part in enumerate(parts)])
    assert merge_shards(packed).tolist() == [offset + row.index(max(row)) for row in logits.tolist()]


class LastRank:
    """The group of a rank whose peers' packed rows are known."""

    def __init__(self, peers: list[torch.Tensor]) -> None:
        self.peers = peers
        self.world_size = len(peers) + 1

    def all_gather_into_tensor(self, out: torch.Tensor, own: torch.Tensor) -> None:
        out.copy_(torch.cat((*self.peers, own)))


@pytest.mark.parametrize(("ranks", "vocabulary", "rows"), [(2, 100, 64), (4, 100, 32), (4, 150_000, 37_504)])
def test_a_sharded_head_proposes_ids_of_the_whole_vocabulary_and_never_padding(ranks, vocabulary, rows):
    from dflash_sglang.kernels.head.pack_shard import pack_shard
    from dflash_sglang.models.head.target_head import TargetHead

    weight = torch.randn(vocabulary, 16)
    hidden = torch.randn(30, 16)
    weight[-1] = 10 * hidden[0]
    start, padding = (ranks - 1) * rows, ranks * rows - vocabulary
    peers = [pack_shard(hidden @ weight[i * rows :][:rows].T, i * rows) for i in range(ranks - 1)]
    head = nn.Linear(16, rows, bias=False)
    # Padding rows that would win.
    head.weight.data = torch.cat((weight[start:], 100 * hidden.sign().repeat(2, 1)[:padding]))
    head.tp_group = LastRank(peers)
    head.shard_indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=vocabulary - start)
    expected = (hidden @ weight.T).argmax(-1)
    assert TargetHead(head).greedy(hidden).tolist() == expected.tolist()
    assert expected[0] == vocabulary - 1


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 4), vocabulary=st.integers(4, 40))
def test_the_chance_of_a_sharded_heads_token_is_that_among_the_whole_vocabulary(ranks, vocabulary):
    from dflash_sglang.models.head.target_head import TargetHead

    rows = -(-vocabulary // ranks)  # the last shards may be short or empty
    weight, hidden, together = torch.randn(vocabulary, 8), torch.randn(3, 8), Together(ranks)

    def of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = min(rank * rows, vocabulary), min((rank + 1) * rows, vocabulary)
        head = nn.Linear(8, rows, bias=False)
        head.weight.data = torch.cat((weight[start:end], torch.full((rows - end + start, 8), 100.0)))  # padding
        head.tp_group = together.of(rank)
        head.shard_indices = SimpleNamespace(org_vocab_start_index=start, num_org_elements=end - start)
        return TargetHead(head).chances(hidden)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(of_rank, range(ranks)))
    expected, ids = (hidden @ weight.T).log_softmax(dim=-1).max(dim=-1)
    for got, logprobs in found:
        assert got.tolist() == ids.tolist()
        torch.testing.assert_close(logprobs, expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any),
    same_batch=st.sampled_from([1, 2]),
    likeliest=st.booleans(),
)
def test_a_head_sharded_over_data_parallel_ranks_gives_each_its_own_rows_tokens(rows, same_batch, likeliest):
    """Ranks with no rows are IDLE."""
    from dflash_sglang.models.head.target_head import TargetHead

    ranks = len(rows) * same_batch
    weight = torch.randn(ranks * 5, 8)
    hidden = [torch.randn(count, 8) for count in rows]
    together = Together(ranks)

    def rank(i: int) -> object:
        lm_head = nn.Linear(8, 5, bias=False)
        lm_head.weight.data = weight[5 * i : 5 * i + 5]
        lm_head.tp_group = together.of(i)
        lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=5 * i, num_org_elements=5)
        head = TargetHead(lm_head, same_batch)
        assert head.all_rows is not None
        head.all_rows.expect(max(rows))
        own = hidden[i // same_batch]
        return head.likeliest(own, 7) if likeliest else head.greedy(own)

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    for i, result in enumerate(results):
        logits = hidden[i // same_batch] @ weight.T
        if likeliest:
            values, ids = logits.topk(7, dim=-1)
            assert result[0].tolist() == ids.tolist()
            torch.testing.assert_close(result[1], values)
        else:
            assert result.tolist() == logits.argmax(-1).tolist()


def test_a_quantised_head_proposes_through_its_quantisation_method():
    from dflash_sglang.models.head.target_head import TargetHead

    class Method:
        def apply(self, layer, x, bias):
            return x @ (layer.weight.float() * 0.1).T

    head = nn.Module()
    head.weight = nn.Parameter(torch.randint(-127, 127, (100, 16), dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="torch.int8: expected float16, bfloat16 or float32"):
        TargetHead(head)
    head.quant_method = Method()
    hidden = torch.randn(5, 16)
    assert TargetHead(head).greedy(hidden).tolist() == (hidden @ head.weight.float().T).argmax(-1).tolist()


def test_head_and_embedding_are_found_tied_nested_behind_lora_or_by_their_weight():
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    from dflash_sglang.models.head.target_head import find_embedding, find_head

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
