"""A request's `custom_params={"dflash": {"min_width": N, "max_width": M, "copy": false}}`: its steps are not
narrower than N, commit at most M tokens of it, and copy nothing of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.requests.errors import RequestError, shown
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.settings.width import WidthConfig

KEY = "dflash"
MIN, MAX, COPY = "min_width", "max_width", "copy"
LIMITS = (MIN, MAX, COPY)
CUSTOM = "custom_params"
_OBJECTS = ("sampling_params", "extra_body", CUSTOM)  # in which clients put fields


def width_bounds(custom_params: Any) -> tuple[int | None, int | None]:
    """The `min_width` and the `max_width` that a request asks for, None without. Raises RequestError."""
    asked = _asked(custom_params)
    for name in (MIN, MAX):
        value = asked.get(name, 1)
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


def may_copy(custom_params: Any) -> bool:
    """Whether a request lets steps propose copies of its text. Raises RequestError."""
    asked = _asked(custom_params)
    if asked.get(COPY, False) is not False:
        raise RequestError(
            f"custom_params {KEY}: {COPY}={shown(asked[COPY])}: expected false. Leave it out to let the server "
            "copy as it is set."
        )
    return COPY not in asked


def _asked(custom_params: Any) -> Mapping[str, Any]:
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return {}
    asked = custom_params[KEY]
    if not isinstance(asked, dict) or not asked or not asked.keys() <= set(LIMITS):
        raise RequestError(
            f'custom_params {KEY}={shown(asked)}: expected {{"{MIN}": N, "{MAX}": M, "{COPY}": false}}, one or '
            "more of them, and nothing else."
        )
    return asked


def check_width(custom_params: Any, allowed: WidthConfig) -> None:
    """Raises RequestError where a request asks for what cannot be, or for what the server's settings forbid."""
    least, most = width_bounds(custom_params)
    if least is not None and least > allowed.highest_min_width:
        raise _forbidden(MIN, least, f"at most {allowed.highest_min_width}", "Lower", "highest_min_width")
    if most is not None and most < allowed.lowest_max_width:
        raise _forbidden(MAX, most, f"at least {allowed.lowest_max_width}", "Raise", "lowest_max_width")


def _forbidden(name: str, value: int, expected: str, change: str, setting: str) -> RequestError:
    return RequestError(
        f"custom_params {KEY}: {name}={shown(value)}: expected {expected} on this server. {change} it, leave it "
        f'out, or have the server\'s operator change {setting} of "width" in {CONFIG_ENV}.'
    )


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
