"""An fp8 copy of the head for drafting: its arithmetic, its shards, and when it is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.kernels.head.fp8_linear import fp8_linear, fp8_linear_torch, quantise_rows
from dflash_sglang.models.head import copies
from dflash_sglang.models.head.copies import Fp8Head
from dflash_sglang.models.head.draft_head import DraftHead, HeadFacts, build_draft_head, choose_form
from dflash_sglang.models.head.target_head import TargetHead
from tests.support import sglang_layers as layers
from tests.support.fakes import Together
from tests.support.start_up import refused

MIB = 1 << 20


def in_fp8(values: Tensor) -> Tensor:
    """Rows of integers whose largest magnitude is 28, as fp8 keeps them: their scale is 1/16, so that beyond 16
    the even ones alone exist, and between two of them the one with an even mantissa."""
    assert bool((values.abs().amax(dim=-1) == 28).all())
    return torch.where(values.abs() <= 16, values, 2 * (values / 2).round())


def integers(rows: int, columns: int = 8) -> Tensor:
    values = torch.randint(-27, 28, (rows, columns)).float()
    values[:, -1] = 28
    return values


def shard_of(weight: Tensor, ranks: int, i: int, together: Together, padding: int = 3) -> nn.Module:
    """Rank i's part of a head, with padding rows that would win."""
    rows = len(weight) // ranks
    lm_head = nn.Linear(weight.shape[1], rows + padding, bias=False)
    lm_head.weight.data = torch.cat((weight[rows * i : rows * i + rows], torch.full((padding, 8), 1e4)))
    lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=rows * i, num_org_elements=rows)
    lm_head.tp_group = together.of(i)
    return lm_head


def unquantised(**changed: Any) -> Any:
    facts = dict(device="cuda", fp8_gemm=True, method=None, dtype=torch.bfloat16, nbytes=64 * MIB)
    return HeadFacts(**{**facts, **changed})


def test_rows_and_weights_are_rounded_to_fp8_with_a_scale_each_and_multiplied_in_float32() -> None:
    # 2.1 * 448 / 4 = 235.2: steps of 16 from 128 on; 0.3 * 448 = 134.4.
    x, weight = torch.tensor([[4.0, 2.1, -1.0]]), torch.tensor([[1.0, 0.3, 0.5], [0.0, 0.0, 0.0]])
    rows, x_scale = quantise_rows(x)
    assert rows.dtype == torch.float8_e4m3fn and rows.tolist() == [[448.0, 240.0, -112.0]]
    assert x_scale.tolist() == torch.tensor([[4 / 448]]).tolist()
    quantised, scale = quantise_rows(weight)
    assert quantised.tolist() == [[448.0, 128.0, 224.0], [0.0, 0.0, 0.0]]
    assert scale.tolist() == torch.tensor([[1 / 448], [0.0]]).tolist()
    expected = (448 * 448 + 240 * 128 - 112 * 224) * (4 / 448) * (1 / 448)
    assert fp8_linear(x, quantised, scale).tolist() == [[pytest.approx(expected, rel=1e-6), 0.0]]
    assert fp8_linear(x.bfloat16(), quantised, scale).dtype == torch.bfloat16
    tiny, _ = quantise_rows(torch.tensor([[1e-30, 5e-31], [3e38, -3e38]]))
    assert tiny.tolist() == [[448.0, 224.0], [448.0, -448.0]]


