"""RecentRows: the target's hidden states and the tokens of the last positions of every request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dflash_sglang.sglang_names.scheduler import async_h2d

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


class Prompt(NamedTuple):
    """What the layers of a draft read of the tokens that a prefill adds."""

    hidden: Tensor  # [T, hidden] of the target
    tokens: Tensor  # [layers, T] int64: layer i, counted from 1, reads at position p the token p + i


class RecentRows:
    """The `ContextWriter` of multi-token-prediction layers.

    They read the target's hidden states as they are, and their own keys and values are made by their forwards over
    windows of `rows` positions. A row is at its position modulo `size`. A step writes every row that it verifies,
    accepted or not: `size` is such that a rejected one overwrites nothing that the next two windows read, and the
    next step overwrites it.

    A prefix that the cache had has no hidden states: windows start behind it.
    """

    def __init__(
        self, requests: int, rows: int, layers: int, hidden: int, dtype: torch.dtype, device: Any
    ) -> None:
        """requests: rows of req_to_token, or more; rows: of a window, and at most of a verified block; layers: of
        the draft, fewer."""
        self.rows, self.layers, self.size = rows, layers, 3 * rows
        self.hidden = torch.zeros((requests, self.size, hidden), dtype=dtype, device=device)
        self.ids = torch.zeros((requests, self.size), dtype=torch.int64, device=device)
        self.known_from = torch.zeros(requests, dtype=torch.int64, device=device)
        self.last = torch.zeros(requests, dtype=torch.int64, device=device)
        # 0: what layers propose goes to row 0 of req_to_token, which is nobody's. Captured forwards read this.
        self.proposing = torch.ones((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(rows, device=device)
        self._chunks: dict[int, tuple[str, int]] = {}  # prompts that are not whole yet: their request, and length
        self._run: Callable[[ScheduleBatch, KVLocPlan, Tensor, Prompt], None] | None = None

    @property
    def reason(self) -> str:
        """For the start-up line."""
        return f"the target's hidden states of the last {self.size} tokens"

    def bind(self, run: Callable[[ScheduleBatch, KVLocPlan, Tensor, Prompt], None]) -> None:
        """run: the draft's forward over a prefill, by its batch, slots, positions [T] and what the layers read."""
        self._run = run

    # ---- The step ----------------------------------------------------------------------------------------

    def window(self, requests: Tensor, ends: Tensor) -> Tensor:
        """The positions [bs, rows] of a forward, the last ones before `ends` [bs] int64; or more, where fewer are
        known. `last` then has the index of ends - 1."""
        start = torch.maximum(ends - self.rows, self.known_from[requests])
        self.last[requests] = ends - 1 - start
        return start[:, None] + self._offsets

    def set_tokens(self, requests: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """requests, positions, tokens [bs]: the last tokens, and those that a step proposes behind them."""
        self.ids[requests, positions % self.size] = tokens

    def set_proposed(self, requests: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """`set_tokens` of a layer's proposals, which the next layer reads; nothing where `proposing` is 0."""
        self.set_tokens(requests * self.proposing, positions, tokens)

    def tokens_of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """requests [bs], positions [bs, rows] -> [bs * rows] int64."""
        return self.ids[requests[:, None], positions % self.size].flatten()

    def hidden_of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """requests [bs], positions [bs, rows] -> the target's hidden states [bs * rows, hidden]."""
        return self.hidden[requests[:, None], positions % self.size].flatten(0, 1)

    # ---- ContextWriter -----------------------------------------------------------------------------------

    def write(self, features: Tensor, positions: Tensor, slots: Tensor, requests: Tensor) -> None:
        """Blocks have one width."""
        del slots
        of_rows = requests.repeat_interleave(len(positions) // len(requests)) if len(requests) else requests
        self.hidden[of_rows, positions % self.size] = features

    def write_planned(self, features: Tensor, positions: Tensor, plan: KVLocPlan) -> None:
        self.write(features, positions, positions, plan.req_pool_indices)

    def write_prefill(
        self, features: Tensor, positions: Tensor, plan: KVLocPlan, batch: ScheduleBatch, last_tokens: Tensor
    ) -> None:
        """Runs the layers over the new tokens. Where the prompt goes on, they read its own next tokens; behind its
        end, the first proposals' places hold the sampled token until a window has repaired them."""
        assert self._run is not None  # bound before anything is served
        device, ids = positions.device, batch.input_ids
        requests = batch.req_pool_indices.long()
        number = torch.arange(len(requests), device=device)
        lens = async_h2d(batch.extend_lens, dtype=torch.int64, device=device)
        ends, of_rows = lens.cumsum(0), number.repeat_interleave(lens, output_size=len(ids))
        known = async_h2d(self._next_tokens(batch), dtype=torch.int64, device=device)
        # Each request's new tokens and those behind them, one request after the other.
        text = ids.new_empty(len(ids) + len(requests) * self.layers)
        places = torch.arange(len(ids), device=device) + of_rows * self.layers
        ahead = torch.arange(self.layers, device=device)
        text[places] = ids
        text[(ends + number * self.layers)[:, None] + ahead] = torch.where(known < 0, last_tokens[:, None], known)
        latest = [
            place
            for end, new in zip(itertools.accumulate(batch.extend_lens), batch.extend_lens, strict=True)
            for place in range(end - min(new, self.size), end)
        ]
        kept = async_h2d(latest, dtype=torch.int64, device=device)
        at = requests[of_rows[kept]], positions[kept] % self.size
        self.hidden[at], self.ids[at] = features[kept], ids[kept]
        self._run(batch, plan, positions, Prompt(features, text[places + 1 + ahead[:, None]]))

    def _next_tokens(self, batch: ScheduleBatch) -> list[list[int]]:
        """The prompt's tokens behind the new ones [bs, layers], -1 where it ends. Notes where windows start."""
        known, starts = [], []
        rows = batch.req_pool_indices_cpu.tolist()
        for req, row, prefix, new in zip(batch.reqs, rows, batch.prefix_lens, batch.extend_lens, strict=True):
            end = prefix + new
            following = list(req.full_untruncated_fill_ids[end : end + self.layers])
            known.append(following + [-1] * (self.layers - len(following)))
            if self._chunks.pop(row, None) != (req.rid, prefix):
                starts.append((row, prefix))
            if following:
                self._chunks[row] = (req.rid, end)
        if starts:
            first_rows, firsts = async_h2d(starts, dtype=torch.int64, device=self.known_from.device).T
            self.known_from[first_rows] = firsts
        return known
