"""PluginConfig: the operator's settings from DFLASH_SGLANG_CONFIG, checked against a schema."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dflash_sglang.settings.schema import CONFIG_ENV, PluginConfigError, known_settings
from dflash_sglang.settings.width import AUTO, WidthConfig

REQUIRE_ENV = "DFLASH_SGLANG_REQUIRE"
FORCED_ENV = "DFLASH_SGLANG_FORCED"  # read by `bench.forced` alone
CACHE_ENV = "DFLASH_SGLANG_CACHE"  # read by `pair.target` alone

ContextKVForm = Literal["auto", "stacked", "per_layer"]
DraftKV = Literal["auto", "whole"]
DraftHeadForm = Literal["auto", "as_is", "fp8"]
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
    known = (CONFIG_ENV, REQUIRE_ENV, FORCED_ENV, CACHE_ENV)
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
