"""The draft's rotary embedding from the spellings of rope_theta, rope_scaling and rope_parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import (
    LARGEST,
    DraftConfigError,
    Fields,
    as_bool,
    as_float,
    as_int,
    class_default,
    shown,
)

_SCALING_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
_TRAINED = "original_max_position_embeddings"
_REQUIRED = {
    "linear": ("factor",),
    "yarn": ("factor", _TRAINED),
    "proportional": ("rope_dim",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _TRAINED),
}
# Read into fields of RopeSpec, or M-RoPE of a multimodal target: a draft only ever sees 1-D positions.
_NOT_SCALING = {
    *("rope_theta", "rope_dim", "partial_rotary_factor", "type", "rope_type"),
    *("mrope_section", "mrope_interleaved"),
}
# Types of configs that SGLang reads with a class of its own, for which a rope_theta at the top is plain RoPE. In
# transformers' class a rope belongs to a kind of layer.
_BASE_ALONE = ("laguna",)

Given = Mapping[str, Mapping[str, Any]]  # rope parameters by the field that they stand in


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the draft; always one-dimensional."""

    theta: float  # base
    scaling: dict[str, Any] | None  # arguments of the context extension with its `rope_type`, None for plain RoPE
    rotary_dim: int  # dimensions of a head that rotate: the leading ones, of `proportional` those of each half
    is_neox: bool  # halves are rotated against each other rather than interleaved pairs


def rope(fields: Fields, head_dim: int, whole_head: bool = False) -> RopeSpec:
    """RopeSpec of a draft. ``whole_head``: the trainer rotates all of a head, whatever the config says.

    `rope_parameters` is what transformers 5 calls `rope_scaling`. Where both are, their scaling has to agree, and
    the rest of `rope_scaling` wins, as in transformers. Where neither is, base and scaling are those of the class
    of the config's `model_type` (`class_default`), but of a Laguna draft the base at the top level and no scaling.

    `rope_dim` is the trained rotary width. Without one, a `partial_rotary_factor` at the top level counts. Inside
    `rope_parameters` or `rope_scaling` the factor was copied from the target: transformers' Qwen3, which published
    drafts are trained on, rotates the whole head. An `mrope_section` there says that the one at the top was, too.

    Raises DraftConfigError for a field that is missing, malformed or not servable.
    """
    given = {name: fields.text[name] for name in ("rope_scaling", "rope_parameters") if fields.text.get(name)}
    _check_flat(given)
    theta = _first(fields, given, "rope_theta")
    if not given and theta[1] is not None and fields.text.get("model_type") in _BASE_ALONE:
        given = {"rope_parameters": {"rope_theta": theta[1]}}
    if not given or theta[1] is None:
        implied = {"rope_parameters": class_default(fields, "rope_parameters")}
        _check_flat(implied)
        theta = theta if theta[1] is not None else _first(fields, implied, "rope_theta")
        given = given or implied
    scalings = [_scaling(fields, params, source) for source, params in given.items()]
    if scalings[0] != scalings[-1]:
        expected = f"none beside rope_parameters={shown(given['rope_parameters'])}, or the same scaling"
        fix = "Leave the one that the draft was trained with in its config.json."
        raise DraftConfigError("rope_scaling", given["rope_scaling"], expected, fix)
    return RopeSpec(
        theta=as_float(theta),
        scaling=scalings[0],
        rotary_dim=_rotary_dim(fields, given, head_dim, whole_head),
        is_neox=as_bool(fields.shape("rope_is_neox_style", fields.text.get("is_neox_style", True))),
    )


def _check_flat(given: Given) -> None:
    for source, params in given.items():
        if not isinstance(params, Mapping) or any(isinstance(value, Mapping) for value in params.values()):
            fix = f"Write one flat {source} into the draft's config.json; ropes per layer type are not supported."
            raise DraftConfigError(source, params, "one object with the rope parameters of every draft layer", fix)


def _first(fields: Fields, given: Given, name: str) -> tuple[str, Any]:
    for source, params in given.items():
        if params.get(name) is not None:
            return f"{source}.{name}", params[name]
    return fields.shape(name, None)


def _scaling(fields: Fields, params: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "mrope":
        kind = "default"
    if kind not in _SCALING_TYPES:
        expected = f"one of {', '.join(_SCALING_TYPES)}, whose frequencies stay as a sequence grows"
        fix = "Serve a draft trained with one of these; cached keys keep the rotation they were written with."
        raise DraftConfigError(f"{source}.rope_type", kind, expected, fix)
    if kind == "default":
        return None
    given = {key: value for key, value in params.items() if key not in _NOT_SCALING and value is not None}
    if kind in ("yarn", "llama3"):
        given |= _of_training(fields, params, kind)
    for key in _REQUIRED[kind]:
        as_float((f"{source}.{key}", given.get(key, params.get(key))))
    if kind == "proportional" and "factor" in given:
        raise DraftConfigError(f"{source}.factor", given["factor"], "none beside rope_type='proportional'")
    return {"rope_type": kind, **given}


def _of_training(fields: Fields, params: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The trained length, and yarn's factor where the config has null, by transformers' rules: a length beside the
    scaling wins over the one in it, and without any it is max_position_embeddings."""
    longest = fields.shape("max_position_embeddings", None)
    found = {_TRAINED: fields.text.get(_TRAINED) or params.get(_TRAINED) or longest[1]}
    if kind == "yarn" and params.get("factor", 0) is None:
        found["factor"] = as_float(longest) / as_float((_TRAINED, found[_TRAINED]))
    return found


def _rotary_dim(fields: Fields, given: Given, head_dim: int, whole_head: bool) -> int:
    field, dim = _first(fields, given, "rope_dim")
    if dim is None:
        copied = whole_head or any("mrope_section" in params for params in given.values())
        field, factor = ("head_dim", 1.0) if copied else fields.shape("partial_rotary_factor", 1.0)
        dim = int(min(head_dim * as_float((field, factor)), LARGEST))
    as_int((field, dim), 2)
    if dim > head_dim or dim % 2:
        raise DraftConfigError(field, dim, f"an even rotary width of at most head_dim={head_dim}")
    return dim
