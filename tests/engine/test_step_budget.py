"""What the host does for a step with the default settings is no more than its numbers allow."""

from __future__ import annotations

import pytest

from tests.support import null_gpu


@pytest.mark.slow
def test_no_shape_of_step_makes_more_calls_operators_launches_or_copies_than_its_numbers(tmp_path):
    found = null_gpu.counted(tmp_path)
    assert {table.partition("-at-")[0] for table in found} == {*null_gpu.SHAPES}
    faults = null_gpu.faults(found)
    assert not faults, "\n".join(faults)
