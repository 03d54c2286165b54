"""DSpark drafts: the layers of a plain DFlash draft, and a Markov head that proposes from the anchor's row on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_sglang.checkpoint.families import DSPARK
from dflash_sglang.checkpoint.family_specs import GATED, RNN
from dflash_sglang.kernels.head.selector_walk import Codebooks, Draw, Lattice
from dflash_sglang.models.draft import DFlashDraftModel, under_its_names
from dflash_sglang.models.edges import CANDIDATES, CodebookEdges, walk_with_state
from dflash_sglang.models.layers import Quantisation


class MarkovHead(CodebookEdges):
    """Corrects each step's logits by the token before.

    With `markov_w1` and `markov_w2` [vocab, rank] token y after token x scores

        logit[s, y] + (markov_w1[x] * g) . markov_w2[y]

    among the likeliest tokens of row h_s. g is 1; of a gated head it is sigmoid(gate_proj [h_s; markov_w1[x]]).
    The matrices are whole on every rank of a tensor-parallel group. A head of a reduced vocabulary has a
    `markov_w2` [draft vocabulary, rank] in its checkpoint. Its rows are kept at the target's ids, which
    candidates have; other rows are not read.
    """

    def __init__(self, vocab_size: int, rank: int, gated_by: int | None, scored: int | None = None) -> None:
        """gated_by: hidden size of the rows; None without a gate. scored: rows of `markov_w2`, None: all."""
        super().__init__()
        self.candidates = min(CANDIDATES, vocab_size)
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, scored or vocab_size, bias=False)
        self.gate_proj = None if gated_by is None else nn.Linear(gated_by + rank, rank)
        self.requires_grad_(False)

    def spread(self, target_ids: Tensor) -> None:
        """Let a checkpoint's rows of `markov_w2` be those of target_ids [draft vocabulary] int64."""
        ids = target_ids.cpu()  # an update needs them when the device's memory may be released

        def load(weight: nn.Parameter, loaded: Tensor) -> None:
            weight.data[ids.to(weight.device)] = loaded.to(weight)

        weight: Any = self.markov_w2.weight
        weight.weight_loader = load

    @property
    def codebooks(self) -> Codebooks:
        w1, w2 = self.markov_w1.weight, self.markov_w2.weight
        gate = None if self.gate_proj is None else self.gate_proj.weight[:, -w1.shape[1] :]
        return Codebooks(w1, w2, gate)

    def project(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] -> [N, rank]: their part of the gate. Ones without: edges are the same at every row."""
        weight = self.markov_w2.weight
        if self.gate_proj is not None:
            return functional.linear(rows, self.gate_proj.weight[:, : -weight.shape[1]], self.gate_proj.bias)
        return torch.ones((len(rows), weight.shape[1]), dtype=weight.dtype, device=weight.device)


class RecurrentMarkovHead(MarkovHead):
    """Corrects each step's logits by all tokens of the block before: token y after token x scores

        logit[s, y] + tanh(o) . markov_w2[y],    [g; c; o] = joint_proj [state; markov_w1[x]; h_s]

    and the next state is sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c), at first zeros.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, scored: int | None = None) -> None:
        super().__init__(vocab_size, rank, gated_by=None, scored=scored)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank).requires_grad_(False)
        self.rank = rank

    @property
    def projection(self) -> tuple[int, torch.dtype]:
        return 3 * self.rank, self.joint_proj.weight.dtype

    def project(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] -> [N, 3 * rank]: their part of `joint_proj`, with its bias."""
        return functional.linear(rows, self.joint_proj.weight[:, 2 * self.rank :], self.joint_proj.bias)

    def walk(
        self, lattice: Lattice, tokens: Tensor, logprobs: Tensor | None = None, draw: Draw | None = None
    ) -> Tensor | None:
        weight = self.markov_w2.weight
        state = weight.new_zeros((len(tokens), self.rank))
        return walk_with_state(weight, self._advance, state, lattice, tokens, logprobs, draw)

    def _advance(self, step: int, row: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        del step
        inputs = torch.cat((state, self.markov_w1(before)), dim=-1)
        joint = row + functional.linear(inputs, self.joint_proj.weight[:, : 2 * self.rank])
        gate, candidate, output = joint.chunk(3, dim=-1)
        return torch.tanh(output), torch.tanh(candidate).lerp(state, torch.sigmoid(gate))


class DSparkDraftModel(DFlashDraftModel):
    """A DSpark draft. Its confidence head is left in the checkpoint: walks have logprobs."""

    def __init__(self, config: Any, quant_config: Quantisation = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        assert self.spec.dspark is not None  # of every architecture in EntryClass
        rank, kind, hidden = self.spec.dspark.rank, self.spec.dspark.kind, self.spec.hidden_size
        vocab_size = self.spec.vocab_size
        # Of a padded head, the matrix has as many rows; those of a reduced vocabulary are spread.
        scored = self.spec.vocabulary.draft_vocab_size if self.target_ids is None else None
        self.markov_head: MarkovHead | None = None
        if rank and kind == RNN:
            self.markov_head = RecurrentMarkovHead(vocab_size, rank, hidden, scored)
        elif rank:
            self.markov_head = MarkovHead(vocab_size, rank, hidden if kind == GATED else None, scored)
        if self.markov_head is not None and self.target_ids is not None:
            self.markov_head.spread(self.target_ids)

    @property
    def edges(self) -> MarkovHead | None:
        return self.markov_head


EntryClass = under_its_names(DSparkDraftModel, DSPARK)
