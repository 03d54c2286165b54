"""A zoo of tiny random targets with the real architecture names, each with a matching DFlash draft.

`ZOO` has its members by the name that the support matrix shows; `pair` builds the checkpoints of one, once per
test run, and `pair_for` shows them to a server of another dtype. A module of this package adds members with
`register`: a function that gives the transformers config.
"""

from tests.zoo import dense, mla, moe, recurrent, vision
from tests.zoo.member import ZOO, Member, pair, pair_for, reference, register

__all__ = [
    "ZOO",
    "Member",
    "dense",
    "mla",
    "moe",
    "pair",
    "pair_for",
    "recurrent",
    "reference",
    "register",
    "vision",
]
