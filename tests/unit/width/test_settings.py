"""What an operator sets of the width policy, and what a request may ask of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.patches.request_checks import validate_dflash_request
from dflash_sglang.requests.checks import request_error
from dflash_sglang.requests.errors import LONGEST, RequestError, shown
from dflash_sglang.requests.limits import width_bounds
from dflash_sglang.settings.schema import PluginConfigError
from dflash_sglang.settings.width import WidthConfig


def test_widths_follow_the_block() -> None:
    for config, block, widths in (
        (WidthConfig(), 16, (1, 2, 4, 6, 8, 12, 16)),
        (WidthConfig(), 10, (1, 2, 4, 6, 8, 10)),
        (WidthConfig(widths=(4, 8)), 8, (1, 4, 8)),
        (WidthConfig(fixed=8), 16, (8,)),
        (WidthConfig(fixed="block"), 16, (16,)),
        (WidthConfig(fixed=1), 16, (1,)),
        (WidthConfig(fixed="tree 32"), 16, (16,)),
    ):
        assert config.states(block) == widths
    fixed = WidthConfig(fixed="tree 32")
    assert (fixed.trees, WidthConfig().trees) == ((32,), (16, 32, 64))
    assert WidthConfig.from_mapping({"trees": [64, 16, 16]}).trees == (16, 64)
    assert replace(fixed, memory_reserve=1.0).trees == (32,)
    widest = [
        WidthConfig.from_mapping(of).widest for of in ({"widths": [4, 16]}, {"fixed": 16}, {"fixed": "block"})
    ]
    assert widest == [16, 16, 1], "what start-up compares with the block"


@pytest.mark.parametrize(
    "values, message",
    [
        ([], "width: expected a JSON object, found list"),
        ({"width": 4}, "unknown key 'width'. Known keys: widths, fixed, trees"),
        ({"widths": []}, r"widths=\[\] \(list\): expected a list of whole numbers"),
        ({"widths": [4, "8"]}, r"widths='8' \(str\): expected whole numbers from 1"),
        (
            {"fixed": 0},
            r"fixed=0 \(int\): expected a whole number from 1 to the draft's block, 'block' for that, or",
        ),
        ({"fixed": "tree"}, r"fixed='tree' \(str\): expected .* or 'tree N'"),
        ({"fixed": "tree 65"}, r"fixed=65 \(int\): expected whole numbers from 2 to 64"),
        ({"fixed": 4, "trees": [16]}, r"fixed=4 and trees=\[16\]: give one of them"),
        ({"trees": 16}, r"trees=16 \(int\): expected a list of whole numbers from 2 to 64"),
        ({"trees": [16, 1]}, r"trees=1 \(int\): expected whole numbers from 2 to 64"),
        ({"fixed": True}, r"fixed=True \(bool\)"),
        ({"fixed": 4, "widths": [4, 8]}, "give one of them"),
        *(
            ({key: value}, rf"width: {key}=.*: expected a whole number from 1 on")
            for key in ("highest_min_width", "lowest_max_width")
            for value in (0, "4", 1.5, True, None)
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_was_expected(values: Any, message: str) -> None:
    with pytest.raises(PluginConfigError, match=message):
        WidthConfig.from_mapping(values)


def request(**custom_params: Any) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom_params),
        token_indices_to_pool=None,
        return_sampling_mask=False,
    )


@pytest.mark.parametrize(
    "asked, message",
    [
        (3, r"dflash=3: expected \{\"min_width\": N, .*\"copy\": false\}, one or more of them, and nothing else"),
        ({"width": 3}, "expected"),
        ({}, r"dflash=\{\}: expected"),
        ({"min_width": 5, "max_width": 4}, r"min_width=5: expected at most max_width=4. Lower it, or raise"),
        ({"max_width": 3, "other": 1}, "and nothing else"),
        *(
            ({name: value}, rf"{name}=.*: expected a whole number from 1")
            for name in ("min_width", "max_width")
            for value in (0, "4", 2.5, None, True)
        ),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_what_was_expected(asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        width_bounds({"dflash": asked})
    assert "custom_params dflash" in validate_dflash_request(lambda *_: None, request(dflash=asked), True)
    assert validate_dflash_request(lambda *_: "SGLang's", request(dflash=asked), True) == "SGLang's"


@pytest.mark.parametrize(
    "settings, allowed, refused",
    [
        ({}, [(1, None), (None, 1), (1, 4), (None, 2**70)], [(2, None), (2**70, None), (4, 4)]),
        ({"highest_min_width": 8}, [(8, None), (8, 8), (None, 1)], [(9, None), (16, 16)]),
        ({"lowest_max_width": 8}, [(None, 8), (1, 9)], [(None, 7), (1, 1)]),
        ({"highest_min_width": 4, "lowest_max_width": 4}, [(4, 4)], [(3, 3), (5, 5)]),
    ],
)
def test_a_request_widens_or_narrows_steps_as_far_as_the_operator_allows(
    settings: dict[str, int], allowed: list[Any], refused: list[Any]
) -> None:
    def answer(least: int | None, most: int | None) -> str | None:
        bounds = {name: width for name, width in (("min_width", least), ("max_width", most)) if width is not None}
        return request_error(request(dflash=bounds), WidthConfig.from_mapping(settings))

    assert [answer(*bounds) for bounds in allowed] == [None] * len(allowed)
    for bounds in refused:
        message = answer(*bounds)
        assert message is not None and "DFLASH_SGLANG_CONFIG" in message
        assert any(f'{setting} of "width"' in message for setting in ("highest_min_width", "lowest_max_width"))


def test_an_error_does_not_repeat_what_a_client_sent_at_any_length() -> None:
    lists, objects = [[["y" * 99] * 99] * 99] * 99, {str(n): {"z" * 99: n} for n in range(10**4)}
    for value in ("x" * 10**6, lists, objects, 10**4000):
        assert len(shown(value)) <= LONGEST
        for asked in (value, {"min_width": [value]}, {"x" * 10**6: 1}, {"min_width": 10**4000, "max_width": 3}):
            with pytest.raises(RequestError) as refused:
                width_bounds({"dflash": asked, "other": value})
            assert len(str(refused.value)) < 400 and "expected" in str(refused.value)


def test_a_request_that_sglang_would_answer_wrongly_is_refused_by_field() -> None:
    streaming = SimpleNamespace(streaming=True)
    for pool, mask, session, message in (
        ([3], True, streaming, "score_extraction_token: expected none with DFLASH"),
        (None, True, streaming, "return_sampling_mask: expected no streaming session"),
        (None, True, SimpleNamespace(streaming=False), None),
        (None, True, None, None),
    ):
        asked = request()
        asked.token_indices_to_pool, asked.return_sampling_mask, asked.session = pool, mask, session
        refused = request_error(asked, WidthConfig())
        assert refused is None if message is None else refused.startswith(message)
