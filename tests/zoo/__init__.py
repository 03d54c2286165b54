"""A zoo of tiny random targets with the real architecture names, each with a matching DFlash draft.

`ZOO` has its members by the name that the support matrix shows; `pair` builds the checkpoints of one, once per
test run. A module of this package adds members with `register`: a function that gives the transformers config.
"""

from tests.zoo import dense, mla, moe, vision
from tests.zoo.member import ZOO, Member, pair, reference, register

__all__ = ["ZOO", "Member", "dense", "mla", "moe", "pair", "reference", "register", "vision"]
