"""Limits on drafting that stand where nothing reads them, in the body of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_sglang.requests.limits import KEY, LIMITS, MAX

CUSTOM = "custom_params"
_OBJECTS = ("sampling_params", "extra_body", CUSTOM)  # in which clients put fields


def misplaced(body: Any, place: str) -> str | None:
    """The error of a decoded JSON body with limits on drafting outside of `place`, None without.

    place: the path of the endpoint's custom_params, such as "sampling_params.custom_params".
    """
    for path in _limits(body, ""):
        if not path.startswith(f"{place}."):
            return f'{path}: expected limits on drafting in {place}: {{"{KEY}": {{"{MAX}": N}}}}. Move it there.'
    return None


def _limits(fields: Any, path: str) -> Iterator[str]:
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if name in (KEY, *LIMITS):
            yield path + name
        elif name in _OBJECTS:
            yield from _limits(value, f"{path}{name}.")
