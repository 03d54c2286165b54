"""The checks of a request's body, before SGLang drops the fields that it does not know, and of the request."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from dflash_sglang.patches.input_embeds import no_rows
from dflash_sglang.requests.checks import request_error
from dflash_sglang.requests.limits import CUSTOM, misplaced
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.settings.width import WidthConfig


def generate_contract_error(original: Callable[..., str | None], body: Any) -> str | None:
    """AROUND api_contract.generate_contract_error, of /generate. Returns the error with HTTP status 400."""
    return original(body) or misplaced(body, f"sampling_params.{CUSTOM}") or no_rows(body)


async def handle_request(original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw: Any) -> Any:
    """AROUND OpenAIServingBase.handle_request, of OpenAI's endpoints. raw: fastapi's request of a JSON body."""
    error = misplaced(await raw.json(), CUSTOM)
    return await original(serving, request, raw) if error is None else serving.create_error_response(error)


def validate_dflash_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND dflash_utils.validate_dflash_request: runs for every request.

    Returns the error with which only this request ends, HTTP status 400.
    """
    error = original(req, enable_overlap)
    return request_error(req, _widths()) if error is None else error


@functools.cache
def _widths() -> WidthConfig:
    return PluginConfig.from_env().width
