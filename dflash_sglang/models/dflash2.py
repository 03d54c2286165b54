"""DFlash2DraftModel: a DFlash draft with convolutions around attention and MLP (`convolution.py`), and with
proposals from a candidate selector (`selector.py`)."""

from __future__ import annotations

from typing import Any

from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.models.layers import Quantisation, of_checkpoint
from dflash_sglang.models.selector import CandidateSelector


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


class DFlash2BeamDraftModel(DFlash2DraftModel):
    """The same model under another name."""


class MiniMaxDFlash2DraftModel(DFlash2DraftModel):
    """The same model under another name."""


EntryClass = [DFlash2DraftModel, DFlash2BeamDraftModel, MiniMaxDFlash2DraftModel]
