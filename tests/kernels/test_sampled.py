"""Rejection sampling in a few launches: what the definition commits by the same random numbers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.sampled.cuts import cut_kernel
from dflash_sglang.kernels.sampled.draw import pick_kernel, residual_kernel
from dflash_sglang.kernels.sampled.rows import chunk_stats_kernel, verdict_kernel
from dflash_sglang.kernels.sampled.tokens import SampledRows, Workspace, target_tokens_triton
from dflash_sglang.verify.rejection import sample_with
from dflash_sglang.verify.sampling import Filters, filtered_probs

OFF = 1 << 30
# Per request in turn: temperature, top-k, top-p, min-p.
PARAMETERS = {
    "temperature": [(0.7, OFF, 1.0, 0.0), (1.0, OFF, 1.0, 0.0), (1e-5, OFF, 1.0, 0.0), (30.0, OFF, 1.0, 0.0)],
    "top-k": [(0.8, 3, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (2.0, 2, 1.0, 0.0)],
    "top-p": [(0.8, OFF, 0.95, 0.0), (1.0, OFF, 1e-6, 0.0), (1.0, OFF, 1.0, 0.0), (2.0, OFF, 0.4, 0.0)],
    "min-p": [(0.8, OFF, 1.0, 0.05), (1.0, OFF, 1.0, 1.0), (1.0, OFF, 1.0, 0.0), (2.0, OFF, 1.0, 0.5)],
    "all": [
        (0.8, 20, 0.9, 0.05), (1.0, 5, 0.6, 0.0), (1.0, 30, 0.95, 0.2), (1.0, 1, 1.0, 0.0), (1.5, 12, 1.0, 0.1),
        (1.0, OFF, 0.7, 0.3), (0.6, OFF, 1.0, 0.0),
    ],
}  # fmt: skip


class Batch(NamedTuple):
    logits: Tensor
    filters: Filters
    proposals: Proposals
    ragged: Ragged | None = None

    def dense(self, rows: Tensor) -> Tensor:
        """rows [rows, ...] -> [requests, block, ...], 0 where a request has none."""
        shape = self.proposals.tokens.shape
        return rows.unflatten(0, shape) if self.ragged is None else self.ragged.dense(rows, shape[1])

    def cut(self, lens: list[int]) -> Batch:
        """With so many rows of each request."""
        device = self.logits.device
        shared = torch.tensor([0, *lens], dtype=torch.int32, device=device)
        kept = torch.arange(self.proposals.tokens.shape[1], device=device) < shared[1:, None]
        ragged = Ragged(shared.cumsum(0).int(), shared[1:].contiguous(), 16)
        return self._replace(logits=self.logits[kept.flatten()], ragged=ragged)


def batch(
    of: str, requests: int, block: int, vocab: int, scale: float, width: int = 1, renormalised: bool = False
) -> Batch:
    """Random rows, mostly proposed their argmax; `width` > 1: proposals drawn from so many candidates."""
    generator = torch.Generator().manual_seed(vocab + 7 * block + width)
    parameters = (PARAMETERS[of] * requests)[:requests]
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*parameters, strict=True))
    filters = Filters(
        temperatures,
        top_ks.int(),
        top_ps.float(),
        min_ps.float(),
        bool((top_ks < vocab).any()),
        bool((top_ps < 1).any()),
        bool((min_ps > 0).any()),
        renormalised,
    )
    logits = scale * torch.randn(requests, block, vocab, generator=generator)
    tokens = torch.randint(vocab, (requests, block), generator=generator)
    astray = torch.rand(requests, block - 1, generator=generator) < 0.1
    tokens[:, 1:] = torch.where(astray, tokens[:, 1:], logits[:, :-1].argmax(-1))
    proposals = Proposals.certain(tokens)
    if width > 1:
        torch.manual_seed(width)
        noisy = logits[:, :-1] + 0.5 * scale * torch.randn(requests, block - 1, vocab, generator=generator)
        values, candidates = noisy.topk(width, dim=-1)
        proposals = Proposals.drawn(tokens, candidates, values, temperatures, top_ks <= 1)
    return Batch(logits.view(-1, vocab), filters, proposals)


def to(device: str, of: Batch) -> Batch:
    filters = of.filters._replace(**{name: getattr(of.filters, name).to(device) for name in Filters._fields[:4]})
    proposals = Proposals(*(tensor.to(device) for tensor in of.proposals[:3]))
    return of._replace(logits=of.logits.to(device), filters=filters, proposals=proposals)


def by_kernels(of: Batch, work: Workspace, out: Tensor | None = None) -> Tensor:
    """[requests, block]"""
    out = torch.full((len(of.logits),), -7, device=of.logits.device) if out is None else out
    target_tokens_triton(SampledRows(of.logits, *of.proposals[:3], of.ragged), of.filters, work, out)
    return of.dense(out)


class Compared(NamedTuple):
    alike: Tensor  # [requests] bool: commits what the definition commits
    commit_lens: Tensor  # [requests] of the definition
    strays: Tensor  # [sampled requests] tokens of the drawing row that filters keep in one form alone
    mass: Tensor  # [sampled requests] what they keep of it over what they should


def compared(of: Batch, work: Workspace, got: Tensor, logits: Tensor | None = None) -> Compared:
    """`got` and the definition by the random numbers in `work`; logits: of another dtype, for the definition."""
    requests, block = got.shape
    logits = of.logits if logits is None else logits
    uniforms = work.uniforms.view(-1)[: requests * (block + 1)].view(requests, block + 1)
    expected = sample_with(logits, of.filters, of.proposals, uniforms, work.chunk, of.ragged)
    commit_lens = (expected >= 0).sum(-1)
    number, cut, mass = (tensor[:requests] for tensor in work.drawing)
    rows = of.dense(logits)[torch.arange(requests, device=got.device), number.long()]
    probs = filtered_probs(rows, of.filters)
    weights = ((rows - rows.amax(-1, keepdim=True)) / of.filters.temperatures[:, None]).exp()
    kept = (rows > cut[:, None]) & (weights >= of.filters.min_ps[:, None]) & (weights > 0)
    sampled = of.filters.top_ks > 1
    return Compared(
        (got == expected.clamp(min=0)).all(-1) & (number + 1 == commit_lens),
        commit_lens,
        (kept ^ (probs > 0)).sum(-1)[sampled],
        (mass / (weights * (probs > 0)).sum(-1))[sampled],
    )


def commit_what_the_definition_commits(of: Batch, work: Workspace, got: Tensor) -> Tensor:
    """Asserts it, bit for bit; returns the numbers of committed tokens."""
    result = compared(of, work, got)
    assert result.alike.all()
    assert not result.strays.any(), "the same tokens are kept"
    torch.testing.assert_close(result.mass, torch.ones_like(result.mass), rtol=1e-5, atol=0)
    return result.commit_lens


@pytest.mark.parametrize(
    "of,block,widest,vocab,scale,width,renormalised",
    [
        ("temperature", 16, 16, 20, 3.0, 1, False),
        ("temperature", 3, 16, 41, 1.0, 4, False),
        ("top-p", 3, 3, 30, 2.0, 1, False),
        ("min-p", 4, 4, 40, 2.0, 3, False),
        ("top-k", 4, 4, 40, 1.0, 3, False),
        ("all", 2, 16, 40, 1.0, 3, True),
        ("all", 2, 2, 2000, 0.02, 1, False),
    ],
)
def test_the_kernels_commit_what_the_definition_commits(
    of, block, widest, vocab, scale, width, renormalised, device, triton_runs
):
    """Filters of every kind side by side, over several chunks of a vocabulary that they do not divide; in a
    workspace for blocks of the `widest` width."""
    requests = min(len(PARAMETERS[of]), 5) if vocab < 100 else 2
    one = to(device, batch(of, requests, block, vocab, scale, width, renormalised))
    work = Workspace(requests + 1, widest, vocab, device, chunk=16 if vocab < 100 else 1024)
    steps = range(1 if vocab > 100 else 3 if device == "cuda" or of == "temperature" else 2)
    commit_lens = [commit_what_the_definition_commits(one, work, by_kernels(one, work)) for _ in steps]
    assert vocab > 100 or torch.stack(commit_lens).max() > 1


@pytest.mark.parametrize(
    ("of", "width", "lens"),
    [
        ("temperature", 1, (3, 1, 5, 2, 4)),
        ("top-p", 3, (1, 5, 1, 1, 4)),
        ("all", 3, (5, 2, 1, 4, 3)),
        ("all", 1, (1, 1, 1, 1, 1)),
    ],
)
def test_a_request_whose_first_rows_are_verified_commits_what_so_short_a_block_would(
    of, width, lens, device, triton_runs
):
    """By kernels and by the definition, with the same random numbers; rows are packed request after request."""
    whole = to(device, batch(of, 5, 5, 41, 2.0, width))
    part, work = whole.cut(list(lens)), Workspace(6, 7, 41, device, chunk=16)
    for _ in range(4 if device == "cuda" else 1):
        got = by_kernels(part, work)
        commit_what_the_definition_commits(part, work, got)
        coins = work.uniforms.view(-1)[: 5 * 6].view(5, 6)
        for request, rows in enumerate(lens):
            if rows == 1:  # a block that the definition does not take: it has no proposals
                continue
            one = slice(request, request + 1)
            tokens, candidates, probs = (tensor[one] for tensor in whole.proposals[:3])
            expected = sample_with(
                whole.dense(whole.logits)[request, :rows],
                whole.filters.part(one),
                Proposals(tokens[:, :rows], candidates[:, : rows - 1], probs[:, : rows - 1]),
                torch.cat([coins[one, : rows - 1], coins[one, 4:]], dim=1),
                work.chunk,
            )
            assert torch.equal(expected.clamp(min=0), got[one, :rows])


@pytest.mark.parametrize("of", ["temperature", "all"])
def test_rows_that_are_no_numbers_commit_tokens_of_the_vocabulary(of, device, triton_runs):
    """The next step embeds them and counts them, before SGLang says that the logits were none."""
    one = to(device, batch(of, 4, 3, 41, 2.0))
    one.logits[3:9] = float("nan")
    work = Workspace(5, 3, 41, device, chunk=16)
    got = by_kernels(one, work)
    expected = sample_with(one.logits, one.filters, one.proposals, torch.rand(4, 4, device=device), 16)
    for ids in (got, expected):
        assert ((ids >= -1) & (ids < 41)).all()


def test_logits_as_masks_biases_and_bfloat16_leave_them_are_filtered_and_drawn_from(device, triton_runs):
    """One finite logit, proposals without a probability, ties, a bias beyond all others; no number is not one."""
    logits, filters, proposals, _ = batch("all", 7, 2, 40, 2.0)
    rows = logits.view(7, 2, 40)
    rows[0, :, 1:] = float("-inf")
    rows[0, :, 0] = -3.0
    rows[1] = rows[1].bfloat16().float()
    rows[2, :, ::2] = rows[2, :, :1]
    rows[3, :, [9, 12, 30]] = 20.0  # of a greedy request: the lowest id
    rows[4, 0, proposals.tokens[4, 1]] = float("-inf")
    rows[5, :, 7] += 1e4
    rows[5, :, 3] -= 1e9
    rows[6, :, 20:] = float("-inf")  # no filter, and chunks without a finite logit
    proposals.tokens[0], proposals.tokens[3] = 0, 9
    one = to(device, Batch(logits, filters, proposals))
    work = Workspace(7, 2, 40, device, chunk=16)
    got = by_kernels(one, work)
    commit_lens = commit_what_the_definition_commits(one, work, got)
    assert commit_lens[0] == 2 and not got[0].any()
    assert got[3].tolist() == [9, 9]
    assert commit_lens[4] == 1


@pytest.mark.parametrize("of,width,dtype", [("temperature", 1, torch.float16), ("all", 3, torch.bfloat16)])
def test_narrow_logits_in_wider_rows_are_sampled_from_as_in_float32(of, width, dtype, device, triton_runs):
    logits, filters, proposals, _ = batch(of, 3, 3, 41, 2.0, width)
    rows = torch.full((len(logits), 48), float("inf"), dtype=dtype)
    rows[:, :41] = logits
    narrow = to(device, Batch(rows, filters, proposals))
    narrow = narrow._replace(logits=narrow.logits[:, :41])
    wide = narrow._replace(logits=narrow.logits.float().contiguous())
    drawn, uniforms = [], []
    for one in (narrow, wide):
        torch.manual_seed(5)
        work = Workspace(3, 3, 41, device, chunk=16)
        drawn.append(by_kernels(one, work))
        commit_what_the_definition_commits(wide, work, drawn[-1])
        uniforms.append(work.uniforms)
        by_definition = sample_with(one.logits, one.filters, one.proposals, work.uniforms, 16)
        assert torch.equal(by_definition.clamp(min=0), drawn[-1])
    assert torch.equal(*drawn) and torch.equal(*uniforms)


def test_steps_draw_different_numbers_and_a_seed_draws_them_again(device, triton_runs):
    one = to(device, batch("temperature", 2, 3, 5, 1.0))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        work = Workspace(2, 3, 5, device)
        for _ in range(2):
            by_kernels(one, work)
            drawn.append(work.uniforms.clone())
    first, again = torch.stack(drawn[:2]), torch.stack(drawn[2:])
    assert torch.equal(first, again)
    assert first.unique().numel() == first.numel()
    assert ((first >= 0) & (first < 1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("of,width", [("temperature", 1), ("top-p", 1), ("all", 1), ("all", 16)])
def test_a_captured_step_follows_its_inputs(of, width):
    """152064 tokens, blocks of 16: replays commit what the definition commits of the inputs as they are then."""
    requests, block, vocab = 7, 16, 152064
    steps = [to("cuda", batch(of, requests, block, vocab, scale, width)) for scale in (3.0, 8.0, 0.5)]
    static = to("cuda", batch(of, requests, block, vocab, 3.0, width))
    work = Workspace(requests + 2, block, vocab, "cuda")
    out = torch.zeros(requests * block, dtype=torch.int64, device="cuda")
    by_kernels(static, work, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_kernels(static, work, out)
    results = []
    for step in steps:
        static.logits.copy_(step.logits)
        for into, value in zip(static.proposals[:3], step.proposals[:3], strict=True):
            into.copy_(value)
        for _ in range(3):
            graph.replay()
            results.append(compared(static, work, static.dense(out), static.logits.double()))
    agree_but_for_rounding(results)
    assert work.rng[1] == 10


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 128])
def test_a_step_of_one_and_of_many_requests(requests):
    work = Workspace(requests, 4, 151936, "cuda")
    results = []
    for scale in (1.0, 4.0, 8.0):
        one = to("cuda", batch("all", requests, 4, 151936, scale))
        results.append(compared(one, work, by_kernels(one, work), one.logits.double()))
    agree_but_for_rounding(results)


@pytest.mark.gpu
def test_one_compilation_serves_every_width():
    work, device = Workspace(4, 16, 1000, "cuda"), torch.cuda.current_device()
    kernels = (chunk_stats_kernel, verdict_kernel, cut_kernel, residual_kernel, pick_kernel)
    counts = []
    for block in (16, 12, 8, 6, 4, 2):
        by_kernels(to("cuda", batch("all", 3, block, 1000, 2.0)), work)
        counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert min(counts[0]) > 0 and counts == counts[:1] * 6


def agree_but_for_rounding(results: list[Compared]) -> None:
    """A token's share of a flat row is not much more than what single precision rounds a sum of the row by."""
    alike, _, strays, mass = (torch.cat(column) for column in zip(*results, strict=True))
    assert alike.double().mean() > 0.94
    assert strays.max() <= 4 and (strays > 0).double().mean() < 0.2
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=2e-4, atol=0)
