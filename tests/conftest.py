"""Defaults of every test run, set before anything imports torch or SGLang."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings  # noqa: E402

# Time says nothing on a busy machine: the first example imports SGLang.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
