"""The scheduler's check of each request, extended by `requests.checks`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dflash_sglang.requests.checks import RequestChecks
from dflash_sglang.settings.plugin_config import PluginConfig


def validate_dflash_request(original: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """AROUND dflash_utils.validate_dflash_request: runs for every request.

    Returns the error with which only this request ends, HTTP status 400.
    """
    return _checks()(original, req, enable_overlap)


@functools.cache
def _checks() -> RequestChecks:
    return RequestChecks(PluginConfig.from_env().width)
