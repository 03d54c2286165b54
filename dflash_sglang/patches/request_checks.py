"""The scheduler's check of each request, extended by `requests.checks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dflash_sglang.requests.checks import request_error
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.settings.width import WidthConfig


def validate_dflash_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND dflash_utils.validate_dflash_request: runs for every request.

    Returns the error with which only this request ends, HTTP status 400.
    """
    error = original(req, enable_overlap)
    return request_error(req, _widths()) if error is None else error


@functools.cache
def _widths() -> WidthConfig:
    return PluginConfig.from_env().width
