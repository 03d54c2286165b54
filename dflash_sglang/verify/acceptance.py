"""Accepts verified blocks, within what each request may commit."""

from __future__ import annotations

import numpy as np
import torch

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Paths, Ragged, Recorded, Verification, accept
from dflash_sglang.settings.plugin_config import SimulatedAcceptance
from dflash_sglang.sglang_names.scheduler import async_h2d
from dflash_sglang.verify.simulate import forced_acceptance
from dflash_sglang.verify.simulated_texts import SimulatedTexts


class Acceptor:
    """Accepts blocks into the slot of the step that runs. All its buffers keep their place, so that a captured
    graph can accept."""

    def __init__(self, slots: StepSlots, simulated_acceptance: SimulatedAcceptance | None = None) -> None:
        """simulated_acceptance: see `PluginConfig.simulated_acceptance`."""
        self.slots = slots
        self.block_size, rows, device = slots.block_size, slots.max_requests, slots.device
        forced = forced_acceptance(self.block_size, simulated_acceptance, rows, device)
        self.texts = forced if isinstance(forced, SimulatedTexts) else None  # what the target is said to write
        self._forced = None if isinstance(forced, SimulatedTexts) else forced
        if isinstance(self._forced, Recorded):
            slots.relay.new_seq_lens.zero_()  # `start` reads it, on every rank the same
        self._forced_logprobs = None if self._forced is None else self._forced.logprobs
        self._max_commit = torch.full((rows,), slots.longest, dtype=torch.int32, device=device)
        self._max_commit_on_host = np.full(rows, slots.longest)

    @property
    def knows_trees(self) -> bool:
        """Whether it is the target that accepts, or a record of candidates and which of them came true."""
        return self.texts is None and (self._forced is None or isinstance(self._forced, Recorded))

    def start(self, requests: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """As `StepSlots.start`. A recorded acceptance goes on for these requests where it stopped for those that
        had their rows of req_to_token before."""
        if isinstance(self._forced, Recorded):
            self._forced.restart(requests, self.slots.relay.new_seq_lens[requests], seq_lens)
        self.slots.start(requests, last_tokens, seq_lens)

    def accept(
        self,
        tokens: torch.Tensor,  # [bs, block] last token + proposals
        target_ids: torch.Tensor,  # [bs, block] the target's token after each row
        prefix_lens: torch.Tensor,  # [bs]
        requests: torch.Tensor,  # [bs] rows of req_to_token
        ragged: Ragged | None = None,  # where the first two are [rows] of different numbers for each request
        paths: Paths | None = None,  # where the first two are [bs, N] of trees
    ) -> None:
        """In one launch, capturable in a CUDA graph. See `kernels.block.accept`. A recorded acceptance tells what
        comes true of each node of a tree.

        A graph may be padded beyond the rows of req_to_token, where ranks that share a batch take shares of one
        size each. Such requests are nobody's, and have no room among the outcomes.
        """
        most = len(self.slots.relay.new_seq_lens)
        if len(requests) > most:
            prefix_lens, requests = prefix_lens[:most], requests[:most]
            if ragged is None:
                tokens, target_ids = tokens[:most], target_ids[:most]
            else:
                ragged = ragged._replace(lens=ragged.lens[:most])
        forced = self._forced
        if paths is not None and isinstance(forced, Recorded):
            target_ids, forced = forced.answers(requests, prefix_lens, paths.tree.depths), None
        if self.texts is not None:
            target_ids = self.texts.answers(tokens, prefix_lens, requests, ragged)
        blocks = Verification(
            tokens, target_ids, prefix_lens, requests, self.slots.current, self._max_commit, ragged
        )
        accept(blocks, self.slots.outcomes, self.slots.relay, forced, paths)

    def set_max_commit(self, requests: np.ndarray, max_commit: np.ndarray) -> None:
        """From the next step on, no step commits more than max_commit [n] tokens of the requests [n], rows of
        req_to_token. Launches nothing where that was so before."""
        other = self._max_commit_on_host[requests] != max_commit
        if other.any():
            requests, max_commit = requests[other], max_commit[other]
            self._max_commit_on_host[requests] = max_commit
            rows, values = async_h2d(
                [requests.tolist(), max_commit.tolist()], dtype=torch.int64, device=self._max_commit.device
            )
            self._max_commit[rows] = values.int()

    def clip_to_limits(self, proposals: Proposals, requests: torch.Tensor, prefix_lens: torch.Tensor) -> Proposals:
        """Proposals of requests [bs], rows of req_to_token, with logprobs as the accept will have it: no chance
        beyond what a request's step may commit. Where acceptance is forced, its probabilities. prefix_lens [bs]:
        tokens that the requests have committed."""
        logprobs, best = proposals.logprobs, proposals.best
        if logprobs is None:
            return proposals
        steps = logprobs.shape[1]
        if self._forced is not None and self._forced_logprobs is not None:
            logprobs = self._forced_logprobs[self._forced.cases(requests, prefix_lens), :steps]
            if best is not None and isinstance(self._forced, Recorded):
                best = self._forced.likeliest(requests, prefix_lens)
        if self._max_commit_on_host.min() < self.block_size:
            lane = torch.arange(steps, device=logprobs.device)
            beyond = lane >= self._max_commit[requests][:, None] - 1
            logprobs = logprobs.masked_fill(beyond, float("-inf"))
            if best is not None:
                best = best._replace(logprobs=best.logprobs.masked_fill(beyond[:, :, None], float("-inf")))
        return proposals._replace(logprobs=logprobs, best=best)
