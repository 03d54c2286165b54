"""Which verify width the next step has: two estimates, a choice, and how the ranks of a group agree on it.

`policy.WidthPolicy` is what the worker's controller holds. Pure Python and numpy, no device, no clock.
"""
