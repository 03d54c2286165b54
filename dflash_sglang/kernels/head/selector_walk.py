"""A walk from the anchor through the candidates of a block, its edges scored by codebooks: Triton beside its torch
twin. DFlash2's selector and DSpark's Markov heads are such. `models/edges.py` walks step by step with it where a
state tells what the tokens before were."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

RANK_TILE = 256
GATE_TILE = 32  # columns of a gate that a program holds at once


class Codebooks(NamedTuple):
    """A vector per token of the vocabulary, as a predecessor and as a successor."""

    predecessor: torch.Tensor | None  # [vocab, rank]; None: of ones
    successor: torch.Tensor  # [vocab, rank]
    gate: torch.Tensor | None = None  # [rank, rank], columns contiguous; of the predecessor's vector


class Lattice(NamedTuple):
    """The candidates of every proposed position, and what their edges are scored from."""

    candidates: torch.Tensor  # [bs, steps, K] int64
    # [bs, steps, K] float32, of the candidates. What is added to all of a step changes no walk: logprobs will do.
    logits: torch.Tensor
    hidden: torch.Tensor  # [bs, steps, rank], the draft's rows as the codebooks' owner projects them


class Draw(NamedTuple):
    """How to draw a walk."""

    temperatures: torch.Tensor  # [bs] float32, positive
    greedy: torch.Tensor  # [bs] bool: requests that are to get the likeliest walk
    noise: torch.Tensor  # [bs, steps, K] float32, exponential, positive


def selector_walk(
    codebooks: Codebooks,
    lattice: Lattice,
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> torch.Tensor | None:
    """Write a walk through the steps to tokens [bs, steps + 1] int64, whose first are the anchors, the last
    committed tokens. Step s scores candidate c

        logits[s, c] + sum over r of predecessor[x, r] * row[s, r] * successor[candidates[s, c], r]

    where x is the token before, and row[s] is hidden[s], with a gate sigmoid(hidden[s] + gate predecessor[x]).
    Without `predecessor` hidden[s] stands for the product of both. It takes the highest score, the lowest index
    among equals; and writes to logprobs [bs, steps] float32, contiguous, if given, what it took has in the softmax
    of the scores.

    With `draw` it takes one from the softmax of the scores at the request's temperature. These probabilities [bs,
    steps, K] float32 are returned (of a greedy request: one, for what it took). A drawn walk has no logprobs: they
    would follow the values that were drawn. Scores are float32.
    """
    assert logprobs is None or draw is None
    launch = selector_walk_triton if lattice.logits.is_cuda else selector_walk_torch
    return launch(codebooks, lattice, tokens, logprobs, draw)


def selector_walk_torch(
    codebooks: Codebooks,
    lattice: Lattice,
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> torch.Tensor | None:
    """The definition of `selector_walk` in torch operations."""
    previous, probs = tokens[:, 0], []
    for step in range(lattice.candidates.shape[1]):
        candidates = lattice.candidates[:, step]
        context = lattice.hidden[:, step].float()
        if codebooks.predecessor is not None:
            before = codebooks.predecessor[previous].float()
            if codebooks.gate is not None:
                context = torch.sigmoid(context + before @ codebooks.gate.float().T)
            context = before * context
        edges = (codebooks.successor[candidates].float() * context[:, None]).sum(dim=-1)
        scores = lattice.logits[:, step] + edges
        index = scores.argmax(dim=-1, keepdim=True)
        if draw is not None:
            q = (scores / draw.temperatures[:, None]).softmax(dim=-1)
            drawn = (q / draw.noise[:, step]).argmax(dim=-1, keepdim=True)
            certain = torch.zeros_like(q).scatter_(1, index, 1.0)
            index = torch.where(draw.greedy[:, None], index, drawn)
            probs.append(torch.where(draw.greedy[:, None], certain, q))
        if logprobs is not None:
            logprobs[:, step] = scores.amax(dim=-1) - scores.logsumexp(dim=-1)
        previous = candidates.gather(1, index).squeeze(1)
        tokens[:, step + 1] = previous
    return None if draw is None else torch.stack(probs, dim=1)


def selector_walk_triton(
    codebooks: Codebooks,
    lattice: Lattice,
    tokens: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    draw: Draw | None = None,
) -> torch.Tensor | None:
    """`selector_walk` as one Triton launch, one program per request."""
    bs, steps, width = lattice.candidates.shape
    rank = codebooks.successor.shape[1]
    probs = None if draw is None else torch.empty_like(lattice.logits)
    unused = lattice.logits
    settings = (unused,) * 3 if draw is None else draw
    predecessor, successor, gate = codebooks
    _selector_walk_kernel[(bs,)](
        unused if predecessor is None else predecessor, successor, unused if gate is None else gate,
        *lattice, *settings, tokens,
        unused if logprobs is None else logprobs,
        unused if probs is None else probs, tokens.stride(0),
        0 if gate is None else gate.stride(0), steps,
        WIDTH=width, LANES=triton.next_power_of_2(width), RANK=rank,
        RANK_TILE=min(RANK_TILE, triton.next_power_of_2(rank)), SURE=logprobs is not None, DRAWN=draw is not None,
        PAIRED=predecessor is not None, GATED=gate is not None,
        GATE_TILE=min(GATE_TILE, triton.next_power_of_2(rank)),
        num_warps=4,
    )  # fmt: skip
    return probs


@triton.jit
def _selector_walk_kernel(
    predecessor_ptr, successor_ptr, gate_ptr, candidates_ptr, logits_ptr, hidden_ptr,
    temperatures_ptr, greedy_ptr, noise_ptr, tokens_ptr, logprobs_ptr, probs_ptr, token_stride, gate_stride, steps,
    WIDTH: tl.constexpr, LANES: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SURE: tl.constexpr,
    DRAWN: tl.constexpr, PAIRED: tl.constexpr, GATED: tl.constexpr, GATE_TILE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    live = lane < WIDTH
    own_tokens_ptr = tokens_ptr + request * token_stride
    previous = tl.load(own_tokens_ptr)
    for step in range(steps):
        row = request * steps + step
        candidates = tl.load(candidates_ptr + row * WIDTH + lane, mask=live, other=0)
        scores = tl.load(logits_ptr + row * WIDTH + lane, mask=live, other=float("-inf"))
        for start in tl.static_range(0, RANK, RANK_TILE):
            r = start + tl.arange(0, RANK_TILE)
            inside = r < RANK
            context = tl.load(hidden_ptr + row * RANK + r, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                for column in tl.static_range(0, RANK, GATE_TILE):
                    k = column + tl.arange(0, GATE_TILE)
                    before = tl.load(predecessor_ptr + previous * RANK + k, mask=k < RANK, other=0.0)
                    gate = tl.load(
                        gate_ptr + r[:, None] * gate_stride + k[None, :],
                        mask=inside[:, None] & (k < RANK)[None, :],
                        other=0.0,
                    )
                    context += tl.sum(gate.to(tl.float32) * before.to(tl.float32)[None, :], axis=1)
                context = tl.sigmoid(context)
            if PAIRED:
                context *= tl.load(predecessor_ptr + previous * RANK + r, mask=inside, other=0.0).to(tl.float32)
            successors = tl.load(
                successor_ptr + candidates[:, None] * RANK + r[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            scores += tl.sum(successors.to(tl.float32) * context[None, :], axis=1)
        best = tl.max(scores, axis=0)
        # No score equals the best where one is not a number: the last index stands in, it is in bounds.
        index = tl.minimum(tl.min(tl.where(scores == best, lane, LANES), axis=0), WIDTH - 1)
        if SURE:
            tl.store(logprobs_ptr + row, -tl.log(tl.sum(tl.exp(scores - best), axis=0)))
        if DRAWN:
            weights = tl.exp((scores - best) / tl.load(temperatures_ptr + request))
            weights = tl.where(live, weights, 0.0)
            q = weights / tl.sum(weights, axis=0)
            raced = q / tl.load(noise_ptr + row * WIDTH + lane, mask=live, other=1.0)
            first = tl.max(tl.where(live, raced, -1.0), axis=0)
            drawn = tl.minimum(tl.min(tl.where(live & (raced == first), lane, LANES), axis=0), WIDTH - 1)
            greedy = tl.load(greedy_ptr + request) != 0
            index = tl.where(greedy, index, drawn)
            q = tl.where(greedy, tl.where(lane == index, 1.0, 0.0), q)
            tl.store(probs_ptr + row * WIDTH + lane, q, mask=live)
        previous = tl.sum(tl.where(lane == index, candidates, 0), axis=0)
        tl.store(own_tokens_ptr + step + 1, previous)
