"""What this package's worker counts of its steps, as /server_info tells."""

from __future__ import annotations

import operator
from collections import Counter
from typing import NamedTuple

from dflash_sglang.broken import Window
from dflash_sglang.demo.server import Client

WIDTH_STATE = "dflash_width"


class Steps(NamedTuple):
    """What a server did since start-up, of all ranks; empty of another worker than this package's."""

    by_width: Counter[int]
    verified: Counter[int]  # request-steps that verified the draft's proposal at position 1, 2, ...
    accepted: Counter[int]  # request-steps that accepted it, with all before it

    def since(self, before: Steps) -> Steps:
        return Steps(*map(operator.sub, self, before))

    @property
    def window(self) -> Window:
        """What the acceptance alarm judges."""
        positions = range(1, len(self.verified) + 1)
        return Window.from_counts(*([of[at] for at in positions] for of in self[1:]))

    def plus(self, other: Steps) -> Steps:
        return Steps(*map(operator.add, self, other))


def no_steps() -> Steps:
    return Steps(Counter(), Counter(), Counter())


def steps_of(client: Client) -> Steps:
    out = no_steps()
    for state in client.get("/server_info")["internal_states"]:
        if WIDTH_STATE in state:
            out.by_width.update({int(width): steps for width, steps in state[WIDTH_STATE]["steps"].items()})
            for counted, name in ((out.verified, "verified_drafts"), (out.accepted, "accepted_drafts")):
                counted.update(dict(enumerate(state["dflash_acceptance"][name], start=1)))
    return out
