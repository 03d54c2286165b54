"""Which servers `engines.kept` shares, and which it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import engines

TARGET = Path("target")


class Started:
    """Servers in the order of their start."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self.flushed: list[Any] = []

    @contextmanager
    def serve(self, *paths: Any, **arguments: Any) -> Iterator[Any]:
        code: list[int | None] = [None]
        server = SimpleNamespace(arguments=arguments, process=SimpleNamespace(poll=lambda: code[0]), code=code)
        server.post = lambda path: self.flushed.append(server)
        self.alive.append(server)
        yield server
        self.alive.remove(server)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    servers = Started()
    monkeypatch.setattr(engines, "serve", servers.serve)
    monkeypatch.setattr(engines, "_kept", {})
    return servers


def test_a_server_of_the_same_flags_and_environment_is_shared_with_an_empty_cache(started):
    with engines.kept(TARGET, environment={"A": "1"}, page_size=16) as first:
        assert not started.flushed
    with engines.kept(TARGET, environment={"A": "1"}, page_size=16, tp_size=None) as again:
        assert again is first and started.flushed == [first]
    with engines.kept(TARGET, environment={"A": "2"}, page_size=16) as second:
        with engines.kept(TARGET, environment={"A": "1"}, page_size=1) as third:
            assert started.alive == [first, second, third]


def test_a_server_that_has_died_is_started_again(started):
    with engines.kept(TARGET) as first:
        first.code[0] = -9
    with engines.kept(TARGET) as anew:
        assert anew is not first


def test_the_ones_used_longest_ago_end_but_none_that_is_in_use(started):
    with engines.kept(TARGET, page_size=1) as used:
        for size in (2, 4, 8):
            with engines.kept(TARGET, page_size=size):
                pass
        assert [one.arguments["page_size"] for one in started.alive] == [1, 4, 8]
    assert used not in started.alive
    engines.end_kept()
    assert started.alive == []
