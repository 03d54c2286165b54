"""Rejection sampling of a step's proposals in a few launches.

The definition is `verify.rejection.sample_with`. The launches:

1. one pass over all rows: maxima, normalisers and what filters ask of each proposal (`sampled_rows`);
2. a coin for every proposal, and the rows on which a filter's exact cut decides (`sampled_rows`);
3. with a top-k, a top-p or a min-p, `PASSES` launches that find those cuts (`sampled_cuts`); a launch whose rows
   are done returns at once;
4. the residual distribution of the one row per request that draws, and the draw (`sampled_draw`).

Nothing is copied to the host, no shape depends on data, and all that lives between the launches is in a
`Workspace`, so that a CUDA graph can capture them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.sampled.cuts import cut_kernel
from dflash_sglang.kernels.sampled.draw import pick_kernel, residual_kernel
from dflash_sglang.kernels.sampled.rows import FIELDS, chunk_stats_kernel, verdict_kernel

CHUNK = 8192  # tokens of one program; of half as many in the pass over all rows, which is bound by memory
WAYS = 16  # parts that one launch splits a bracket into
PASSES = 6  # WAYS ** PASSES parts of at most some 35 nats: the rounding of float32 logits


class SampledRows(NamedTuple):
    """A step's verified rows and what was proposed to them."""

    logits: Tensor  # [rows, vocab] of any float dtype, a row contiguous: bs * block rows, or the ragged ones
    tokens: Tensor  # [bs, block] int64, last committed token + proposals
    candidates: Tensor  # [bs, block - 1, K] int64, distinct ids that each proposal was drawn from
    probs: Tensor  # [bs, block - 1, K] float32, their probabilities
    ragged: Ragged | None = None  # where requests have other numbers of rows, at most a block of them each

    def part(self, requests: slice, rows: slice) -> SampledRows:
        """Of some of the requests, whose rows are among these: all rows, where they are ragged."""
        logits, tokens, candidates, probs, ragged = self
        if ragged is not None:
            ragged = ragged._replace(starts=ragged.starts[requests], lens=ragged.lens[requests])
        return SampledRows(logits[rows], tokens[requests], candidates[requests], probs[requests], ragged)


class RowFilters(NamedTuple):
    """The sampling filters of R rows. Every filter keeps a prefix of the tokens sorted by probability."""

    temperatures: Tensor  # [R] float32
    top_ks: Tensor  # [R] integers, one: greedy
    top_ps: Tensor  # [R] float32
    min_ps: Tensor  # [R] float32
    top_k: bool  # whether any row has one, as the next two
    top_p: bool
    min_p: bool
    renormalised: bool  # top-p is of what top-k leaves (SGLang's kernels beside a min-p), else of the whole

    @property
    def any(self) -> bool:
        return self.top_k or self.top_p or self.min_p


class Workspace:
    """What the launches hand on, for up to `max_requests`, and what random numbers come from: a Philox key and the
    number of steps drawn. The key is torch's initial seed: a server's --random-seed gives its output again.
    """

    def __init__(self, max_requests: int, block_size: int, vocab_size: int, device: str, chunk: int = CHUNK):
        rows = max_requests * block_size
        self.block_size, self.vocab_size = block_size, vocab_size
        self.chunk = min(chunk, triton.next_power_of_2(vocab_size))
        self.chunks = triton.cdiv(vocab_size, self.chunk)
        self.stats_chunk = self.chunk // 2
        self.stats_chunks = triton.cdiv(vocab_size, self.stats_chunk)
        self.lanes = dict(CHUNK=self.chunk, CHUNK_LANES=triton.next_power_of_2(self.chunks))
        self.stats_lanes = triton.next_power_of_2(self.stats_chunks)
        self.block_lanes = triton.next_power_of_2(block_size + 1)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        masses = [floats(rows, self.stats_chunks) for _ in range(4)]
        ids, counts = (integers(rows, self.stats_chunks) for _ in range(2))
        best, total, above, reached = masses
        self.chunk_stats = (best, ids, total, above, reached, counts)
        # largest logit, normaliser, argmax, proposal's logit and probability
        self.rows = (floats(rows), floats(rows), integers(rows), floats(rows), floats(rows))
        self.uniforms = floats(max_requests, block_size + 1)  # a coin for every proposal, two for the draw
        self.stop, self.searches = integers(max_requests), integers(max_requests)
        self.searched = integers(max_requests, block_size)
        self.cuts = [
            (floats(rows, FIELDS.value), floats(rows, 2, WAYS), floats(rows, self.chunks, 3, WAYS))
            for _ in range(2)  # launches read one and write the other
        ]
        self.likely = floats(rows, self.chunks)
        self.drawing = (integers(max_requests), floats(max_requests), floats(max_requests))  # row, cut, mass
        self.left = (floats(max_requests, self.chunks), floats(max_requests, self.chunks))
        seed = torch.initial_seed() % (1 << 63)
        self.rng = torch.tensor([seed, 0], dtype=torch.int64, device=device)

    def forget_steps(self) -> None:
        """The next step draws what the first one drew."""
        self.rng[1] = 0


