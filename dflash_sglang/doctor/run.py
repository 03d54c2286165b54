"""Runs `dflash-sglang doctor`: reads a launch, lets the checks of start-up judge it, and prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang import __version__
from dflash_sglang.doctor import launch
from dflash_sglang.doctor.sizes import ASSUMES

GB = 1 << 30


def page(found: Mapping[str, Any]) -> str:
    """found: as `findings.examine` returns them."""
    lines = [f"dflash_sglang {__version__} doctor: {_outcome(found)}", ""]
    for title, entries in (
        ("refused", [refusal["text"] for refusal in found["refused"]]),
        ("suspicious", found["suspicious"]),
    ):
        if entries:
            lines += [f"{title}:", *(f"  - {entry}" for entry in entries), ""]
    rows = list(_facts(found))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join([*lines, *(f"{name:{width}}{value}" for name, value in rows)])


def _outcome(found: Mapping[str, Any]) -> str:
    if count := len(found["refused"]):
        return f"refused, {count} problem{'s' if count > 1 else ''}"
    if found["worker"] == launch.BUILT_IN:
        return f"SGLang's built-in worker would run: {found['why_built_in']}"
    return "fine" if not found["suspicious"] else "starts, but look at what is suspicious"


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name in ("target", "draft", "device"):
        yield name, found[name]
    vocabulary = found["vocabulary"]
    if (model := found["model"]) is not None:
        for name in ("architecture", "layers", "rope", "heads"):
            yield name, model[name]
        mask = None if vocabulary is None else vocabulary["mask_token"]
        yield "target layers", model["target_layers"]
        yield "mask token", f"{model['mask_token_id']}{'' if mask is None else f' {mask!r}'}"
        yield "own modules", model["own_modules"]
        yield "quantization", model["quantization"]
    if (serving := found["serving"]) is not None:
        ragged = ", ragged where attention can" if serving["ragged"] else ""
        yield "block", f"{serving['block']} (trained {model['block']})"
        yield "widths", f"{serving['widths']}{ragged}; fewer where memory is short"
        for name in ("draft_attention", "draft_weights", "context_kv", "head"):
            yield name.replace("_kv", "_KV").replace("_", " "), serving[name]
        yield "ranks", serving["ranks"]
        yield "memory of a rank", _memory(found["memory_per_rank"])
    if vocabulary is not None:
        yield "tokenizers", _tokenizers(vocabulary)
    if (even := found["break_even"]) is not None:
        least = f"needs an accept length above {even['accept_length']:.2f} at one request"
        yield "break-even", f"{least} (estimate: {ASSUMES})"
    differing = [name for name, state in found["patches"].items() if state != "matches"]
    fit = "all fit" if not differing else f"do not fit: {', '.join(differing)}"
    yield "patches", f"{len(found['patches'])}, {fit}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def _memory(memory: Mapping[str, Any]) -> str:
    kv = f"{memory['kv_bytes_per_token']} bytes a token"
    if memory["kv_bytes"] is not None:
        kept = f"{memory['max_total_tokens']} tokens"
        if memory["rings"] is not None:
            kept = f"{memory['rings']} rings of {memory['ring_tokens']} tokens"
        kv = f"{memory['kv_bytes'] / GB:.3f} GB for {kept}, {kv}"
    return f"draft weights {memory['weight_bytes'] / GB:.3f} GB, draft KV {kv}"


def _tokenizers(found: Mapping[str, Any]) -> str:
    if found["differing"] is None:
        return f"not compared: {found['why_not']}"
    if not found["differing"]:
        return "the same tokens"
    return f"{found['differing']} ids differ: {'; '.join(found['first'])}"


def doctor(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """options: `target`, `draft`, `json`; flags: of the launch. Returns the exit code: 0 fine, 1 refused, 2 cannot
    read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():  # of what SGLang has no kernels for on this machine
            warnings.simplefilter("ignore")
            launch.load_plugins()
            from dflash_sglang.doctor.findings import examine  # imports SGLang

            found = examine(options.target, options.draft, _without_command(flags))
    except launch.Unreadable as error:
        if options.json:
            print(json.dumps({"target": options.target, "draft": options.draft, "unreadable": str(error)}))
        print(f"dflash-sglang doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if options.json else page(found))
    return 1 if found["refused"] else 0


def _without_command(words: Sequence[str]) -> Sequence[str]:
    """The flags of a pasted command, which may begin with `python -m sglang.launch_server` or `sglang serve`."""
    if list(words[:2]) == ["sglang", "serve"]:
        return words[2:]
    python, module = Path(words[0]).name if words else "", "sglang.launch_server"
    if python == module:
        return words[1:]
    return words[3:] if python.startswith("python") and list(words[1:3]) == ["-m", module] else words
