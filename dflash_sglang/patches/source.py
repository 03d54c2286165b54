"""Fingerprints of SGLang's source, read from its files: nothing of SGLang is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

_DIGITS = 12  # hexadecimal, of a SHA-256
_UNCOUNTED = ("kind", "type_comment")  # fields of a syntax tree: u"" and comments


@functools.cache
def fingerprint(dotted: str, root: Path | None = None) -> str | None:
    """Hash of the syntax tree of a function or a class of SGLang's; None where SGLang has none of this name.

    dotted: such as "sglang.srt.module.Class.method". root: the folder of a `sglang` package, by default of the
    installed one. Comments, docstrings and layout do not count. Python 3.11 and 3.12 give the same hash.
    """
    source, names = _source_of(dotted, root or installed())
    blocks = [source] if names else []
    for name in names:
        blocks = [found for block in blocks for found in _definitions(block, name)]
    if not blocks:
        return None
    trees = "\n".join(_shown(_parsed(block)) for block in blocks)
    return hashlib.sha256(trees.encode()).hexdigest()[:_DIGITS]


def installed() -> Path:
    """The folder of the installed `sglang` package."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang: expected an installed package. Install it.", name="sglang")
    return Path(spec.submodule_search_locations[0])


def _source_of(dotted: str, folder: Path) -> tuple[str, list[str]]:
    """The text of the module in a dotted name, empty without one, and the names inside of it."""
    _, *names = dotted.split(".")
    while names and (folder / names[0]).is_dir():
        folder /= names.pop(0)
    if names and (folder / f"{names[0]}.py").is_file():
        return _text(folder / f"{names[0]}.py"), names[1:]
    return _text(folder / "__init__.py") if (folder / "__init__.py").is_file() else "", names


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _definitions(block: str, name: str) -> Iterator[str]:
    """The text of each definition of a name in a module or class, with decorators: a property has two.

    Lines are looked at, and only what is asked for is parsed: files of SGLang have up to 8000 lines.
    """
    lines = block.splitlines(keepends=True)
    first = re.compile(rf"\s*(?:async )?(?:def|class) {re.escape(name)}\b")
    heads = [number for number, line in enumerate(lines) if name in line and first.match(line)]
    depth = min((_depth(lines[number]) for number in heads), default=0)
    for head in heads:
        if _depth(lines[head]) == depth:
            yield "".join(lines[_decorated(lines, head) : _end(lines, head)])


def _end(lines: list[str], head: int) -> int:
    """One past the last line of a definition: the next that is no deeper, and no comment, bracket or string."""
    depth, quotes = _depth(lines[head]), 0
    for number in range(head, len(lines)):
        line = lines[number]
        text = line.lstrip()
        if number > head and not quotes % 2 and text and _depth(line) <= depth and text[0] not in "#)]}":
            return number
        quotes += line.count('"""') + line.count("'''")
    return len(lines)


def _decorated(lines: list[str], head: int) -> int:
    """The first line of the decorators above a definition, its own without."""
    first = head
    for number in range(head - 1, -1, -1):
        line = lines[number]
        text = line.lstrip()
        if not text or _depth(line) < _depth(lines[head]):
            break
        if _depth(line) == _depth(lines[head]):
            if text[0] not in "@#)]}":
                break
            first = number if text[0] == "@" else first
    return first


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parsed(block: str) -> ast.stmt:
    indented = block[:1] in " \t"
    module = ast.parse(f"class _:\n{block}" if indented else block)
    return module.body[0].body[0] if indented else module.body[0]  # type: ignore[attr-defined]


def _shown(value: object) -> str:
    """As `ast.dump`, without what is empty: fields that a later Python adds are."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: getattr(value, name, None) for name in value._fields if name not in _UNCOUNTED}
    if (
        isinstance(value, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(value) is not None
    ):
        fields["body"] = value.body[1:]
    shown = (f"{name}={_shown(child)}" for name, child in fields.items() if child not in (None, []))
    return f"{type(value).__name__}({','.join(shown)})"
