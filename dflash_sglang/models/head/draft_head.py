"""The head that a draft proposes with, and the factory that builds it."""

from __future__ import annotations

from torch import Tensor, nn

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.kernels.head.pack_shard import Scaling
from dflash_sglang.models.head.form import MIB, HeadFacts, choose_form
from dflash_sglang.models.head.fp8_head import Fp8Head
from dflash_sglang.models.head.hot_rows import HotRows
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.settings.plugin_config import DraftHeadForm

HeadCopy = HotRows | Fp8Head
"""A copy of a head's weights: `tensors` are what it takes memory for, `refresh` takes the present weights over."""


class DraftHead(TargetHead):
    """The head of every draft. Its rows may be other ids than the target's, and its logits may be scaled.

    lm_head: as for `TargetHead`; the target's, the draft's own, or a copy of some rows of either. target_ids: the
    target's id of each row of the whole head [draft vocabulary] int64, None where rows are ids. tokens: how many
    rows, the first ones of the whole head, are tokens; those after them are padding. `logits` are those of the
    rows, not scaled.
    """

    def __init__(
        self,
        lm_head: nn.Module,
        spec: VocabularySpec,
        target_ids: Tensor | None,
        same_batch: int | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(lm_head, same_batch)
        if tokens is not None:
            self.rows = max(0, min(self.rows, tokens - self.first_id))
        self.scaling = Scaling(spec.logit_multiplier, spec.logit_softcap)
        self.target_ids = target_ids


def build_draft_head(
    lm_head: nn.Module,
    spec: VocabularySpec,
    target_ids: Tensor | None = None,
    token_map: Tensor | None = None,
    asked: DraftHeadForm = "as_is",
    same_batch: int | None = None,
    tokens: int | None = None,
) -> tuple[DraftHead, HeadCopy | None, str]:
    """Build the head to draft with: over `lm_head` itself, or over a copy of its rows.

    Returns the head; the copy, to be refreshed after an update of what was copied; and the form of the weights
    and why, for the start-up line.

    lm_head, same_batch: as for `TargetHead`. target_ids, tokens: as for `DraftHead`. token_map [n] int64,
    ascending: the only tokens that are proposed, None for all; its rows are copied. asked: the operator's wish for
    the form.
    Raises ValueError for a quantised head with a token map, and for "fp8" where there can be no such copy.
    """
    wants_fp8, why = choose_form(asked, HeadFacts.from_head(lm_head, token_map))
    if wants_fp8:
        fp8 = Fp8Head(lm_head, token_map)
        form = f"fp8 ({why}, {sum(tensor.nbytes for tensor in fp8.tensors) / MIB:.1f} MiB)"
        return DraftHead(fp8, spec, target_ids, same_batch, tokens), fp8, form
    hot = None if token_map is None else HotRows(lm_head, token_map)
    return DraftHead(hot or lm_head, spec, target_ids, same_batch, tokens), hot, f"as_is ({why})"
