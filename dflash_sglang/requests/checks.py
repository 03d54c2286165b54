"""Requests that cannot be, or that SGLang would take and answer wrongly under speculation."""

from __future__ import annotations

from typing import Any

from dflash_sglang.requests.errors import RequestError, shown
from dflash_sglang.requests.limits import COPY, KEY, LIMITS, check_width, may_copy
from dflash_sglang.settings.width import WidthConfig


def request_error(req: Any, widths: WidthConfig) -> str | None:
    """The error with which only this request ends; None for a request that can be served.

    widths: what requests may ask of the width of steps.
    """
    try:
        _check_placed(req)
        check_width(req.sampling_params.custom_params, widths)
        may_copy(req.sampling_params.custom_params)
        _check_served(req)
    except RequestError as refused:
        return str(refused)
    return None


def _check_placed(req: Any) -> None:
    """A custom logit processor may have parameters of these names."""
    params = req.sampling_params.custom_params
    for name in LIMITS:
        if isinstance(params, dict) and name in params and req.custom_logit_processor is None:
            place = f'{{"{KEY}": {{"{name}": {"false" if name == COPY else "N"}}}}}'
            raise RequestError(f"custom_params {name}={shown(params[name])}: expected in {place}. Move it there.")


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
