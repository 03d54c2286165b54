"""PluginConfig: the operator's settings from DFLASH_SGLANG_CONFIG, checked against a schema."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from dflash_sglang.settings.schema import CONFIG_ENV, PluginConfigError, known_settings
from dflash_sglang.settings.width import AUTO, WidthConfig

REQUIRE_ENV = "DFLASH_SGLANG_REQUIRE"

ContextKVForm = Literal["auto", "stacked", "per_layer"]
DraftKV = Literal["auto", "whole"]
DraftHeadForm = Literal["auto", "as_is", "fp8"]
Profile = Sequence[float]


class Texts(NamedTuple):
    """A file of texts that the target is said to write, see `verify.simulated_texts`."""

    path: Path


SimulatedAcceptance = Sequence[Profile] | Path | Texts
ProposalKind = Literal["auto", "argmax", "drawn"]
PrefillServers = Literal["same", "any"]
Copy = Literal["auto", "off", "block", 64]


@dataclass(frozen=True)
class PluginConfig:
    """Settings of the plugin: docs/reference/settings.md has what each of their values does."""

    context_kv: ContextKVForm = "auto"  # how context K and V are projected
    draft_kv: DraftKV = "auto"  # rows that the draft's KV pool keeps
    draft_head: DraftHeadForm = "auto"  # weights of the head that proposes
    proposals: ProposalKind = "auto"  # to sampled requests; auto: drawn from a draft with a joint distribution
    # Measurements without a trained draft: the chance of proposal 1, 2, ... once those before it are accepted, of
    # requests by their rows modulo the number of lists; or a file of `verify.record` or `verify.simulated_texts`.
    simulated_acceptance: SimulatedAcceptance | None = None
    width: WidthConfig = WidthConfig()
    copy: Copy = "auto"  # proposals from the text of a request; auto: as 64 as far as the launch serves it
    prefill: PrefillServers = "same"  # from which a decode server takes requests
    accept_patches: tuple[str, ...] = ()  # rows of the table of patches, applied where SGLang's source differs

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PluginConfig:
        """From DFLASH_SGLANG_CONFIG: inline JSON, or the path of a JSON file; unset gives the defaults."""
        return cls.from_mapping(decoded((os.environ if environ is None else environ).get(CONFIG_ENV, "")))

    @classmethod
    def from_mapping(cls, values: object) -> PluginConfig:
        """From a decoded JSON object. Raises PluginConfigError naming the key and what is known."""
        checked = known_settings(values, cls, CONFIG_ENV)
        return cls(**{key: _checked(key, value) for key, value in checked.items()})

    def draws(self, joint: bool) -> bool:
        """Whether proposals to sampled requests are drawn. ``joint``: the draft has a joint distribution."""
        return joint if self.proposals == "auto" else self.proposals == "drawn"


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise PluginConfigError for a DFLASH_SGLANG_* variable, or a value of one, that does not exist."""
    known = (CONFIG_ENV, REQUIRE_ENV)
    for name, value in environ.items():
        if name.startswith("DFLASH_SGLANG_") and name not in known:
            raise PluginConfigError(
                f"{name}={value!r}: unknown variable. Known: {', '.join(known)}. Correct it, or unset it."
            )
    value = environ.get(REQUIRE_ENV, "0").strip()
    if value not in ("", "0", "1"):
        raise PluginConfigError(f"{REQUIRE_ENV}={value!r}: expected 1 (require this worker) or 0.")
    PluginConfig.from_env(environ)


def decoded(source: str) -> object:
    """A value of DFLASH_SGLANG_CONFIG as JSON, an empty object where it is empty. Raises PluginConfigError."""
    source = source.strip()
    text = source if not source or source.startswith("{") else _read(source)
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise PluginConfigError(f"{CONFIG_ENV}={source!r} is not JSON: {error}.") from error


def required() -> bool:
    """Whether DFLASH_SGLANG_REQUIRE=1: DFLASH ends start-up unless this package's worker runs it."""
    check_environment(os.environ)
    return os.environ.get(REQUIRE_ENV, "").strip() == "1"


def _checked(key: str, value: Any) -> Any:
    if key == "accept_patches":
        return _names(value)
    if key == "simulated_acceptance":
        return _simulated(value)
    if key == "width":
        return _width(value)
    choices = get_args(get_type_hints(PluginConfig)[key])
    if value not in choices:
        raise PluginConfigError(
            f"{CONFIG_ENV}: {key}={value!r} ({type(value).__name__}): expected one of "
            f"{', '.join(map(str, choices))}."
        )
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise PluginConfigError(
            f"{CONFIG_ENV}: accept_patches={value!r}: expected a list of names; "
            "`dflash-sglang patches` prints them."
        )
    return tuple(value)


def _simulated(value: Any) -> SimulatedAcceptance:
    """A record or texts; or one list of probabilities, one for each proposal of a block, or several."""
    if isinstance(value, dict):
        kind, path = next(iter(value.items()), ("", None))
        if (
            len(value) > 1
            or kind not in ("record", "texts")
            or not isinstance(path, str)
            or not Path(path).is_file()
        ):
            raise PluginConfigError(
                f'{CONFIG_ENV}: simulated_acceptance={value!r}: expected {{"record": PATH}} or {{"texts": PATH}}, '
                "the path of a file; `python -m bench.record` and `python -m bench.copies` write one."
            )
        return Path(path) if kind == "record" else Texts(Path(path))
    lists = value if isinstance(value, list) and value and all(isinstance(one, list) for one in value) else [value]
    for one in lists:
        numbers = one if isinstance(one, list) else []
        if not numbers or not all(type(p) in (int, float) and 0 <= p <= 1 for p in numbers):
            raise PluginConfigError(
                f"{CONFIG_ENV}: simulated_acceptance={value!r}: expected a list of probabilities, 0 to 1, "
                'one for each proposal of a block, a list of such lists, {"record": PATH} or {"texts": PATH}.'
            )
    return tuple(tuple(map(float, one)) for one in lists)


def _width(value: Any) -> WidthConfig:
    """An object of WidthConfig's settings, or only its `fixed`, or "auto"."""
    if value == AUTO:
        return WidthConfig()
    return WidthConfig.from_mapping(value if isinstance(value, dict) else {"fixed": value})


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PluginConfigError(
            f"{CONFIG_ENV}={path!r} is neither inline JSON (in braces) nor a readable file: {error}."
        ) from error
