"""Defaults of every test run, set before anything imports torch or SGLang."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support import sglang_layers  # noqa: E402, F401  it names the platform before a test module imports SGLang

# Time says nothing on a busy machine: the first example imports SGLang.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Workers share the files (`--no-loadscope-reorder` keeps their order): those that take minutes come first, then
# others with servers, so that what is left over at the end is short.
LONGEST = """zoo kits lossless collectives parallel width_policy request_fields step_work draft_head demo plugin
serving recurrent_serving quantised kv_types""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(LONGEST)), item.path not in slow))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else []:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_runtest_setup() -> None:
    """A test draws the same numbers, whichever ran before it."""
    import torch

    torch.manual_seed(0)
