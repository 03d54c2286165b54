"""The verdict on a pair: fine, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_sglang.check.acceptance import Acceptance
from dflash_sglang.check.baseline import Baseline
from dflash_sglang.check.parting import Parting

FINE, DEFECT, BELOW_BASELINE, BROKEN_DRAFT = "fine", "defect", "below baseline", "broken draft"
TOLERANCE = 0.02  # of the baseline's accept length
# Accepted proposals, of the verified ones, below which a draft is as good as none. The packaged draft has 33 %,
# and 4 % with its layer ids reversed; users report 0 to 2 % of drafts that were read wrongly, 3 to 5 % on a
# fine-tuned target.
BROKEN_SHARE = 0.05


@dataclass(frozen=True)
class Verdict:
    name: str  # FINE, or the first of DEFECT, BROKEN_DRAFT and BELOW_BASELINE that holds
    reasons: tuple[str, ...]  # a sentence for each that holds

    @property
    def poor_acceptance(self) -> bool:
        """Whether the likely causes of low acceptance are worth reading."""
        return any(reason.startswith("accept length") for reason in self.reasons)


def verdict(
    partings: Sequence[Parting], accepted: Acceptance, proposals: float, baseline: Baseline | None
) -> Verdict:
    """``proposals``: verified in a step, on average."""
    found: list[tuple[str, str]] = []
    defects = [one for one in partings if not one.near_tie]
    if defects:
        first = defects[0]
        found.append((
            DEFECT,
            f"outputs that differ from plain decoding by more than rounding: {len(defects)}, the first of prompt "
            f"{first.prompt} at token {first.position}",
        ))  # fmt: skip
    length, share = accepted.length, accepted.share(proposals)
    if share < BROKEN_SHARE:
        found.append((
            BROKEN_DRAFT,
            f"accept length {length.value:.2f}: {share:.1%} of the verified proposals are accepted, as of a "
            f"broken draft (below {BROKEN_SHARE:.0%})",
        ))  # fmt: skip
    if (
        baseline
        and length.value < baseline.accept_length * (1 - TOLERANCE)
        and length.high < baseline.accept_length
    ):
        found.append((
            BELOW_BASELINE,
            f"accept length {length.value:.2f} ({length.low:.2f} to {length.high:.2f}) is "
            f"{1 - length.value / baseline.accept_length:.0%} below the baseline's {baseline.accept_length:.2f}",
        ))  # fmt: skip
    return Verdict(found[0][0] if found else FINE, tuple(reason for _, reason in found))
