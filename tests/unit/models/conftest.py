"""SGLang's layers need a rank."""

import pytest

from tests.support import sglang_layers


@pytest.fixture(scope="session", autouse=True)
def rank() -> None:
    sglang_layers.start_rank()
