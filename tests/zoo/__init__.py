"""A zoo of tiny random targets with the real architecture names, each with a matching DFlash draft.

`ZOO` has its members by the name that the support matrix shows; `pair` builds the checkpoints of one, once per
test run, and `pair_for` shows them to a server of another dtype.
"""

from tests.zoo import attention, recurrent
from tests.zoo.member import ZOO, Member, pair, pair_for, reference

__all__ = ["ZOO", "Member", "attention", "pair", "pair_for", "recurrent", "reference"]
