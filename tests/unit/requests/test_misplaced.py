"""Limits on drafting that stand where nothing reads them are refused, and no other field is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dflash_sglang.requests.checks import request_error
from dflash_sglang.requests.limits import misplaced
from dflash_sglang.settings.width import WidthConfig

NATIVE, OPENAI = "sampling_params.custom_params", "custom_params"
LIMITS: dict[str, Any] = {"dflash": {"max_width": 2}}


MISPLACED: list[
    tuple[Any, str, str | None]
] = [  # a request's body, where limits stand, the path that is not there
    ({"max_width": 2}, NATIVE, "max_width"),
    ({"min_width": 2}, OPENAI, "min_width"),
    ({"copy": False}, NATIVE, "copy"),
    ({"dflash": {"max_width": 2}}, OPENAI, "dflash"),
    ({"custom_params": LIMITS}, NATIVE, "custom_params.dflash"),
    ({"sampling_params": {"custom_params": LIMITS}}, OPENAI, "sampling_params.custom_params.dflash"),
    ({"extra_body": {"custom_params": LIMITS}}, OPENAI, "extra_body.custom_params.dflash"),
    ({"sampling_params": {"custom_params": LIMITS}}, NATIVE, None),
    ({"sampling_params": [{"custom_params": LIMITS}]}, NATIVE, None),
    ({"custom_params": LIMITS}, OPENAI, None),
    ({"custom_params": {"other": {"max_width": 2}}}, NATIVE, None),
    ({"messages": [{"max_width": 2}], "json_schema": {"max_width": 2}}, OPENAI, None),
    ([{"max_width": 2}], NATIVE, None),
]


def test_a_misplaced_limit_is_named_with_its_place_and_other_fields_are_left_alone() -> None:
    for body, place, path in MISPLACED:
        said = f'{path}: expected limits on drafting in {place}: {{"dflash": {{"max_width": N}}}}. Move it there.'
        assert misplaced(body, place) == (path and said), body


def refusal(custom_params: Any, processor: str | None = None) -> str | None:
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom_params),
        custom_logit_processor=processor,
        token_indices_to_pool=None,
        return_sampling_mask=False,
    )
    return request_error(request, WidthConfig())


def test_a_limit_beside_dflash_is_refused_unless_a_logit_processor_may_read_it() -> None:
    for field, shown, place in (("max_width", 2, '"max_width": N'), ("copy", False, '"copy": false')):
        expected = f'custom_params {field}={shown}: expected in {{"dflash": {{{place}}}}}. Move it there.'
        assert refusal({field: shown}) == expected
    assert refusal({"max_width": 2}, processor="...") is None and refusal(LIMITS) is None


def test_a_request_may_only_forbid_copies() -> None:
    for value in (True, 0, None, "false", [False]):
        assert refusal({"dflash": {"copy": value}}) == (
            f"custom_params dflash: copy={value!r}: expected false. Leave it out to let the server copy as it is "
            "set."
        )
    assert refusal({"dflash": {"copy": False, "max_width": 2}}) is None
