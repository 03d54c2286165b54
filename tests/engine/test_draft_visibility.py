"""A server whose draft would see other keys than its config names does not start."""

from __future__ import annotations

import pytest

from tests.support import scheduler_hooks
from tests.support.engines import serve
from tests.support.kits import DRAFT, TARGET


@pytest.mark.slow
@pytest.mark.full
def test_a_server_whose_backend_ignores_causality_does_not_start(tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "causal")
    with pytest.raises(Exception, match="row 0 of a block does not see row 1's key") as caught:
        with serve(TARGET, DRAFT, environment=environment):
            pass
    assert "--speculative-draft-attention-backend='torch_native'" in str(caught.value)
