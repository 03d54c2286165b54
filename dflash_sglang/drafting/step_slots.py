"""Where a step writes what it commits, and where the next step starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from dflash_sglang.kernels.block.accept import Outcomes, Relay
from dflash_sglang.sglang_names.scheduler import FutureRelayBuffers, offer_future_relay_buffers

# Overlap scheduling copies an outcome to the host while the next step runs, and waits before the one after.
_PLACES = 4
_NOBODYS = _PLACES  # where a rank without requests writes
TREE_ROWS = 128  # of a step's trees together, at most: with more rows a step takes longer than a tree is worth


class Accepted(NamedTuple):
    """What verified blocks commit. The committed tokens of request b are `target_ids[b, :commit_lens[b]]`."""

    target_ids: torch.Tensor  # [bs, block]
    commit_lens: torch.Tensor  # [bs] int32, accepted proposals + 1
    bonus_tokens: torch.Tensor  # [bs] int64, the last committed token
    new_seq_lens: torch.Tensor  # [bs] int64, prefix + commit
    # [n] int64, for one copy to the host: `commit_lens`, from `start` on `target_ids`, then room for what else the
    # host asks of a step: of each request, as many float32 as a block and a tree have rows, and one more.
    packed: torch.Tensor
    start: int


class StepSlots:
    """The state that steps hand on, in buffers that keep their place, so that captured graphs find it.

    Drafting takes the next place and writes it to `current`. The accept reads `current`, and writes the outcome to
    this place and to the relay. The next step starts from the relay. Under overlap scheduling it is SGLang's
    relay: lengths and tokens are there when SGLang publishes and stashes them.
    """

    def __init__(
        self, max_requests: int, block_size: int, device: str, chains: Mapping[int, int] | None = None
    ) -> None:
        """max_requests: rows of req_to_token, or more; block_size: of the widest blocks that are verified; chains:
        {rows: the most requests of a step} of longer chains."""
        self.max_requests, self.block_size, self.device = max_requests, block_size, device
        chains = {block_size: max_requests, **(chains or {})}
        self.longest = max(chains)  # tokens that a step can commit of a request

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros((_PLACES + 1, width), dtype=torch.int64, device=device)

        self._lens = lens = (max_requests + 1) // 2  # int64 that hold so many int32
        ids = max(rows * requests for rows, requests in chains.items())
        more = (max_requests * (block_size + 1) + TREE_ROWS + 1) // 2
        self._packed = buffer(lens + ids + more)
        self.outcomes = Outcomes(
            self._packed[:, lens : lens + ids],
            self._packed.view(torch.int32)[:, :max_requests],
            buffer(max_requests),
            buffer(max_requests),
        )
        self.current = torch.tensor([_NOBODYS], device=device)  # place of the step that runs
        self._place = 0
        self._views = lru_cache(64)(self._outcome)  # most steps are like the last
        self._future_relay = FutureRelayBuffers(req_pool_size=max_requests, device=device)
        self.fit(max_requests)

    def fit(self, rows: int) -> None:
        """Cut the relay to the rows of req_to_token: SGLang takes a relay of that size only. Takes no memory.

        Raises ValueError for more rows than `max_requests`.
        """
        relay = self._future_relay
        if rows > len(relay.new_seq_lens):
            raise ValueError(
                f"req_to_token: found {rows} rows, expected at most {len(relay.new_seq_lens)}, one rank's part of "
                "--max-running-requests and one more. Raise it."
            )
        relay.new_seq_lens, relay.output_tokens = relay.new_seq_lens[:rows], relay.output_tokens[:rows]
        self.relay = Relay(relay.new_seq_lens, relay.output_tokens)
        offer_future_relay_buffers(relay)

    def next(self) -> int:
        """Take the place of a step with requests; `current` needs it before anything is accepted."""
        self._place = (self._place + 1) % _PLACES
        return self._place

    def pass_over(self) -> None:
        """A step without requests: its graph accepts padding, and the outcomes of others stay."""
        self.current[0] = _NOBODYS

    def start(self, requests: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """The next step of requests [bs], rows of req_to_token, starts from these tokens and lengths [bs]."""
        self.relay.new_seq_lens[requests] = seq_lens
        self.relay.bonus_tokens[requests] = last_tokens
        self._note_relayed(last_tokens, seq_lens)

    def outcome(self, bs: int, width: int) -> Accepted:
        """What this step's accept commits of bs blocks of this width; valid for three steps more."""
        accepted = self._views(self._place, bs, width)
        self._note_relayed(accepted.bonus_tokens, accepted.new_seq_lens)
        return accepted

    def _outcome(self, place: int, bs: int, width: int) -> Accepted:
        ids, commit_lens, bonus_tokens, new_seq_lens = (buffer[place] for buffer in self.outcomes)
        target_ids = ids[: bs * width].view(bs, width)
        packed = self._packed[place], self._lens
        return Accepted(target_ids, commit_lens[:bs], bonus_tokens[:bs], new_seq_lens[:bs], *packed)

    def _note_relayed(self, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Spares SGLang's writes of these tensors."""
        if self._future_relay.adopted:
            self._future_relay.published_seq_lens = seq_lens
            self._future_relay.published_bonus = last_tokens
