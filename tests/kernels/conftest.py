"""Triton kernels run on a GPU, or on the CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`.

The interpreter has to be on before Triton is first imported, so these tests have a pytest run of their own.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(params=["torch", "triton"])
def twin(request, device) -> str:
    """Which form of a kernel is tested against the expected values."""
    if request.param == "triton":
        require_triton(device)
    return request.param


@pytest.fixture(scope="session")
def triton_runs(device) -> None:
    require_triton(device)


def require_triton(device: str) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set")
