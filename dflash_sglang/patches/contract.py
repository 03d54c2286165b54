"""The contract with SGLang is the source that the table's rows change, not the version."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from dflash_sglang import SGLANG_VERSION, __version__
from dflash_sglang.patches.source import fingerprint
from dflash_sglang.patches.table import BY_NAME, PATCHES, Patch
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfigError
from dflash_sglang.sglang_names.probe import SGLangMismatchError, installed_version

MATCHES, GONE, DIFFERS = "matches", "gone", "source differs"
Remark = tuple[int, str]  # a level of `logging`, and a line


def states(root: Path | None = None) -> dict[str, str]:
    """MATCHES, GONE or DIFFERS for each row. root: the folder of another `sglang` package."""
    return {patch.name: _state(patch, root) for patch in PATCHES}


@functools.cache
def check(accepted: tuple[str, ...] = ()) -> Sequence[Remark]:
    """Compares the table with the installed SGLang, before anything is changed.

    accepted: rows that the operator takes on trust where their source differs (`accept_patches`).

    Returns remarks for the log. Raises SGLangMismatchError that lists every other row that is gone or differs, and
    PluginConfigError for an accepted row that does not exist.
    """
    for name in accepted:
        if name not in BY_NAME:
            raise PluginConfigError(
                f"{CONFIG_ENV}: accept_patches: unknown patch {name!r}. Known patches: {', '.join(BY_NAME)}. "
                "Correct it."
            )
    found, version = states(), installed_version()
    trusted = [patch for patch in PATCHES if found[patch.name] == DIFFERS and patch.name in accepted]
    refused = [patch for patch in PATCHES if found[patch.name] != MATCHES and patch not in trusted]
    if refused:
        rows = "".join(f"\n  {patch.name}: {patch.source}: {found[patch.name]}" for patch in refused)
        raise SGLangMismatchError(
            f"dflash_sglang {__version__} does not fit sglang {version}: {len(refused)} of {len(PATCHES)} patches "
            f"change code that is not as in sglang {SGLANG_VERSION}:{rows}\n{SGLangMismatchError.remedy()} "
            f'A patch whose source differs can be taken on trust: {CONFIG_ENV}=\'{{"accept_patches": ["NAME"]}}\'.'
        )
    remarks = [
        (
            logging.WARNING,
            f"accept_patches: {patch.name}: {patch.source} differs from sglang {SGLANG_VERSION}'s. The patch is "
            "applied on trust.",
        )
        for patch in trusted
    ]
    if version != SGLANG_VERSION:
        fits = f"{len(PATCHES) - len(trusted)} of {len(PATCHES)} patches made for sglang {SGLANG_VERSION}"
        remarks.append((logging.INFO, f"dflash_sglang serves sglang {version}: its source fits {fits}."))
    return remarks


def _state(patch: Patch, root: Path | None) -> str:
    found = fingerprint(patch.source, root)
    if found is None:
        return GONE
    return MATCHES if found == patch.fingerprint else DIFFERS
