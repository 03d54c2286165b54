"""A decode server that retracts a request keeps its KV on the host: the draft's context KV beside the target's."""

from __future__ import annotations

from typing import Any

from dflash_sglang.patches.apply import replace


def keep(allocator: Any, draft_pool: Any) -> None:
    """allocator: of the target's slots, which are the draft's as well."""
    copied, loaded = allocator.get_cpu_copy, allocator.load_cpu_copy

    def get_cpu_copy(slots: Any, **more: Any) -> tuple[Any, Any]:
        return copied(slots, **more), draft_pool.get_cpu_copy(slots)

    def load_cpu_copy(copies: tuple[Any, Any], slots: Any, **more: Any) -> None:
        of_target, of_draft = copies
        loaded(of_target, slots, **more)
        draft_pool.load_cpu_copy(of_draft, slots)

    replace("retracted-rows", allocator, get_cpu_copy)
    replace("resumed-rows", allocator, load_cpu_copy)
