"""What a request may ask: `custom_params={"dflash": {"min_width": N, "max_width": M}}`, by which its steps are not
narrower than N and commit at most M tokens of it; and what SGLang would take and not do under speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEY = "dflash"
MIN, MAX = "min_width", "max_width"


class RequestError(ValueError):
    """What a request asks of this package cannot be; the message goes to its client."""


def width_bounds(custom_params: Any) -> tuple[int | None, int | None]:
    """The `min_width` and the `max_width` that a request asks for, None without. Raises RequestError."""
    if not isinstance(custom_params, dict) or KEY not in custom_params:
        return None, None
    asked = custom_params[KEY]
    if not isinstance(asked, dict) or not asked or set(asked) - {MIN, MAX}:
        raise RequestError(
            f'custom_params {KEY}={asked!r}: expected {{"{MIN}": N, "{MAX}": M}}, one or both, and nothing else.'
        )
    for name, value in asked.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(
                f"custom_params {KEY}: {name}={value!r}: expected a whole number from 1 (one token at a time) on."
            )
    least, most = asked.get(MIN), asked.get(MAX)
    if least is not None and most is not None and least > most:
        raise RequestError(
            f"custom_params {KEY}: {MIN}={least}: expected at most {MAX}={most}. Lower it, or raise {MAX}."
        )
    return least, most


def validate_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND dflash_utils.validate_dflash_request: runs in the scheduler for every request.

    What it returns is the error with which this request alone ends, HTTP status 400.
    """
    error = original(req, enable_overlap)
    if error is not None:
        return error
    try:
        width_bounds(req.sampling_params.custom_params)
        _check_served(req)
    except RequestError as refused:
        return str(refused)
    return None


def _check_served(req: Any) -> None:
    if req.token_indices_to_pool is not None:
        raise RequestError(
            "score_extraction_token: expected none with DFLASH, because SGLang scores the positions of a token in "
            "servers without speculation alone. Score with label_token_ids, or on such a server."
        )
    if req.return_sampling_mask and req.session is not None and req.session.streaming:
        raise RequestError(
            "return_sampling_mask: expected no streaming session with DFLASH, because SGLang counts the masks of "
            "an answer that stops inside a step by what the session has cut already. Leave out one of them."
        )
