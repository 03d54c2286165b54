"""What verified blocks commit: kept where the next step, the host and SGLang's relay find it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dflash_sglang.kernels.block.accept import COIN_BITS, Outcomes, Ragged, Relay, Verification, accept
from dflash_sglang.kernels.block.prepare_block import Turn
from dflash_sglang.settings.plugin_config import Profile
from dflash_sglang.sglang_names.scheduler import FutureRelayBuffers, async_h2d, offer_future_relay_buffers
from dflash_sglang.verify.simulate import forced_acceptance

# Overlap scheduling copies an outcome to the host while the next step runs, and waits before the one after.
_PLACES = 4
_COIN_SEED = 0  # the same on all ranks
_NOBODYS = _PLACES  # where a rank without requests writes


class Accepted(NamedTuple):
    """What verified blocks commit. The committed tokens of request b are `target_ids[b, :commit_lens[b]]`."""

    target_ids: torch.Tensor  # [bs, block]
    commit_lens: torch.Tensor  # [bs] int32, accepted proposals + 1
    bonus_tokens: torch.Tensor  # [bs] int64, the last committed token
    new_seq_lens: torch.Tensor  # [bs] int64, prefix + commit
    packed: torch.Tensor  # [n] int64, for one copy to the host: begins with `commit_lens`, ends with `target_ids`


class Acceptor:
    """Accepts blocks into buffers that keep their place, so that a captured graph can.

    Beside the outcome, lengths and last tokens go to the relay, from which the next step starts. It is SGLang's
    relay under overlap scheduling: they are there when SGLang publishes and stashes them.
    """

    def __init__(
        self,
        max_requests: int,
        block_size: int,
        device: str,
        simulated_acceptance: Sequence[Profile] | None = None,
    ) -> None:
        """max_requests: rows of req_to_token, or more; block_size: of the widest blocks that are verified."""
        self.block_size = block_size
        self._forced = forced_acceptance(block_size, simulated_acceptance, device)
        self._forced_logprobs = None if self._forced is None else self._forced.logprobs()

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros((_PLACES + 1, width), dtype=torch.int64, device=device)

        lens = (max_requests + 1) // 2  # int64 that hold so many int32
        self._packed = buffer(lens + max_requests * block_size)
        self._outcomes = Outcomes(
            self._packed[:, lens:],
            self._packed.view(torch.int32)[:, :max_requests],
            buffer(max_requests),
            buffer(max_requests),
        )
        self.step = torch.tensor([_NOBODYS, 0], device=device)
        self._most = torch.full((max_requests,), block_size, dtype=torch.int32, device=device)
        self._most_on_host = np.full(max_requests, block_size)
        self._turn = Turn(0, 0)
        self._coins = random.Random(_COIN_SEED)
        self._future_relay = FutureRelayBuffers(req_pool_size=max_requests, device=device)
        self.fit(max_requests)

    def fit(self, rows: int) -> None:
        """req_to_token has so many rows, at most those that this was made for. SGLang takes a relay of that size
        alone. Takes no memory. Raises ValueError for more rows."""
        relay = self._future_relay
        if rows > len(relay.new_seq_lens):
            raise ValueError(
                f"req_to_token: found {rows} rows, expected at most {len(relay.new_seq_lens)}, one rank's part of "
                "--max-running-requests and one more. Raise it."
            )
        relay.new_seq_lens, relay.output_tokens = relay.new_seq_lens[:rows], relay.output_tokens[:rows]
        self.relay = Relay(relay.new_seq_lens, relay.output_tokens)
        offer_future_relay_buffers(relay)

    def next_turn(self) -> Turn:
        """Of a step with requests; `step` gets it on the device, before anything is accepted."""
        self._turn = Turn((self._turn.place + 1) % _PLACES, self._coins.getrandbits(COIN_BITS))
        return self._turn

    def pass_turn(self) -> None:
        """A step without requests, whose graph accepts padding: the outcomes of others stay."""
        self.step[0] = _NOBODYS

    def start(self, requests: torch.Tensor, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """The next step of requests [bs], rows of req_to_token, starts from these tokens and lengths [bs]."""
        self.relay.new_seq_lens[requests] = seq_lens
        self.relay.bonus_tokens[requests] = last_tokens
        self._note_relayed(last_tokens, seq_lens)

    def _note_relayed(self, last_tokens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Spares SGLang's writes of these tensors."""
        if self._future_relay.adopted:
            self._future_relay.published_seq_lens = seq_lens
            self._future_relay.published_bonus = last_tokens

    def forget_steps(self) -> None:
        """Steps draw coins from the first on, as if there had been none."""
        self._coins.seed(_COIN_SEED)
        self.pass_turn()

    def accept(
        self,
        tokens: torch.Tensor,  # [bs, block] last token + proposals
        target_ids: torch.Tensor,  # [bs, block] the target's token after each row
        prefix_lens: torch.Tensor,  # [bs]
        requests: torch.Tensor,  # [bs] rows of req_to_token
        ragged: Ragged | None = None,  # where the first two are [rows] of different numbers for each request
    ) -> None:
        """In one launch, capturable in a CUDA graph. See `kernels.block.accept`.

        A graph may be padded beyond the rows of req_to_token, where ranks that share a batch take parts of one
        size each; such requests are nobody's, and have no room among the outcomes.
        """
        most = len(self.relay.new_seq_lens)
        if len(requests) > most:
            prefix_lens, requests = prefix_lens[:most], requests[:most]
            if ragged is None:
                tokens, target_ids = tokens[:most], target_ids[:most]
            else:
                ragged = ragged._replace(lens=ragged.lens[:most])
        blocks = Verification(tokens, target_ids, prefix_lens, requests, self.step, self._most, ragged)
        accept(blocks, self._outcomes, self.relay, self._forced)

    def limit(self, requests: np.ndarray, most: np.ndarray) -> None:
        """From the next step on, no step commits more than most [n] tokens of the requests [n], rows of
        req_to_token. Launches nothing where that was so before."""
        other = self._most_on_host[requests] != most
        if other.any():
            requests, most = requests[other], most[other]
            self._most_on_host[requests] = most
            rows, values = async_h2d(
                [requests.tolist(), most.tolist()], dtype=torch.int64, device=self._most.device
            )
            self._most[rows] = values.int()

    def worth(self, logprobs: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """logprobs [bs, steps] of the proposals of requests [bs], rows of req_to_token: as they will be accepted
        where that is forced, and none beyond what a request's step may commit."""
        steps = logprobs.shape[1]
        if self._forced_logprobs is not None:
            logprobs = self._forced_logprobs[requests % len(self._forced_logprobs), :steps]
        if self._most_on_host.min() < self.block_size:
            lane = torch.arange(steps, device=logprobs.device)
            logprobs = logprobs.masked_fill(lane >= self._most[requests][:, None] - 1, float("-inf"))
        return logprobs

    def outcome(self, bs: int, width: int) -> Accepted:
        """What this turn's `accept` commits of bs blocks of this width; valid for three turns more."""
        place, n = self._turn.place, bs * width
        ids, *of_requests = (buffer[place] for buffer in self._outcomes)
        commit_lens, bonus_tokens, new_seq_lens = (buffer[:bs] for buffer in of_requests)
        self._note_relayed(bonus_tokens, new_seq_lens)
        packed = self._packed[place, : self._packed.shape[1] - len(ids) + n]
        return Accepted(ids[:n].view(bs, width), commit_lens, bonus_tokens, new_seq_lens, packed)
