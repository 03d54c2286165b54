"""Instruments for engine tests, inside the scheduler process of an engine under test.

A plugin of SGLang like the package's own. `hooked(directory, "oracle,poison")` gives the environment of a server
with these hooks: PYTHONPATH with the plugin's metadata (`install`), DFLASH_TEST_HOOKS, and in DFLASH_TEST_RECORDS
the directory of files that hooks read and write. `tests.support.hooks` lists the hooks; a hook's function says
what it does.

Here is also what a test does with the files: `record` before it asks, the others afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dflash_sglang.settings.plugin_config import REQUIRE_ENV
from tests.support import hooks

HOOKS_ENV = "DFLASH_TEST_HOOKS"
RECORDS_ENV = "DFLASH_TEST_RECORDS"
PLANTED = "planted"  # begins the rid of a request one of whose rows is to differ


def hooked(directory: Path, hooks: str, *modules: str, **environment: str) -> dict[str, str]:
    """The environment of a server of ours with these hooks, comma-separated, whose files lie in `directory`.

    modules: more plugins, as of `install`. environment: other variables, or these with another value.
    """
    path = install(directory, *modules)
    return {REQUIRE_ENV: "1", "PYTHONPATH": path, HOOKS_ENV: hooks, RECORDS_ENV: str(directory), **environment}


def install(directory: Path, *modules: str) -> str:
    """Write the plugin's metadata into `directory`; returns the PYTHONPATH that a server finds it on.

    modules: below `tests`, whose `activate()` is to run in the schedulers beside this one's. One that does not
    exist is a ModuleNotFoundError here; SGLang would only log it.
    """
    names = ("support.scheduler_hooks", *modules)
    for name in names:
        if find_spec(f"tests.{name}") is None:
            raise ModuleNotFoundError(f"tests.{name}: expected a module below tests that has `activate`")
    info = directory / "dflash_scheduler_hooks-0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash_scheduler_hooks\nVersion: 0.0\n")
    entries = [f"dflash_{one.rpartition('.')[2]} = tests.{one}:activate" for one in names]
    (info / "entry_points.txt").write_text("\n".join(("[sglang.srt.plugins]", *entries, "")))
    path = [str(directory), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, path))


def activate() -> None:
    """Entry point: applies the chosen hooks in the scheduler, before it serves."""
    chosen = [name for name in os.environ.get(HOOKS_ENV, "").split(",") if name]
    if chosen:
        _before("init_memory_pools", lambda: hooks.apply(chosen))
    if "host_lengths" in chosen:  # a flag that the package sets again while the worker is made
        _before("init_model_worker", _void_what_is_gathered)


def _before(step: str, run: Callable[[], None]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"sglang.srt.managers.scheduler.Scheduler.{step}", lambda scheduler: run(), HookType.BEFORE
    )


def _void_what_is_gathered() -> None:
    """SGLang's check under SGLANG_IS_IN_CI, which is read when its module is imported."""
    from sglang.srt.managers import overlap_utils

    overlap_utils._DEBUG_ASSERT = True
    check = overlap_utils._assert_nonneg_and_invalidate
    overlap_utils._assert_nonneg_and_invalidate = check._torchdynamo_orig_callable  # compiling takes long


def record(directory: Path, prompt: list[int] | str, output_ids: list[int]) -> None:
    """From now on the oracle proposes `output_ids` after `prompt`: its ids, or the rid of its request."""
    _record_path(directory, prompt).write_text(json.dumps(output_ids))


def forget(directory: Path) -> None:
    """The oracle proposes nothing any more."""
    for path in directory.glob("*.json"):
        path.unlink()


def recorded(*prompts: list[int] | str) -> list[int]:
    """In a scheduler: what was recorded for the first of these that has a record, else nothing."""
    paths = (_record_path(records(), prompt) for prompt in prompts)
    return next((json.loads(path.read_text()) for path in paths if path.exists()), [])


def _record_path(directory: Path, prompt: list[int] | str) -> Path:
    return directory / (hashlib.sha256(json.dumps(prompt).encode()).hexdigest() + ".json")


def records() -> Path:
    """In a scheduler: the directory of DFLASH_TEST_RECORDS."""
    return Path(os.environ[RECORDS_ENV])


def note(file: str, *rows: Any) -> None:
    """In a scheduler: appends rows to a file of JSON lines."""
    with (records() / file).open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def noted(directory: Path, file: str) -> list[Any]:
    """The rows of a file of JSON lines, but for one that is being written."""
    lines = (directory / file).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def features_at(directory: Path) -> dict[int, torch.Tensor]:
    """The features last captured at each position, [n_layers * hidden]; forgets them."""
    by_position = {}
    for path in sorted(directory.glob("*.features"), key=lambda path: int(path.stem)):
        positions, features = torch.load(path)
        by_position |= dict(zip(positions.tolist(), features, strict=True))
        path.unlink()
    return by_position


def states_of(directory: Path, rid: str) -> dict[int, list[torch.Tensor]]:
    """The recurrent states of a request, each [layers, ...], by the number of tokens that they have seen."""
    return {int(path.suffixes[-2][1:]): torch.load(path) for path in directory.glob(f"{rid}.*.states")}


def context_of(directory: Path, rid: str) -> torch.Tensor:
    """[2 * layers, tokens, heads, head_dim], K rows first: of the prompt of a request."""
    return torch.load(directory / f"{rid}.context")


def strays(directory: Path) -> dict[str, int]:
    """{rid: how many heads of rows have arrived as no forward has left them} of every request, under the hook
    "digests"."""

    def of_ranks(file: str) -> Iterator[tuple[str, dict[str, str]]]:
        for path in directory.glob(f"{file}.*.jsonl"):
            yield from noted(directory, path.name)

    prefilled: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rid, hashes in of_ranks("prefilled"):
        for place, found in hashes.items():
            prefilled[rid, place].add(found)
    arrived: dict[str, int] = defaultdict(int)
    for rid, hashes in of_ranks("arrived"):
        arrived[rid] += sum(found not in prefilled[rid, place] for place, found in hashes.items())
    return dict(arrived)


def borrowed(directory: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [n], the draft's embeddings of them [n, hidden], and the logits [n, vocab] that its head gives these."""
    return torch.load(directory / "borrowed")
