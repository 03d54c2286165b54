"""Typed reading of a draft's raw config.json: where a field may stand, what transformers fills in, and errors that
name the field."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from sys import float_info
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**31 - 1
"""Of any number in a config.json that is a count, a size or an id."""
MOST_LAYERS = 1024
"""Of a draft, and of a target that a draft names; more of them are a mistake that takes minutes to read."""

_ABSENT = object()
# The classes of nearly all drafts, which agree.
_COMMON = ("qwen3", "llama")
_COMMON_DEFAULTS = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rms_norm_eps": 1e-6}

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 16
_SHORT.maxstring = _SHORT.maxother = 300
_SHORT.maxlong = 80


def shown(value: object) -> str:
    """The repr of a value for a message: one line, long ones with `...` in them."""
    return one_line(_SHORT.repr(value))


def one_line(text: object, longest: int = 600) -> str:
    """A text, or an error's message, without its line breaks, cut after `longest` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def described(error: BaseException) -> str:
    """The type and the message of an error, on one line."""
    return one_line(f"{type(error).__name__}: {error}")


class DraftConfigError(ValueError):
    """A field of the draft's config.json that cannot be served.

    Attributes: ``field``, ``value`` as found, ``expected`` and ``fix`` (what to change; by default the field),
    all shown in the message. ``all``: the error and those `beside` it, whose messages follow.
    """

    def __init__(
        self, field: str, value: object, expected: str, fix: str = "", beside: Sequence[DraftConfigError] = ()
    ) -> None:
        self.field, self.value, self.expected = field, value, expected
        self.fix = fix or f"Correct {field} in the draft's config.json."
        self.all = (self, *beside)
        own = f"draft config {field}={shown(value)}: expected {expected}. {self.fix}"
        super().__init__(" ".join([own, *map(str, beside)]))


def first_architecture(config: Mapping[str, Any]) -> str | None:
    """By which a server finds a model's class; None where `architectures` is malformed or absent."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return names[0]


class Fields:
    """The three places of a draft's config.json: `dflash_config`, `text_config` and the top level."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.top = config
        self.nested = self.mapping("dflash_config")
        self.text: Mapping[str, Any] = {**config, **self.mapping("text_config")}

    def mapping(self, name: str) -> Mapping[str, Any]:
        """The object in a field of the top level, empty where there is none."""
        value = self.top.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise DraftConfigError(name, value, "an object")
        return value

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

    def optional(self, name: str, read: Callable[..., T], *bounds: int) -> T | None:
        """A DFlash field as `as_int`, `as_float` or `as_bool` reads it; None where the config has none."""
        found = self.draft(name)
        return None if found[1] is None else read(found, *bounds)

    def check_whole_vocabulary(self, vocab_size: int, why: str, family: str) -> None:
        """Raise DraftConfigError for a draft of this family whose head has other tokens than its vocabulary."""
        field, size = self.draft("draft_vocab_size")
        if size not in (None, vocab_size):
            fix = f"Correct {field} in the draft's config.json, or serve a {family} draft of the whole vocabulary."
            raise DraftConfigError(field, size, f"none, or vocab_size={vocab_size}: {why}", fix)


def class_default(fields: Fields, name: str) -> Any:
    """The value of field `name` in the transformers class of the draft's `model_type` (Qwen3's without one).

    The class that wrote a config.json made the layers that were trained, and every server reads the file through
    that class. Raises DraftConfigError where transformers has no such class, or the class no such field.
    """
    model_type = fields.text.get("model_type") or "qwen3"
    if model_type in _COMMON:
        return _COMMON_DEFAULTS[name]
    # Imported here: most configs leave nothing out.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    value = None
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        try:
            value = getattr(CONFIG_MAPPING[model_type](), name, None)
        except (ValueError, OSError) as error:
            raise DraftConfigError(
                "model_type", model_type, f"the type of a language model ({error})", "Correct it in config.json."
            ) from error
    if value is None:
        expected = f"its value, which transformers does not fill in for model_type={model_type!r}"
        fix = f"Add {name} (the one that the draft was trained with) to its config.json."
        raise DraftConfigError(name, None, expected, fix)
    return value


def as_int(found: tuple[str, Any], minimum: int, maximum: int = LARGEST) -> int:
    """The integer of a found field (whole floats are not integers), from `minimum` to `maximum`, both included.

    Raises DraftConfigError naming the field, as the next two do.
    """
    field, value = found
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        too_large = isinstance(value, int) and value > maximum
        expected = f"an integer of at most {maximum}" if too_large else f"an integer >= {minimum}"
        raise DraftConfigError(field, value, expected)
    return value


def as_float(found: tuple[str, Any]) -> float:
    """The number of a found field, which must be positive and one that a float holds."""
    field, value = found
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= float_info.max:
        raise DraftConfigError(field, value, "a positive number")
    return float(value)


def as_bool(found: tuple[str, Any]) -> bool:
    """The true or false of a found field (numbers and strings are neither)."""
    field, value = found
    if not isinstance(value, bool):
        raise DraftConfigError(field, value, "true or false")
    return value


def both_sizes(fields: Fields, first: str, second: str, whose: str) -> tuple[int, int]:
    """Two sizes of which a draft has neither without the other. Raises DraftConfigError naming the one that is
    missing or malformed."""
    found = [fields.draft(first), fields.draft(second)]
    for (field, value), (other, beside) in (found, reversed(found)):
        if not value:
            field = field if value is not None else f"dflash_config.{field}"
            expected = f"its value beside {other}={shown(beside)}: {whose} has both"
            fix = f"Add {field} (the one it was trained with) to the draft's config.json."
            raise DraftConfigError(field, value, expected, fix)
    return as_int(found[0], 1), as_int(found[1], 1)
