"""The bodies of HTTP requests, before SGLang drops the fields that it does not know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dflash_sglang.patches.input_embeds import no_rows
from dflash_sglang.requests.misplaced import CUSTOM, misplaced


def generate_contract_error(original: Callable[..., str | None], body: Any) -> str | None:
    """AROUND api_contract.generate_contract_error, of /generate. Returns the error with HTTP status 400."""
    return original(body) or misplaced(body, f"sampling_params.{CUSTOM}") or no_rows(body)


async def handle_request(original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw: Any) -> Any:
    """AROUND OpenAIServingBase.handle_request, of OpenAI's endpoints. raw: fastapi's request of a JSON body."""
    error = misplaced(await raw.json(), CUSTOM)
    return await original(serving, request, raw) if error is None else serving.create_error_response(error)
