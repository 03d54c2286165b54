"""Plugins of SGLang for one server: entry points in a directory of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def installed(directory: Path, modules: Mapping[str, str]) -> str:
    """The PYTHONPATH of a server whose processes call `activate` of modules of this checkout, {plugin: module}."""
    name = next(iter(modules))
    info = directory / f"{name}-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    entries = [f"{plugin} = {module}:activate" for plugin, module in modules.items()]
    (info / "entry_points.txt").write_text("\n".join(("[sglang.srt.plugins]", *entries, "")))
    path = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, path))
