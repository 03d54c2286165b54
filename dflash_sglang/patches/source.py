"""Fingerprints of SGLang's source, read from its files: nothing of SGLang is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

_DIGITS = 12  # hexadecimal, of a SHA-256
_UNCOUNTED = ("kind", "type_comment")  # fields of a syntax tree: u"" and comments


@functools.cache
def fingerprint(dotted: str, root: Path | None = None) -> str | None:
    """Hash of the syntax tree of a function or a class of SGLang's; None where SGLang has none of this name.

    dotted: such as "sglang.srt.module.Class.method". root: the folder of a `sglang` package, by default of the
    installed one. Comments, docstrings and layout do not count. Python 3.11 and 3.12 give the same hash.
    """
    file, names = _file_of(dotted, root or installed())
    if not names or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    found = _named(_cut(text, names), names) or _named(text, names)
    if not found:
        return None
    return hashlib.sha256("\n".join(map(_shown, found)).encode()).hexdigest()[:_DIGITS]


def installed() -> Path:
    """The folder of the installed `sglang` package."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang: expected an installed package. Install it.", name="sglang")
    return Path(spec.submodule_search_locations[0])


def _file_of(dotted: str, folder: Path) -> tuple[Path, list[str]]:
    """The file of the module in a dotted name, which may not exist, and the names inside of it."""
    _, *names = dotted.split(".")
    while names and (folder / names[0]).is_dir():
        folder /= names.pop(0)
    if names and (folder / f"{names[0]}.py").is_file():
        return folder / f"{names[0]}.py", names[1:]
    return folder / "__init__.py", names


def _named(text: str, names: list[str]) -> list[Any]:
    """The definitions of the last name inside of those before it: a property has two. Nothing of a broken text."""
    try:
        found: list[Any] = [ast.parse(text)]
    except SyntaxError:  # of a cut: a line of a string lies further to the left than the definition
        return []
    for name in names:
        found = [node for outer in found for node in outer.body if getattr(node, "name", None) == name]
    return found


def _cut(text: str, names: list[str]) -> str:
    """The lines of `_named` alone, inside of empty classes: to parse whole modules takes a second of a start."""
    lines, outer = text.split("\n"), []
    for depth, name in enumerate(names):
        indent = "    " * depth
        starts = re.compile(rf"{indent}(?:async def|def|class) {re.escape(name)}\b")
        inside = re.compile(rf"{indent}[ )\]#]|\s*$")  # a body, what closes a bracket, a comment, an empty line
        found = []
        for at, line in enumerate(lines):
            if not starts.match(line):
                continue
            first, last = at, at + 1
            while first and lines[first - 1].strip() and re.match(rf"{indent}[ @)#]", lines[first - 1]):
                first -= 1  # decorators
            while last < len(lines) and inside.match(lines[last]):
                last += 1
            found += lines[first:last]
        lines = found
        outer.append(f"{indent}class {name}:")
    return "\n".join([*outer[:-1], *lines])


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
