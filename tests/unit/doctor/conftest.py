"""The doctor in the process of the tests."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from dflash_sglang import hooks
from dflash_sglang.doctor import launch, run
from training.pair import pair_directories

Examined = tuple[int, dict]  # exit code and JSON


@pytest.fixture(scope="module")
def _alone() -> Iterator[None]:
    """Without SGLang's plugins and the table of patches, which are the same for all launches.

    Flags are parsed once: SGLang's parser takes longer to build than all else.
    """
    import msgspec

    from dflash_sglang.doctor import findings
    from dflash_sglang.sglang_names import launcher

    parsed: dict[tuple[str, ...], object] = {}
    parse = launcher.prepare_server_args

    def parse_once(arguments: Sequence[str]) -> object:
        _, target, _, draft, *flags = arguments
        if tuple(flags) not in parsed:
            parsed[tuple(flags)] = parse(list(arguments))
        known = parsed[tuple(flags)]
        paths = {"model_path": target, "speculative_draft_model_path": draft}
        return type(known)(**{**msgspec.structs.asdict(known), **paths})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load_plugins", lambda: None)
        patch.setattr(launch, "plugin_refusal", lambda: None)
        patch.setattr(launcher, "prepare_server_args", parse_once)
        patch.setattr(findings, "states", dict)
        patch.setattr(hooks, "_resolved", None)
        for variable in ("DFLASH_SGLANG_REQUIRE", "DFLASH_SGLANG_CONFIG", "SGLANG_PLATFORM"):
            patch.delenv(variable, raising=False)
        level = logging.root.level
        yield
        logging.root.setLevel(level)  # which SGLang's parser sets to that of --log-level


@pytest.fixture
def examined(_alone: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., Examined]:
    """Runs the doctor on the packaged pair. flags: of the launch; changed: `target` or `draft`."""

    def examine(*flags: str, **changed: str) -> Examined:
        options = argparse.Namespace(**{**pair_directories(), **changed}, json=True)
        code = run.doctor(options, list(flags))
        return code, json.loads(capsys.readouterr().out)

    return examine
