"""The verdict on a pair: fine, weak on these prompts, or what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.broken import CHANCE_LENGTH, Window
from dflash_sglang.check.acceptance import Acceptance
from dflash_sglang.check.baseline import Baseline
from dflash_sglang.check.parting import Parting

FINE, DEFECT, BELOW_BASELINE, BROKEN_DRAFT = "fine", "defect", "below baseline", "broken draft"
WEAK = "weak on these prompts"
GOOD = (FINE, WEAK)  # the draft and the outputs are as they should be
TOLERANCE = 0.02  # of the baseline's accept length


@dataclass(frozen=True)
class Judged:
    """What was seen of a pair."""

    partings: tuple[Parting, ...]
    accepted: Acceptance
    window: Window  # what the acceptance alarm of a server judges
    speed: float | None  # tokens/s over plain decoding; None where it was not measured
    baseline: Baseline | None

    @property
    def break_even(self) -> float | None:
        """Accept length at which the answers take as long as plain decoding's."""
        return None if self.speed is None else self.accepted.length.value / self.speed


@dataclass(frozen=True)
class Verdict:
    name: str  # FINE, or the first of DEFECT, BROKEN_DRAFT, BELOW_BASELINE and WEAK that holds
    reasons: tuple[str, ...]  # a sentence for each that holds

    @property
    def poor_acceptance(self) -> bool:
        """Whether the likely causes of low acceptance are worth reading."""
        return any(reason.startswith("accept length") for reason in self.reasons)


def verdict(judged: Judged) -> Verdict:
    found: list[tuple[str, str]] = []
    defects = [one for one in judged.partings if not one.near_tie]
    if defects:
        first = defects[0]
        found.append((
            DEFECT,
            f"outputs that differ from plain decoding by more than rounding: {len(defects)}, the first of prompt "
            f"{first.prompt} at token {first.position}",
        ))  # fmt: skip
    length, baseline = judged.accepted.length, judged.baseline
    if judged.window.broken:
        found.append((
            BROKEN_DRAFT,
            f"accept length {length.value:.2f}: by its first proposals an endless block would have "
            f"{judged.window.accept_length:.2f}, as of a broken draft (below {CHANCE_LENGTH:g})",
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
    if judged.break_even is not None and length.high < judged.break_even and not judged.window.broken:
        found.append((
            WEAK,
            f"accept length {length.value:.2f} ({length.low:.2f} to {length.high:.2f}) is below break-even, about "
            f"{judged.break_even:.2f}: {judged.speed:.2f} times the tokens/s of plain decoding",
        ))  # fmt: skip
    return Verdict(found[0][0] if found else FINE, tuple(reason for _, reason in found))