@pytest.mark.parametrize("kept", [None, (0, 1, 5, 6, 7, 39), (37, 38, 39)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_proposes_the_likeliest_token_of_the_quantised_head(
    ranks: int, kept: tuple[int, ...] | None
) -> None:
    """On shards that keep no token, too; the lowest id among equals, never padding; with the new weights after a
    refresh."""
    spec = VocabularySpec(None, None, None, 1.0, 1.0, None)
    ids = None if kept is None else torch.tensor(kept)
    weights = [torch.cat([integers(20)] * 2) for _ in range(2)]  # every token has an equal
    hidden, together = integers(30), Together(ranks)

    def rank(i: int) -> list[Any]:
        lm_head = shard_of(weights[0], ranks, i, together)
        copy = Fp8Head(lm_head, ids)
        assert len(copy.weight) % 16 == 0 and copy.weight.dtype == torch.float8_e4m3fn
        head, addresses = DraftHead(copy, spec, ids), [tensor.data_ptr() for tensor in copy.tensors]
        found = []
        for weight in weights:
            lm_head.weight = shard_of(weight, ranks, i, together).weight  # an update may bring another parameter
            copy.refresh()
            found.append(head.likeliest(hidden, 3))
        assert [tensor.data_ptr() for tensor in copy.tensors] == addresses
        return found

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    tokens = range(40) if kept is None else kept
    for of_rank in results:
        for weight, likeliest in zip(weights, of_rank, strict=True):
            logits = (in_fp8(hidden) @ in_fp8(weight).T)[:, list(tokens)]
            assert not torch.equal(logits, (hidden @ weight.T)[:, list(tokens)]), "rounding has a part in this"
            best = logits.sort(stable=True, descending=True).indices[:, :3]
            assert likeliest.ids.tolist() == torch.tensor(list(tokens))[best].tolist()
            expected = logits.log_softmax(-1).gather(1, best)
            torch.testing.assert_close(likeliest.logprobs, expected, rtol=1e-4, atol=1e-4)


def test_a_head_of_many_rows_is_quantised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_ROWS_AT_A_TIME", 7)
    lm_head = nn.Linear(8, 30, bias=False)
    lm_head.weight.data = integers(30)
    kept = torch.arange(3, 30)
    for copy, rows in (
        (copies.Fp8Head(lm_head), lm_head.weight.data),
        (copies.Fp8Head(lm_head, kept), lm_head.weight.data[kept]),
    ):
        assert torch.equal((copy.weight.float() * copy.weight_scale)[: len(rows)], in_fp8(rows))
        assert not bool(copy.weight[len(rows) :].float().any())


def test_capped_logits_of_a_tied_embedding_are_those_of_its_fp8_copy() -> None:
    with layers.defaults(torch.float32):
        table = VocabParallelEmbedding(300, 8).cpu()
    table.weight.data = torch.cat((integers(300), torch.full((len(table.weight) - 300, 8), 1e4)))
    head, copy, form = build_draft_head(table, VocabularySpec(None, None, None, 1.0, 0.5, 30.0), asked="fp8")
    assert isinstance(copy, Fp8Head) and head.lm_head is copy
    assert form == f"fp8 (draft_head asks for it, {304 * (8 + 4) / MIB:.1f} MiB)"
    hidden = integers(5)
    ids, logprobs = head.likeliest(hidden, 4)
    expected = 30 * torch.tanh(0.5 * (in_fp8(hidden) @ in_fp8(table.weight.data[:300]).T) / 30)
    torch.testing.assert_close(logprobs, expected.log_softmax(-1).topk(4).values)
    assert bool((ids < 300).all())


# fmt: off
CHOICES: list[tuple[str, dict[str, Any], bool, str]] = [
    ("auto", {}, True, "instead of 64.0 MiB on a rank"),
    ("auto", {"dtype": torch.float16}, True, "instead of 64.0 MiB on a rank"),
    ("auto", {"nbytes": 64 * MIB - 1}, False, "64.0 MiB on a rank, less than 64"),
    ("auto", {"nbytes": 32 * MIB}, False, "32.0 MiB on a rank, less than 64"),
    ("auto", {"fp8_gemm": False}, False, "this GPU has no fp8 GEMM"),
    ("auto", {"dtype": torch.float32}, False, "it is in torch.float32"),
    ("auto", {"method": "Fp8LinearMethod"}, False, "it is quantised already and served by Fp8LinearMethod"),
    ("auto", {"device": "cpu", "fp8_gemm": False, "dtype": torch.float32}, False, "a CPU has no fp8 GEMM"),
    ("auto", {"device": "cpu", "fp8_gemm": True}, False, "a CPU has no fp8 GEMM"),
    ("fp8", {"nbytes": 1}, True, "draft_head asks for it"),
    ("fp8", {"device": "cpu", "fp8_gemm": False, "dtype": torch.float32}, True, "draft_head asks for it"),
    ("as_is", {}, False, "draft_head asks for it"),
    ("as_is", {"method": "Fp8LinearMethod"}, False, "draft_head asks for it"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "Method"}, "it is quantised already and served by Method"),
    ({"fp8_gemm": False}, "this GPU has no fp8 GEMM"),
    ({"dtype": torch.float32}, "it is in torch.float32"),
]
# fmt: on


@refused("DFLASH_SGLANG_CONFIG draft_head fp8 beside a head that cannot be copied")
def test_what_is_asked_for_and_what_there_is_decide_on_the_copy() -> None:
    for asked, changed, fp8, why in CHOICES:
        assert choose_form(asked, unquantised(**changed)) == (fp8, why), (asked, changed)
    for changed, why in REFUSED:
        says = rf"^draft_head='fp8': expected .*, but {why}\. Set draft_head to 'auto' or 'as_is'\.$"
        with pytest.raises(ValueError, match=says):
            choose_form("fp8", unquantised(**changed))


def test_the_facts_of_a_head_are_those_of_a_ranks_rows() -> None:
    class Method:
        def apply(self, layer: Any, x: Tensor, bias: Any) -> Tensor:
            return x @ layer.weight.float().T

    lm_head = shard_of(integers(40), 2, 1, Together(2))
    whole, kept = HeadFacts.from_head(lm_head, None), HeadFacts.from_head(lm_head, torch.arange(6))
    assert (whole.device, whole.method, whole.dtype) == ("cpu", None, torch.float32)
    assert (whole.nbytes, kept.nbytes) == (23 * 8 * 4, 3 * 8 * 4)
    lm_head.weight = nn.Parameter(lm_head.weight.data.to(torch.int8), requires_grad=False)
    lm_head.quant_method = Method()
    assert HeadFacts.from_head(lm_head, None).method == "Method"
    head, copy, form = build_draft_head(lm_head, VocabularySpec(None, None, None, 1.0, 1.0, None), asked="auto")
    assert head.lm_head is lm_head and copy is None
    assert form == "as_is (it is quantised already and served by Method)"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 480, 2000])
