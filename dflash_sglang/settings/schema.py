"""JSON objects of settings: their keys are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def known_settings(values: object, settings: type, where: str, error: type[ValueError]) -> dict[str, Any]:
    """A decoded JSON object whose keys are fields of the dataclass `settings`. Raises `error`."""
    if not isinstance(values, dict):
        raise error(f"{where}: expected a JSON object, found {type(values).__name__}.")
    known = [field.name for field in fields(settings)]
    for key in values:
        if key not in known:
            raise error(f"{where}: unknown key {key!r}. Known keys: {', '.join(known)}. Correct it.")
    return values
