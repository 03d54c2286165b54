"""DFlash2 drafts: convolutions around the sublayers of a plain draft (`convolution.py`) and a candidate selector,
which scores the edges between the likeliest tokens of each position and the next."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from dflash_sglang.checkpoint.families import DFLASH2
from dflash_sglang.checkpoint.family_specs import DFlash2Spec
from dflash_sglang.kernels.head.selector_walk import Codebooks
from dflash_sglang.models.draft import DFlashDraftModel, under_its_names
from dflash_sglang.models.edges import CodebookEdges
from dflash_sglang.models.layers import Quantisation, of_checkpoint


class CandidateSelector(CodebookEdges):
    """Chooses a path of tokens through the candidates of a block.

    For the row h_s [hidden] of step s (after the draft's final norm, as the head gets it; the anchor's row has no
    step) the candidates are the K tokens of the largest logits of the head, which shapes them in float32 as the
    draft's config says. `hidden_projection` [rank, hidden] projects h_s, and with `predecessor_codebook` and
    `successor_codebook` [vocab, rank] the edge from token x to candidate y scores

        logit[s, y] + sum over r of predecessor[x, r] * (hidden_projection h_s)[r] * successor[y, r]

    The walk starts at the anchor, the last committed token, and each step's token is the next one's x
    (`kernels/head/selector_walk.py`). Codebooks and projection are whole on every rank of a tensor-parallel group:
    candidates are tokens of the whole vocabulary.
    """

    def __init__(
        self, spec: DFlash2Spec, hidden_size: int, vocab_size: int,
        quant_config: Quantisation, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.candidates, rank = spec.selector_top_k, spec.selector_rank
        prefix, codebook = f"{prefix}.hidden_projection", (vocab_size, rank)
        self.hidden_projection = ReplicatedLinear(
            hidden_size, rank, bias=False, quant_config=quant_config, prefix=prefix
        )
        self.predecessor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(codebook), requires_grad=False)

    @property
    def codebooks(self) -> Codebooks:
        return Codebooks(self.predecessor_codebook, self.successor_codebook)

    @torch.no_grad()
    def project(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] -> [N, rank]"""
        projected, _ = self.hidden_projection(rows)
        return projected


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash2 draft; a checkpoint without convolutions has the layers of a plain one.

    Raises DraftConfigError for a config that cannot be served.
    """

    def __init__(self, config: Any, quant_config: Quantisation = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        assert self.spec.dflash2 is not None  # of every architecture in EntryClass
        self.candidate_selector = CandidateSelector(
            self.spec.dflash2,
            self.spec.hidden_size,
            self.spec.vocab_size,
            of_checkpoint(quant_config, self.spec),
            f"{prefix}.candidate_selector" if prefix else "candidate_selector",
        )

    @property
    def edges(self) -> CandidateSelector:
        return self.candidate_selector


EntryClass = under_its_names(DFlash2DraftModel, DFLASH2)
