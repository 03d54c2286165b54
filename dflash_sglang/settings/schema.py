"""What the settings share: where they stand, their error, and JSON objects whose keys are a dataclass's fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

CONFIG_ENV = "DFLASH_SGLANG_CONFIG"


class PluginConfigError(ValueError):
    """DFLASH_SGLANG_CONFIG cannot be read, or names a key or value that does not exist."""


def known_settings(values: object, settings: type, where: str) -> dict[str, Any]:
    """A decoded JSON object whose keys are fields of the dataclass `settings`. Raises PluginConfigError, which
    names `where`."""
    if not isinstance(values, dict):
        raise PluginConfigError(f"{where}: expected a JSON object, found {type(values).__name__}.")
    known = [field.name for field in fields(settings)]
    for key in values:
        if key not in known:
            raise PluginConfigError(f"{where}: unknown key {key!r}. Known keys: {', '.join(known)}. Correct it.")
    return values
