"""What the draft's block proposes."""

from __future__ import annotations

from typing import Any

import torch

from dflash_sglang.drafting.proposals import Proposals
from tests.support.scheduler_hooks import note, recorded
from tests.support.seam import around


def oracle() -> None:
    """Proposals are the recorded continuation of the prompt (`scheduler_hooks.record`), some tokens corrupted."""
    generator = torch.Generator().manual_seed(0)

    def with_oracle(propose: Any, self: Any, batch: Any, block: Any) -> Proposals:
        proposals = propose(self, batch, block)
        tokens, best, replaced = proposals.tokens, proposals.best, False
        best = best and best._replace(ids=best.ids.clone(), logprobs=best.logprobs.clone())
        for row, (req, prefix) in enumerate(zip(batch.reqs, block.prefix_lens.tolist(), strict=True)):
            prompt = list(req.origin_input_ids)
            output = recorded(prompt, req.rid)
            if not output:
                continue
            start = prefix + 1 - len(prompt)
            known = torch.tensor(output[start : start + block.size - 1])
            wrong = torch.rand(known.shape, generator=generator) < 0.15
            tokens[row, 1 : 1 + len(known)] = torch.where(wrong, (known + 1) % 250, known)
            if best is not None:  # where the likeliest is wrong, the next one is right
                ids, logprobs = (of[row, : len(known)] for of in best)
                order = torch.arange(ids.shape[1]).repeat(len(known), 1)
                order[wrong, :2] = torch.tensor([1, 0])
                ids[:] = (known[:, None] + order) % 250
                logprobs[:] = -(2 * torch.rand(ids.shape, generator=generator)).sort(dim=1).values
            replaced = True
        if not replaced:
            return proposals
        return Proposals.certain(tokens, logprobs=proposals.logprobs)._replace(best=best)

    around("proposals", with_oracle)


def proposals() -> None:
    """Every block's prefix length and proposals go to proposals.jsonl."""

    def noting(propose: Any, self: Any, batch: Any, block: Any) -> Any:
        proposals = propose(self, batch, block)
        note("proposals.jsonl", *zip(block.prefix_lens.tolist(), proposals.tokens.tolist(), strict=True))
        return proposals

    around("proposals", noting)