def target_tokens_triton(rows: SampledRows, filters: RowFilters, work: Workspace, out: Tensor) -> None:
    """Write `out` [rows] int64, contiguous: a request's accepted proposals, the target's own token, then zeros.

    A request's last row has nothing proposed to it, whatever the block goes on with. What lives between the
    launches has room for whole blocks, ragged or not.
    Raises ValueError where the workspace is for other or fewer rows.
    """
    logits, tokens, candidates, probs, ragged = rows
    bs, block = tokens.shape
    vocab = logits.shape[1]
    if vocab != work.vocab_size or block > work.block_size or bs > work.stop.shape[0]:
        raise ValueError(
            f"a workspace for {work.stop.shape[0]} x {work.block_size} rows of {work.vocab_size} logits "
            f"cannot take {bs} x {block} rows of {vocab}"
        )
    temperatures, top_ks, top_ps, min_ps = filters[:4]
    renormalised = filters.renormalised and filters.top_k and filters.top_p
    proposed = (
        vocab, logits.stride(0), tokens.stride(0), candidates.stride(0), candidates.stride(1),
        probs.stride(0), probs.stride(1),
    )  # fmt: skip
    # Read where they are ragged alone; one compilation serves both.
    spans = (work.stop, work.stop) if ragged is None else (ragged.starts, ragged.lens)
    by_width = dict(block=block, ragged=int(ragged is not None))
    width = candidates.shape[2]
    base, total, best, logit, prob = work.rows

    chunk_stats_kernel[(bs * block, work.stats_chunks)](
        logits, tokens, *spans, temperatures, *work.chunk_stats, vocab, logits.stride(0), tokens.stride(0),
        work.stats_chunks, **by_width, CHUNK=work.stats_chunk, FILTERED=filters.any, num_warps=8,
    )  # fmt: skip
    old, new = work.cuts
    verdict_kernel[(bs,)](
        logits, tokens, candidates, probs, *spans, work.rng, temperatures, top_ks, top_ps, min_ps,
        *work.chunk_stats, *work.rows, work.uniforms, work.stop, work.searches, work.searched, old[0],
        *proposed, work.stats_chunks, **by_width, WIDTH=width, WIDTH_LANES=triton.next_power_of_2(width),
        LANES=work.block_lanes, CHUNK_LANES=work.stats_lanes, FILTERED=filters.any,
        RENORMALISED=renormalised,
    )  # fmt: skip
    passes = PASSES if filters.top_k or filters.top_p else int(filters.min_p)  # min-p alone needs no bisection
    for i in range(passes + renormalised):  # top-p of what top-k leaves is one launch behind top-k
        cut_kernel[(bs, work.chunks)](
            logits, *spans, temperatures, top_ks, top_ps, min_ps, base, total, work.searches, work.searched,
            *old, *new, work.likely, vocab, logits.stride(0), work.chunks,
            **by_width, WAYS=WAYS, **work.lanes, RENORMALISED=renormalised, FIRST=i == 0, num_warps=8,
        )  # fmt: skip
        old, new = new, old
    residual_kernel[(bs, work.chunks)](
        logits, tokens, candidates, probs, *spans, temperatures, top_ks, top_ps, min_ps, base, total, logit, prob,
        work.uniforms, work.stop, work.searches, work.searched, *old, work.likely, *work.drawing, *work.left,
        *proposed, work.chunks, **by_width, WIDTH=width, WAYS=WAYS, **work.lanes, FILTERED=filters.any,
        RENORMALISED=renormalised, num_warps=8,
    )  # fmt: skip
    pick_kernel[(bs,)](
        logits, tokens, candidates, probs, *spans, temperatures, top_ks, min_ps, base, best, work.uniforms,
        *work.drawing, *work.left, work.rng, out,
        *proposed, work.chunks, **by_width, WIDTH=width, LANES=work.block_lanes, **work.lanes,
        FILTERED=filters.any, num_warps=8,
    )  # fmt: skip
