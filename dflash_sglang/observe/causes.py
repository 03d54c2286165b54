"""The alarm's line of the log: what was seen, and what to check, likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_sglang.checkpoint.in_words import layers_read
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.observe.alarm import FELL, Raised, Window

if TYPE_CHECKING:
    from dflash_sglang.checkpoint import DraftSpec

PAGE = "docs/guide/troubleshooting.md"


@dataclass
class Causes:
    """What is known of the pair that serves. `context_tokens`: of all request-steps together."""

    spec: DraftSpec | MtpSpec
    target_layers: Sequence[int]  # whose hidden states feed the draft, counted from 0
    num_target_layers: int
    target_vocabulary: int
    quantization: str  # of the draft
    context_tokens: int = 0

    def line(self, raised: Raised, request_steps: int) -> str:
        """One line. request_steps: since start-up."""
        causes = enumerate(self._ordered(raised, request_steps), start=1)
        listed = "; ".join(f"({number}) {cause}" for number, cause in causes)
        return f"dflash_sglang acceptance alarm: {_seen(raised)} Check, likeliest first: {listed}. See {PAGE}"

    def _ordered(self, raised: Raised, request_steps: int) -> list[str]:
        text = "chat template and thinking mode are those that the draft was trained with, and so is the language"
        context = self.context_tokens // max(request_steps, 1)
        pair = "the draft is trained for this very target, not for one that it was fine-tuned from"
        features = [  # of a draft that names its features, and has masked rows
            f"target_layers={list(self.target_layers)} of {self.num_target_layers} are those of the model card, "
            "counted from 0",
            f"mask_token_id={self.spec.mask_token_id}",
        ]
        facts = [
            *(features if self.target_layers else []),
            f"vocabulary: draft {self.spec.vocab_size}, target {self.target_vocabulary}",
            f"draft quantization={self.quantization}"
            + ("" if self.quantization == "none" else ": try the bf16 draft"),
            f"layers={layers_read(self.spec)}, at contexts of {context} tokens on average (trained up to "
            f"{self.spec.max_position_embeddings})",
        ]
        if raised.state == FELL:
            update = "weights of the target were updated, and the draft's were not"
            if isinstance(self.spec, MtpSpec):  # an update of the target reaches them
                update = "weights of the target were updated without those of its multi-token-prediction layers"
            return [update, pair, text, *facts]
        return [*facts, pair, text]


def _seen(raised: Raised) -> str:
    if raised.seen is None:
        return "drafting does not pay: width 1 is estimated to be faster in nearly all steps."
    before = "" if raised.before is None else f" After warm-up they were {_shares(raised.before)}."
    positions = " ".join(map(str, range(1, len(raised.seen) + 1)))
    return (
        "the draft proposes as if it did not see the target's context. Shares of request-steps that accept "
        f"proposal {positions}, with all before it: {_shares(raised.seen)}.{before}"
    )


def _shares(window: Window) -> str:
    return f"{' '.join(f'{share:.0%}' for share in window)} (accept length about {window.accept_length:.1f})"
