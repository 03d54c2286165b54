"""The table of points where instruments act."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import seam


def test_every_point_is_a_method_of_the_package():
    for point in seam.POINTS:
        seam.wrap(point, lambda call: call)


def test_the_last_one_at_a_point_acts_around_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def method(self, number: int) -> int:
            return number

    monkeypatch.setitem(seam.POINTS, "point", "here:Owner.method")
    monkeypatch.setattr(seam, "resolve_name", lambda where: {"dflash_sglang.here:Owner": Owner}[where])

    def doubled(call: Any, self: Owner, number: int) -> int:
        return 2 * call(self, number)

    seam.around("point", doubled)
    seam.around("point", lambda call, self, number: call(self, number) + 1)
    assert Owner().method(3) == 7
