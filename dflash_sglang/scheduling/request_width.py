"""A request's `custom_params={"dflash": {"max_width": N}}`: a step commits at most N tokens of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY = "dflash"


class RequestError(ValueError):
    """What a request asks of this package cannot be; the message goes to its client."""


def max_width(custom_params: Any) -> int | None:
    """What a request asks for, None without. Raises RequestError."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return None
    asked = custom_params[KEY]
    if not isinstance(asked, dict) or set(asked) != {"max_width"}:
        raise RequestError(f'custom_params {KEY}={asked!r}: expected {{"max_width": N}} and nothing else.')
    value = asked["max_width"]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(
            f"custom_params {KEY}: max_width={value!r}: expected a whole number from 1 (one token at a time) on."
        )
    return value


def validate_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND dflash_utils.validate_dflash_request: runs in the scheduler for every request.

    What it returns is the error with which this request alone ends, HTTP status 400.
    """
    error = original(req, enable_overlap)
    if error is not None:
        return error
    try:
        max_width(req.sampling_params.custom_params)
    except RequestError as refused:
        return str(refused)
    return None
