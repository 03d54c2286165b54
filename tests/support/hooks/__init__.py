"""The hooks of `tests.support.scheduler_hooks`, by module: each is the module's function of that name.

A module is imported only in a scheduler, where one of its hooks is chosen, and may import what the scheduler has.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

HOOKS = {
    "proposals": ("oracle", "proposals"),
    "mtp": ("mtp", "freed"),
    "widths": ("widths", "stretches", "probes", "shares", "shapes"),
    "trees": ("trees", "always trees", "grown"),
    "copies": ("copies", "always copies", "chains", "always chains"),
    "slots": ("poison", "blindfold", "sentinels"),
    "context": ("features", "context", "digests"),
    "recurrent": ("states", "misplaced"),
    "start_up": ("rehearsals", "firsts"),
    "launches": ("causal", "host_lengths", "seeds", "dram"),
}
_MODULES = {name: module for module, names in HOOKS.items() for name in names}


def apply(names: Iterable[str]) -> None:
    """In a scheduler: patches the worker and its parts, in this order. A later hook acts around an earlier one."""
    for name in names:
        module = import_module(f"{__name__}.{_MODULES[name]}")
        getattr(module, name.replace(" ", "_"))()
