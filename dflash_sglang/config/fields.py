"""Typed reading of a draft's raw config.json: where a field may stand, and errors that name it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

_ABSENT = object()


class DraftConfigError(ValueError):
    """A field of the draft's config.json that cannot be served.

    Attributes: ``field``, ``value`` as found, ``expected`` and ``fix`` (what to change), all shown in
    the message.
    """

    def __init__(self, field: str, value: object, expected: str, fix: str) -> None:
        self.field, self.value, self.expected, self.fix = field, value, expected, fix
        super().__init__(f"draft config {field}={value!r}: expected {expected}. {fix}")


class Fields:
    """The three places of a draft's config.json: `dflash_config`, `text_config` and the top level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        self.nested = _mapping(config, "dflash_config")
        self.text: Mapping[str, Any] = {**config, **_mapping(config, "text_config")}

    def shape(self, name: str, default: object = _ABSENT) -> tuple[str, Any]:
        """(path, value) of a field of the transformer's shape; `text_config` wins over the top level."""
        value = self.text.get(name)
        if value is not None:
            return name, value
        if default is _ABSENT:
            raise DraftConfigError(
                name, None, "the field to be present", f"Add {name} to the draft's config.json."
            )
        return name, default

    def draft(self, name: str, default: object = None) -> tuple[str, Any]:
        """(path, value) of a DFlash field; `dflash_config` wins over the top level."""
        value = self.nested.get(name)
        if value is not None:
            return f"dflash_config.{name}", value
        value = self.top.get(name)
        return name, default if value is None else value


def as_int(found: tuple[str, Any], minimum: int) -> int:
    """The integer of a found field (whole floats are not integers); `minimum` is inclusive.

    Raises DraftConfigError naming the field, as the next two do.
    """
    field, value = found
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise DraftConfigError(
            field, value, f"an integer >= {minimum}", f"Correct {field} in the draft's config.json."
        )
    return value


def as_float(found: tuple[str, Any]) -> float:
    """The number of a found field, which must be positive and finite."""
    field, value = found
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise DraftConfigError(field, value, "a positive number", f"Correct {field} in the draft's config.json.")
    return float(value)


def as_bool(found: tuple[str, Any]) -> bool:
    """The true or false of a found field (numbers and strings are neither)."""
    field, value = found
    if not isinstance(value, bool):
        raise DraftConfigError(field, value, "true or false", f"Correct {field} in the draft's config.json.")
    return value


def _mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DraftConfigError(field, value, "an object", f"Correct {field} in the draft's config.json.")
    return value
