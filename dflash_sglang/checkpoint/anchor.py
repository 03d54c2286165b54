"""Whether a draft's block proposes from its first row on, the row of the anchor (the last committed token)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError, as_bool, shown

_NAMES = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
_PLACES = ("dflash_config", "eagle_config", "text_config", "transformer_layer_config")  # beside the top level


def anchor_field(config: Mapping[str, Any]) -> tuple[str, bool] | None:
    """(path, value) of the field that says so in a raw config.json of any format, None without one.

    Raises DraftConfigError for a value that is not true or false, and for two that contradict each other.
    """
    said = list(_said(config))
    for found in said:
        if as_bool(found) != said[0][1]:
            expected = (
                f"{said[0][0]}={shown(said[0][1])} to say the same: whether the row of the last committed token "
                "proposes, too"
            )
            fix = "Keep the one that the draft was trained with in its config.json."
            raise DraftConfigError(found[0], found[1], expected, fix)
    return said[0] if said else None


def _said(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every name in every place; null is absent."""
    nested = ((f"{place}.", config.get(place)) for place in _PLACES)
    for path, fields in (("", config), *nested):
        given = fields if isinstance(fields, Mapping) else {}
        yield from ((path + name, given[name]) for name in _NAMES if given.get(name) is not None)
