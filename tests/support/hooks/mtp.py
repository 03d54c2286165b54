"""What multi-token-prediction layers propose, and what they read."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.support.scheduler_hooks import note, recorded
from tests.support.seam import around


def mtp() -> None:
    """The layers choose the recorded continuation, with a wrong token at a place that is drawn, or nowhere.

    Of every block, the rid, the prefix length, the likeliest token of each layer and the chosen ones go to
    mtp.jsonl.
    """
    generator = random.Random(0)

    def with_place(init: Any, self: Any, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        # Of each row of a batch, what the layers are to propose; -1: as they like. Graphs read it.
        self.told = torch.full_like(self._tokens, -1)

    def noting(propose: Any, self: Any, batch: Any, block: Any) -> Any:
        proposed, rows = block.size - 1, []
        for req, prefix in zip(batch.reqs, block.prefix_lens.tolist(), strict=True):
            prompt = list(req.origin_input_ids)
            start, wrong = prefix + 1 - len(prompt), generator.randint(0, proposed)
            following = recorded(prompt)[start : start + proposed]
            following[wrong : wrong + 1] = [(token + 1) % 250 for token in following[wrong : wrong + 1]]
            rows.append(following + [-1] * (self.told.shape[1] - len(following)))
        self.told[: len(rows)] = torch.tensor(rows)
        proposals = propose(self, batch, block)
        for row, (req, prefix) in enumerate(zip(batch.reqs, block.prefix_lens.tolist(), strict=True)):
            likeliest = self._ids[row, :proposed, 0].tolist()
            note("mtp.jsonl", [req.rid, prefix, likeliest, proposals.tokens[row, 1:].tolist()])
        return proposals

    def chosen(choose: Any, self: Any, i: int, candidates: Any) -> torch.Tensor:
        tokens = choose(self, i, candidates)
        told = self.told[: len(tokens), i]
        tokens = torch.where(told >= 0, told, tokens)
        self._tokens[: len(tokens), i] = tokens
        return tokens

    around("mtp", with_place)
    around("mtp proposals", noting)
    around("mtp choice", chosen)


def freed() -> None:
    """Rows of freed sliding slots, all of them slot 0, outweigh all others that a layer of the draft sees."""

    def outweighed(forward: Any, self: Any, *args: Any) -> None:
        pool = self._runner.token_to_kv_pool.swa_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[0] = 50.0
        forward(self, *args)

    around("mtp layer", outweighed)
