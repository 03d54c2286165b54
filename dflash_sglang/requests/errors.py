"""What a client reads when a request of its is refused."""

from __future__ import annotations

import reprlib

LONGEST = 120  # characters of a client's value that a message repeats


class RequestError(ValueError):
    """A request that cannot be served; the message goes to its client, with HTTP status 400."""


def shown(value: object) -> str:
    """A client's value as a message repeats it: its repr on one line, `LONGEST` characters at most."""
    text = reprlib.repr(value)  # never makes the repr of a long list or string as a whole
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def unexpected(field: str, value: object, expected: str) -> RequestError:
    """The error of a field whose value cannot be served."""
    return RequestError(f"{field}={shown(value)}: expected {expected}. Change it.")
