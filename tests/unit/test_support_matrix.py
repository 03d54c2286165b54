"""The page of the tests behind the support matrix is what their marks say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import sglang_layers as layers


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(layers.DEVICE != "cpu", reason="the page is of a machine without a GPU, where the suite runs")
def test_the_page_is_what_the_tests_say():
    run = [sys.executable, "-m", "tests.support.support_matrix", "--check"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
