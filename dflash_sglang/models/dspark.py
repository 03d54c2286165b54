"""DSpark drafts: the layers of a plain DFlash draft, and a Markov head that proposes from the anchor's row on."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from torch import Tensor, nn
from torch.nn import functional

from dflash_sglang.kernels.head.selector_walk import Codebooks
from dflash_sglang.models.draft import DFlashDraftModel

CANDIDATES = 16
"""Of each step: as many as published DFlash2 drafts choose from."""


class MarkovHead(nn.Module):
    """Corrects each step's logits by the token before.

    With `markov_w1` and `markov_w2` [vocab, rank] token y after token x scores

        logit[s, y] + (markov_w1[x] * g) . markov_w2[y]

    among the likeliest tokens of row h_s. g is 1; of a gated head it is sigmoid(gate_proj [h_s; markov_w1[x]]).
    The matrices are whole on every rank of a tensor-parallel group.
    """

    def __init__(self, vocab_size: int, rank: int, gated_by: int | None) -> None:
        """gated_by: hidden size of the rows; None without a gate."""
        super().__init__()
        self.candidates = min(CANDIDATES, vocab_size)
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.gate_proj = None if gated_by is None else nn.Linear(gated_by + rank, rank)
        self.requires_grad_(False)

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


class DSparkDraftModel(DFlashDraftModel):
    """A DSpark draft. Its confidence head is left in the checkpoint: walks have logprobs.

    Raises DraftConfigError for a config that cannot be served.
    """

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        assert self.spec.dspark is not None  # of every architecture in EntryClass
        rank = self.spec.dspark.rank
        gated_by = self.spec.hidden_size if self.spec.dspark.gated else None
        self.markov_head = MarkovHead(self.spec.vocab_size, rank, gated_by) if rank else None

    @property
    def edges(self) -> MarkovHead | None:
        return self.markov_head


class Qwen3DSparkModel(DSparkDraftModel):
    """The same model under another name."""


class LingDSparkModel(DSparkDraftModel):
    """The same model under another name."""


EntryClass = [DSparkDraftModel, Qwen3DSparkModel, LingDSparkModel]
