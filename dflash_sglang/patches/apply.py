"""Put rows of the table into effect. A row that cannot act ends start-up by its name."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_sglang.patches.table import BY_NAME, PATCHES, Patch, Process
from dflash_sglang.sglang_names.probe import SGLangMismatchError

_wanted: list[Patch] = []  # hooks that this process has asked for


def register(process: Process) -> None:
    """Registers the hooks of a process with SGLang, which applies them in `HookRegistry.apply_hooks()`.

    Raises SGLangMismatchError that names every hook without a target. The other hooks are registered even then.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    lost, source = [], HookSource(plugin_name="dflash_sglang", dist_name="dflash-sglang")
    for patch in PATCHES:
        if patch.process != process or patch.kind != "hook around":
            continue
        hook = pkgutil.resolve_name(patch.by)
        if patch not in _wanted:
            _wanted.append(patch)
        if _resolved(patch.target) is None:
            lost.append(patch)
        else:
            HookRegistry.register(patch.target, hook, HookType.AROUND, source=source)
    _raise_for(lost, "SGLang has no such function")


def registered() -> bool:
    """Whether the plugin ran in this process."""
    return bool(_wanted)


def apply(process: Process) -> None:
    """Registers and applies the hooks of a process. Raises SGLangMismatchError where one does not act."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    register(process)
    HookRegistry.apply_hooks()
    verify()


def verify() -> None:
    """Raises SGLangMismatchError that names every wanted hook that does not act: SGLang only logs a failure."""
    _raise_for([patch for patch in _wanted if not _acts(patch)], "SGLang did not apply the hook")


def replace(name: str, owner: Any, value: Any) -> None:
    """Replaces the attribute of the row `name` on SGLang's object, class or module `owner`.

    Raises SGLangMismatchError where `owner` has no such attribute, or keeps another value.
    """
    patch = BY_NAME[name]
    if not hasattr(owner, patch.attribute):
        _raise_for([patch], f"{_called(owner)} has no attribute {patch.attribute}")
    setattr(owner, patch.attribute, value)
    if getattr(owner, patch.attribute) is not value:
        _raise_for([patch], f"{_called(owner)} does not take another {patch.attribute}")


@contextmanager
def replaced(name: str, owner: Any, value: Any) -> Iterator[None]:
    """The same, until the end of the block."""
    before = getattr(owner, BY_NAME[name].attribute, None)
    replace(name, owner, value)
    try:
        yield
    finally:
        replace(name, owner, before)


def _acts(patch: Patch) -> bool:
    """Whether the hook is in the chain of wrappers that SGLang put in its target's place."""
    hook, function = pkgutil.resolve_name(patch.by), _resolved(patch.target)
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _resolved(dotted: str) -> Any:
    try:
        return pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return None


def _called(owner: Any) -> str:
    return getattr(owner, "__name__", None) or type(owner).__name__


def _raise_for(patches: list[Patch], reason: str) -> None:
    if patches:
        rows = "".join(f"\n  {patch.name}: {patch.target}: {reason}" for patch in patches)
        raise SGLangMismatchError(f"patches that do not act on this SGLang:{rows}\n{SGLangMismatchError.remedy()}")
