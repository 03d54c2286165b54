"""A refused launch ends with the reason as its last lines, and shows no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import engines
from tests.support.tiny import make_pair
from training.pair import pair_directories

pytestmark = pytest.mark.slow

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
CONFIG, REQUIRE = "DFLASH_SGLANG_CONFIG", "DFLASH_SGLANG_REQUIRE"


def log_of(draft: Path, environment: Mapping[str, str]) -> str:
    """The log of a launch that ends by itself."""
    with engines._started(TARGET, draft, environment, engines.LAUNCH, False, {}) as server:
        assert server.process.wait(timeout=200) != 0
        return server.log_text()


def test_a_setting_that_does_not_exist_ends_the_launch_with_its_name() -> None:
    log = log_of(DRAFT, {CONFIG: json.dumps({"wdith": 4})})
    assert log.splitlines()[-1].startswith(f"{CONFIG}: unknown key 'wdith'. Known keys: context_kv, ")
    assert "Traceback" not in log


def test_a_draft_that_does_not_fit_ends_the_launch_with_the_list() -> None:
    log = log_of(TARGET, {})
    *_, headline, problem = log.splitlines()
    assert headline == "DFLASH cannot start:"
    assert problem.startswith(f"  - --model-path='{TARGET}': expected another checkpoint than the draft")
    assert "Traceback" not in log and "Load weight begin" not in log


def test_a_required_worker_that_would_not_run_ends_the_launch_with_the_reason(tmp_path: Path) -> None:
    _, foreign = make_pair(tmp_path, draft={"dflash_config": {"projector_type": "eagle"}})
    log = log_of(foreign, {REQUIRE: "1"})
    assert log.splitlines()[-1].startswith(f"{REQUIRE}=1: draft config dflash_config.projector_type='eagle': ")
    assert "Traceback" not in log


def test_a_refusal_of_a_scheduler_has_no_traceback_either() -> None:
    log = log_of(DRAFT, {"DFLASH_SGLANG_FORCED": "[0.5]"})
    assert "Scheduler hit an exception: DFLASH_SGLANG_FORCED=[0.5]: expected at least 15 probabilities" in log
    assert "Traceback" not in log


def test_dflash_without_a_gpu_and_without_the_platform_names_the_variable() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    command = [sys.executable, *engines.LAUNCH, *engines.as_flags(dict(model_path=TARGET))]
    command += engines.as_flags(dict(speculative_algorithm="DFLASH", speculative_draft_model_path=DRAFT))
    done = subprocess.run(
        command, env={**environment, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300
    )
    fix = "For a try on a CPU, set SGLANG_PLATFORM=dflash_cpu and add --device cpu --dtype float32."
    assert done.stderr.splitlines()[-2:] == [
        "DFLASH cannot start:",
        f"  - --device=None: expected a machine with a GPU, found none. {fix}",
    ]
    assert done.returncode == 1 and "Traceback" not in done.stderr
