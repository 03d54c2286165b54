"""Limits on drafting that stand where nothing reads them are refused, and no other field is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.requests.checks import request_error
from dflash_sglang.requests.limits import misplaced
from dflash_sglang.settings.width import WidthConfig

NATIVE, OPENAI = "sampling_params.custom_params", "custom_params"
LIMITS: dict[str, Any] = {"dflash": {"max_width": 2}}


@pytest.mark.parametrize(
    ("body", "place", "path"),
    [
        ({"max_width": 2}, NATIVE, "max_width"),
        ({"min_width": 2}, OPENAI, "min_width"),
        ({"copy": False}, NATIVE, "copy"),
        ({"dflash": {"max_width": 2}}, OPENAI, "dflash"),
        ({"custom_params": LIMITS}, NATIVE, "custom_params.dflash"),
        ({"sampling_params": {"custom_params": LIMITS}}, OPENAI, "sampling_params.custom_params.dflash"),
        ({"extra_body": {"custom_params": LIMITS}}, OPENAI, "extra_body.custom_params.dflash"),
    ],
)
def test_a_misplaced_limit_is_named_with_its_place(body: dict, place: str, path: str) -> None:
    expected = f'expected limits on drafting in {place}: {{"dflash": {{"max_width": N}}}}. Move it there.'
    assert misplaced(body, place) == f"{path}: {expected}"


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"sampling_params": {"custom_params": LIMITS}}, NATIVE),
        ({"sampling_params": [{"custom_params": LIMITS}]}, NATIVE),
        ({"custom_params": LIMITS}, OPENAI),
        ({"custom_params": {"other": {"max_width": 2}}}, NATIVE),
        ({"messages": [{"max_width": 2}], "json_schema": {"max_width": 2}}, OPENAI),
        ([{"max_width": 2}], NATIVE),
    ],
)
def test_a_limit_in_its_place_and_other_fields_are_left_alone(body: Any, place: str) -> None:
    assert misplaced(body, place) is None


def request(custom_params: Any, processor: str | None = None) -> SimpleNamespace:
    sampling = SimpleNamespace(custom_params=custom_params)
    return SimpleNamespace(
        sampling_params=sampling,
        custom_logit_processor=processor,
        token_indices_to_pool=None,
        return_sampling_mask=False,
    )


def test_a_limit_beside_dflash_is_refused_unless_a_logit_processor_may_read_it() -> None:
    error = request_error(request({"max_width": 2}), WidthConfig())
    assert error == 'custom_params max_width=2: expected in {"dflash": {"max_width": N}}. Move it there.'
    assert request_error(request({"max_width": 2}, processor="..."), WidthConfig()) is None
    error = request_error(request({"copy": False}), WidthConfig())
    assert error == 'custom_params copy=False: expected in {"dflash": {"copy": false}}. Move it there.'
    assert request_error(request(LIMITS), WidthConfig()) is None


@pytest.mark.parametrize("value", [True, 0, None, "false", [False]])
def test_a_request_may_only_forbid_copies(value: Any) -> None:
    error = request_error(request({"dflash": {"copy": value}}), WidthConfig())
    assert error == (
        f"custom_params dflash: copy={value!r}: expected false. Leave it out to let the server copy as it is set."
    )
    assert request_error(request({"dflash": {"copy": False, "max_width": 2}}), WidthConfig()) is None
