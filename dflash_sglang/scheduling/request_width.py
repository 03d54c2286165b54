"""A request's `custom_params={"dflash": {"min_width": N, "max_width": M}}`: its steps are not narrower than N, and
commit at most M tokens of it."""

from __future__ import annotations

from typing import Any

from dflash_sglang.request_errors import RequestError, shown

KEY = "dflash"
MIN, MAX = "min_width", "max_width"


def width_bounds(custom_params: Any) -> tuple[int | None, int | None]:
    """The `min_width` and the `max_width` that a request asks for, None without. Raises RequestError."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return None, None
    asked = custom_params[KEY]
    if not isinstance(asked, dict) or not asked or set(asked) - {MIN, MAX}:
        raise RequestError(
            f'custom_params {KEY}={shown(asked)}: expected {{"{MIN}": N, "{MAX}": M}}, one or both, and nothing '
            "else."
        )
    for name, value in asked.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(
                f"custom_params {KEY}: {name}={shown(value)}: expected a whole number from 1 (one token at a "
                "time) on."
            )
    least, most = asked.get(MIN), asked.get(MAX)
    if least is not None and most is not None and least > most:
        raise RequestError(
            f"custom_params {KEY}: {MIN}={shown(least)}: expected at most {MAX}={shown(most)}. Lower it, or raise "
            f"{MAX}."
        )
    return least, most
