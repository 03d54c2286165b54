"""Defaults of every test run, set before anything imports torch or SGLang."""

import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support import sglang_layers  # noqa: E402, F401  it names the platform before a test module imports SGLang

# Time says nothing on a busy machine: the first example imports SGLang. Examples may share a test's fixtures.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("untimed")

# Workers share the files (`--no-loadscope-reorder` keeps their order): those that take minutes come first, then
# others with servers, so that what is left over at the end is short.
LONGEST = """oracle families zoo trees_and_copies recurrent_serving disaggregated mtp parallel rank_steps
collectives width_policy request_fields step_work draft_head demo plugin serving quantised kits""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(LONGEST)), item.path not in slow))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else []:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of each file that took ten or more, as `docs/internals/testing.md` adds them up by topic."""
    reports = [report for of_outcome in terminalreporter.stats.values() for report in of_outcome]
    seconds: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for file, duration in seconds.most_common():
        if duration >= 10:
            terminalreporter.write_line(f"{duration:6.0f} {file}")


def pytest_runtest_setup() -> None:
    """A test draws the same numbers, whichever ran before it."""
    import torch

    torch.manual_seed(0)
