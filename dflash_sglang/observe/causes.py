"""The alarm's line of the log: what was seen, and what to check, likeliest first."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.causes import TARGET, TEXT, PairFacts
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.observe.alarm import FELL, Raised, Window

PAGE = "docs/guide/troubleshooting.md"


@dataclass
class Causes:
    """The pair that serves. `context_tokens`: of all request-steps together."""

    pair: PairFacts
    context_tokens: int = 0

    def line(self, raised: Raised, request_steps: int) -> str:
        """Return the one line. request_steps: since start-up."""
        causes = [*self.pair.causes(self.context_tokens // max(request_steps, 1), "on average"), TARGET, TEXT]
        if raised.state == FELL:  # the checkpoints are as they were
            updated = "weights of the target were updated, and the draft's were not"
            if isinstance(self.pair.spec, MtpSpec):  # an update of the target reaches them
                updated = "weights of the target were updated without those of its multi-token-prediction layers"
            causes = [updated, TARGET, TEXT, *causes[:-2]]
        listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, start=1))
        return f"dflash_sglang acceptance alarm: {_seen(raised)} Check, likeliest first: {listed}. See {PAGE}"


def _seen(raised: Raised) -> str:
    before = "" if raised.before is None else f" After warm-up they were {_shares(raised.before)}."
    positions = " ".join(map(str, range(1, len(raised.seen) + 1)))
    return (
        "the draft proposes as if it did not see the target's context. Shares of request-steps that accept "
        f"proposal {positions}, with all before it: {_shares(raised.seen)}.{before}"
    )


def _shares(window: Window) -> str:
    return f"{' '.join(f'{share:.0%}' for share in window)} (accept length about {window.accept_length:.1f})"
