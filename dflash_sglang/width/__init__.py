"""Which verify width the next step has: two estimates, a choice, and how the ranks of a group agree on it.

`WidthPolicy` is what the worker holds. Pure Python and numpy, no device, no clock.
"""

from dflash_sglang.settings.width import WidthConfig, WidthConfigError
from dflash_sglang.width.decider import Decision
from dflash_sglang.width.group import Group, OneStepLate
from dflash_sglang.width.policy import WidthPolicy
from dflash_sglang.width.step_times import StepTimes, startup_cells

__all__ = [
    "Decision",
    "Group",
    "OneStepLate",
    "StepTimes",
    "WidthConfig",
    "WidthConfigError",
    "WidthPolicy",
    "startup_cells",
]
