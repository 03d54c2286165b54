"""Proposals that are copied from a request's own text."""

from __future__ import annotations

import random
from typing import Any

import torch

from dflash_sglang.kernels.block import find_copy
from dflash_sglang.sglang_names.scheduler import get_parallel
from tests.support.scheduler_hooks import note, recorded
from tests.support.seam import around, decide_every_step


def copies(always: bool = False) -> None:
    """With copy: block: whether a match of any length is copied is drawn, but for one that cannot come true.

    Steps check that the tokens of slots are those of the requests. A rank's blocks with their copies go to
    copies.RANK.jsonl.
    """
    generator = torch.Generator().manual_seed(0)
    of_worker: list[Any] = []
    file = f"copies.{get_parallel().tp_rank}.jsonl"

    def worth(right: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        return (torch.rand(right.shape, generator=generator) < 0.5) & (right > 0) | always

    def then_look(step: Any, self: Any, batch: Any, *args: Any) -> Any:
        of_worker[:] = [self._copies]
        return step(self, batch, *args)

    def after_look(propose: Any, self: Any, batch: Any, block: Any) -> Any:
        for req, row, prefix in zip(batch.reqs, block.requests.tolist(), block.prefix_lens.tolist(), strict=True):
            known = [*req.origin_input_ids, *req.output_ids][:prefix]  # overlap scheduling knows less than a step
            slots = of_worker[0]._tables.req_to_token[row, : len(known)].long()
            held = of_worker[0].history[slots].tolist()
            assert not req.rid or held == known, (req.rid, held, known)
        return propose(self, batch, block)

    def and_tell(copy: Any, self: Any, batch: Any, block: Any, proposals: Any) -> Any:
        proposals = copy(self, batch, block, proposals)
        note(file, proposals.tokens.tolist())
        return proposals

    find_copy.LEAST, find_copy.worth_copying = 1, worth
    around("step", then_look)
    around("proposals", after_look)
    around("copies", and_tell)


def always_copies() -> None:
    """As `copies`, but every match is copied."""
    copies(always=True)


def chains(always: bool = False) -> None:
    """With copy: 64: whether a step verifies more rows than a block is drawn.

    Behind the block stand the oracle's tokens, as far as it knows some, one of them wrong or none.
    """
    choices, draws = random.Random(4), random.Random(5)  # of the rank that decides, and of all
    batches: list[Any] = [None]

    def then_step(step: Any, self: Any, batch: Any, *args: Any) -> Any:
        batches[0] = batch
        return step(self, batch, *args)

    def with_oracle(extend: Any, self: Any, block: Any, proposals: Any, length: int) -> Any:
        chains = extend(self, block, proposals, length)
        ids, slots = (of.view(block.batch_size, -1) for of in (chains.ids, chains.slots))
        for row, (req, prefix) in enumerate(zip(batches[0].reqs, block.prefix_lens.tolist(), strict=True)):
            prompt = list(req.origin_input_ids)
            if output := recorded(prompt, req.rid):
                start = prefix + 1 - len(prompt)
                known = output[start + block.size - 1 : start + ids.shape[1] - 1]
                if draws.random() < 0.5 and known:
                    known[draws.randrange(len(known))] = 7
                there = slice(block.size, block.size + len(known))
                ids[row, there] = torch.tensor(known, dtype=ids.dtype)
                self.history[slots[row, there]] = ids[row, there].int()
        return chains

    decide_every_step()
    around("chains pay", lambda *_: always or choices.random() < 0.5)
    around("step", then_step)
    around("chain", with_oracle)


def always_chains() -> None:
    """As `chains`, but steps verify more rows wherever they can."""
    chains(always=True)