def test_the_gpus_gemm_gives_the_twins_logits_also_in_a_graph(rows: int) -> None:
    tokens, hidden_size = 5003, 1024  # no multiple of 16, and padding rows that would win
    lm_head = nn.Linear(hidden_size, 5056, bias=False, dtype=torch.bfloat16, device="cuda")
    lm_head.weight.data[tokens:] = 100
    lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=0, num_org_elements=tokens)
    copy = Fp8Head(lm_head)
    head = TargetHead(copy)
    hidden = torch.randn(rows, hidden_size, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        eager = head.logits(hidden)
        expected = fp8_linear_torch(hidden.float(), copy.weight, copy.weight_scale)[:, :tokens]
        assert eager.shape == (rows, tokens) and eager.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits; a value between two of fp8 may go to either.
        torch.testing.assert_close(eager.float(), expected, rtol=2**-7, atol=0.01 * expected.std().item())
        dense = hidden.float() @ lm_head.weight[:tokens].float().T
        assert 0.01 < ((expected - dense).std() / dense.std()).item() < 0.06

        static, graph = torch.zeros_like(hidden), torch.cuda.CUDAGraph()
        head.likeliest(static, 1)  # compiles what a capture cannot
        with torch.cuda.graph(graph):
            ids = head.likeliest(static, 1).ids[:, 0]
        static.copy_(hidden)
        graph.replay()
        assert torch.equal(ids, head.likeliest(hidden, 1).ids[:, 0])
        lm_head.weight.neg_()
        copy.refresh()
        graph.replay()
        assert torch.equal(ids, head.likeliest(hidden, 1).ids[:, 0])
        assert torch.equal(ids, (-eager.float()).argmax(-1))
