"""DFlash2's kernels: torch twins against loops (C14 of vLLM's list), Triton against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_sglang.kernels.block import grouped_conv as conv_kernels
from dflash_sglang.kernels.head import selector_walk as walk_kernels
from dflash_sglang.kernels.head.selector_walk import Codebooks, Draw, Lattice
from tests.support.reference_dflash2 import convolution_loop, walk_loop

HIDDEN, VOCAB = 48, 40


def conv_inputs(block: int, taps: int, group_size: int, blocks: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """rows, dynamic (a strided part of a projection, as in the model) and base."""
    generator = torch.Generator().manual_seed(block * 100 + taps * 10 + group_size)
    rows = torch.randn(blocks * block, HIDDEN, generator=generator)
    projected = torch.randn(blocks * block, 2, taps, HIDDEN // group_size, generator=generator)
    return rows, projected[:, 1], torch.randn(taps, HIDDEN, generator=generator)


@pytest.mark.parametrize(
    ("block", "taps", "group_size"), [(5, 6, 12), (8, 2, 1), (8, 3, 4), (16, 2, 16), (16, 1, 48)]
)
def test_the_convolution_equals_the_loop(twin, device, block, taps, group_size):
    inputs = conv_inputs(block, taps, group_size)
    convolve = getattr(conv_kernels, f"grouped_conv_{twin}")
    got = convolve(*(x.to(device) for x in inputs), block)
    torch.testing.assert_close(got.cpu(), convolution_loop(*inputs, block), rtol=1e-4, atol=1e-4)


def test_a_blocks_convolution_depends_on_no_other_block_and_no_later_row(twin, device):
    rows, dynamic, base = (x.to(device) for x in conv_inputs(8, 3, 16))
    convolve = getattr(conv_kernels, f"grouped_conv_{twin}")
    before = convolve(rows, dynamic, base, 8)
    rows[4], rows[16] = 1e6, float("nan")
    after = convolve(rows, dynamic, base, 8)
    changed = (before != after).any(dim=1).nonzero().flatten().tolist()
    assert changed == [4, 5, 6, 16, 17, 18]


def test_the_convolution_rounds_once(twin, device):
    rows, dynamic, base = (x.bfloat16().to(device) for x in conv_inputs(8, 2, 16))
    got = getattr(conv_kernels, f"grouped_conv_{twin}")(rows, dynamic, base, 8)
    exact = convolution_loop(rows.cpu().float(), dynamic.cpu().float(), base.cpu().float(), 8)
    assert got.dtype == torch.bfloat16
    # The interpreter truncates where a GPU rounds.
    ulps = 1.01 if device == "cpu" and twin == "triton" else 0.51
    error = (got.cpu().float() - exact).abs()
    assert bool((error <= ulps * exact.abs() * 2**-7 + 1e-6).all())


def walk_inputs(
    rank: int, width: int, steps: int, dtype: torch.dtype = torch.float32, requests: int = 3
) -> tuple[Codebooks, Lattice, Tensor]:
    generator = torch.Generator().manual_seed(rank * 100 + width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    candidates = torch.stack([torch.randperm(VOCAB, generator=generator)[:width] for _ in range(requests * steps)])
    return (
        Codebooks(random(VOCAB, rank).to(dtype), random(VOCAB, rank).to(dtype)),
        Lattice(
            candidates.view(requests, steps, width),
            random(requests, steps, width),
            (random(requests, steps, rank) * rank**-0.5).to(dtype),
        ),
        torch.arange(3, 3 + requests),
    )


def to(device: str, codebooks: Codebooks, lattice: Lattice, anchors: Tensor) -> tuple[Codebooks, Lattice, Tensor]:
    """With blocks of tokens in a wider buffer, which begin with the anchors."""
    steps = lattice.candidates.shape[1]
    tokens = torch.full((len(anchors), steps + 5), -7, dtype=torch.int64, device=device)
    tokens[:, 0] = anchors
    return (
        Codebooks(*(x if x is None else x.to(device) for x in codebooks)),
        Lattice(*(x.to(device) for x in lattice)),
        tokens[:, : steps + 1],
    )


@pytest.mark.parametrize(
    ("rank", "width", "steps", "form"),
    [
        (12, 5, 4, ""), (12, 5, 15, ""), (256, 16, 7, ""), (300, 3, 4, ""), (300, 3, 15, ""), (1, 1, 7, ""),
        (16, 32, 4, ""), (256, 16, 15, "bfloat16"), (12, 5, 7, "gated"), (256, 16, 7, "gated"),
        (300, 3, 7, "gated"), (1, 2, 7, "gated"), (12, 5, 4, "rows alone"), (256, 16, 4, "rows alone"),
        (300, 3, 4, "rows alone"),
    ],
)  # fmt: skip
def test_the_likeliest_walk_equals_the_loop(twin, device, rank, width, steps, form):
    """Edges of both tokens and the row; gated, by a part of a wider matrix; or of the row and the next token."""
    inputs = walk_inputs(rank, width, steps, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
    codebooks, lattice, anchors = inputs
    gate = None
    if form == "gated":
        wide = torch.randn(rank, rank + 8, generator=torch.Generator().manual_seed(9)) * rank**-0.5
        gate, codebooks = wide[:, 8:], codebooks._replace(gate=wide.to(device)[:, 8:])
    predecessor, successor = codebooks[:2]
    if form == "rows alone":
        predecessor, codebooks = torch.ones_like(predecessor), codebooks._replace(predecessor=None)
    expected, probs = walk_loop(predecessor, successor, *lattice, anchors, gate=gate)
    on_device = to(device, codebooks, lattice, anchors)
    logprobs = torch.full((len(anchors), steps), -7.0, device=device)
    assert getattr(walk_kernels, f"selector_walk_{twin}")(*on_device, logprobs) is None
    tokens = on_device[-1]
    assert tokens[:, 1:].tolist() == expected and tokens[:, 0].tolist() == anchors.tolist()
    assert tokens._base is not None and bool((tokens._base[:, steps + 1 :] == -7).all())
    torch.testing.assert_close(logprobs.exp().cpu(), torch.tensor(probs).amax(-1), rtol=1e-4, atol=1e-6)
    if width > 4:
        assert expected != lattice.candidates.gather(2, lattice.logits.argmax(-1)[..., None])[..., 0].tolist(), (
            "edges decide, not the logits alone"
        )


@pytest.mark.parametrize(
    ("rank", "width", "dtype"), [(12, 5, torch.float32), (256, 16, torch.float32), (256, 16, torch.bfloat16)]
)
def test_a_drawn_walk_keeps_the_probabilities_of_the_steps_it_took(twin, device, rank, width, dtype):
    inputs = walk_inputs(rank, width, 7, dtype=dtype)
    codebooks, lattice, anchors = inputs
    generator = torch.Generator().manual_seed(4)
    noise = torch.empty(3, 7, width).exponential_(generator=generator)
    draw = Draw(torch.tensor([0.7, 1.3, 1.0]), torch.tensor([False, False, True]), noise)
    on_device = to(device, *inputs)
    draw_on_device = Draw(*(x.to(device) for x in draw))
    found = getattr(walk_kernels, f"selector_walk_{twin}")(*on_device, draw=draw_on_device).cpu()
    walked = on_device[-1][:, 1:].cpu()

    def race(request: int, step: int, probs: list[float]) -> int:
        raced = (torch.tensor(probs) / noise[request, step]).tolist()
        return raced.index(max(raced))

    for request, temperature in enumerate((0.7, 1.3)):
        tokens, probs = walk_loop(*codebooks[:2], *lattice, anchors, temperature, race)
        assert walked[request].tolist() == tokens[request]
        torch.testing.assert_close(found[request], torch.tensor(probs[request]), rtol=1e-4, atol=1e-5)
    greedy, _ = walk_loop(*codebooks[:2], *lattice, anchors)
    assert walked[2].tolist() == greedy[2]
    assert torch.equal(found[2], (lattice.candidates[2] == walked[2][:, None]).float())


def test_equal_scores_take_the_first_candidate_and_what_is_no_number_stays_in_bounds(twin, device):
    codebooks, lattice, anchors = walk_inputs(8, 5, 3)
    codebooks.predecessor.zero_()
    lattice.logits.fill_(2.0)
    lattice.logits[1] = float("nan")
    on_device = to(device, codebooks, lattice, anchors)
    getattr(walk_kernels, f"selector_walk_{twin}")(*on_device)
    walked = on_device[-1][:, 1:].tolist()
    assert walked[0] == lattice.candidates[0, :, 0].tolist()
    assert all(token in ids for token, ids in zip(walked[1], lattice.candidates[1].tolist(), strict=True))
