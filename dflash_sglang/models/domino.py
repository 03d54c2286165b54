"""Domino's head: corrects each proposal after the first by the tokens before it, which a GRU has read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_sglang.checkpoint.family_specs import DominoSpec
from dflash_sglang.kernels.head.selector_walk import Draw, Lattice
from dflash_sglang.models.edges import CANDIDATES, walk_with_state


class PrefixGRU(nn.Module):
    """Weights of one GRU layer without biases, by torch's names: [3 * state, hidden] and [3 * state, state].
    Rows are those of the reset, the update and the new gate, in this order."""

    def __init__(self, hidden_size: int, state_size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_size, hidden_size), requires_grad=False)
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_size, state_size), requires_grad=False)


def embed_proj(spec: DominoSpec, hidden_size: int, vocab_size: int) -> nn.Sequential:
    """[row; state] -> a vector per token, by the names of the checkpoint."""
    return nn.Sequential(
        nn.Linear(hidden_size + spec.state_size, spec.rank, bias=False),
        nn.SiLU(),
        nn.Linear(spec.rank, vocab_size, bias=False),
    ).requires_grad_(False)


class DominoEdges:
    """Scores token y of step s > 0, for the row h_s and the GRU's state g_s after the anchor and s more tokens,

        logit[s, y] + embed_proj[2].weight[y] . silu(embed_proj[0] [h_s; g_s])

    among the likeliest tokens of the row. Step 0 has its logits only. The GRU reads the tokens as the draft embeds
    them: where ranks share the table, each step is a collective over them. No module: its weights are the draft's,
    by the names of the checkpoint, and whole on every rank of a tensor-parallel group.
    """

    def __init__(self, gru: PrefixGRU, proj: nn.Sequential, embed: Callable[[Tensor], Tensor]) -> None:
        """embed: ids [bs] -> [bs, hidden], in the dtype of the weights."""
        self._gru, self._embed = gru, embed
        self._in, self._out = proj[0].weight, proj[2].weight
        self.candidates = min(CANDIDATES, len(self._out))

    @property
    def projection(self) -> tuple[int, torch.dtype]:
        return self._out.shape[1], self._out.dtype

    def project(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] -> [N, rank]: their part of `embed_proj[0]`."""
        return functional.linear(rows, self._in[:, : rows.shape[1]])

    def walk(
        self, lattice: Lattice, tokens: Tensor, logprobs: Tensor | None = None, draw: Draw | None = None
    ) -> Tensor | None:
        weight = self._gru.weight_hh_l0
        state = weight.new_zeros((len(tokens), weight.shape[1]))
        return walk_with_state(self._out, self._advance, state, lattice, tokens, logprobs, draw)

    def _advance(self, step: int, row: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gru = self._gru
        state = torch.gru_cell(self._embed(before), state, gru.weight_ih_l0, gru.weight_hh_l0)
        if step == 0:
            return torch.zeros(row.shape, dtype=row.dtype, device=row.device), state
        return functional.silu(row + functional.linear(state, self._in[:, -state.shape[1] :])), state
