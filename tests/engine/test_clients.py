"""The examples of docs/guide/clients.md and what SGLang's endpoints say of acceptance and refuse."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dflash_sglang import __version__
from dflash_sglang.demo.server import Server
from tests.support.engines import cpu_environment, serve
from training.pair import pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGE, SERVING = GUIDE / "clients.md", GUIDE / "serving.md"
LIMITS = {"dflash": {"max_width": 5}}
WIDTHS = {"DFLASH_SGLANG_CONFIG": json.dumps({"width": {"widths": [16, 6, 4, 1]}})}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its KV pool has the platform's default size."""
    target, draft = (Path(pair_directories()[name]) for name in ("target", "draft"))
    with serve(
        target, draft, environment=WIDTHS, skip_tokenizer_init=None, max_total_tokens=None, log_level="error"
    ) as started:
        yield started


def examples(language: str, url: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("http://localhost:30000", url) for block in blocks]


def test_the_documents_examples_print_an_accept_length(server: Server) -> None:
    blocks = examples("python", server.url)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        assert names["accept_length"] > 1 and str(names["accept_length"]) in printed.getvalue()
    *requests, worker = examples("bash", server.url)
    answers = [json.loads(subprocess.check_output(["bash", "-c", block])) for block in requests]
    native, completion, chat = answers
    assert 1 < native["meta_info"]["spec_accept_length"] <= 4
    for answer in (completion, chat):
        assert 1 < answer["sglext"]["spec_tokens_details"]["spec_accept_length"] <= 4
    assert subprocess.check_output(["bash", "-c", worker], text=True) == f"dflash_sglang {__version__}\n"


def test_the_worker_and_the_bound_of_the_pools_are_known_without_a_log_line(server: Server) -> None:
    """SGLang logs errors only, as in an Engine."""
    info = json.loads(server.text("/server_info"))
    (state,) = info["internal_states"]
    assert state["dflash_worker"] == f"dflash_sglang {__version__}" and "worker active" not in server.log_text()
    assert info["max_total_num_tokens"] == 8192


@pytest.mark.release
def test_the_engines_example_prints_accept_length_and_worker(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", SERVING.read_text(), re.MULTILINE | re.DOTALL)
    on_cpu = block.replace("sgl.Engine(", 'sgl.Engine(device="cpu", dtype="float32", ')
    target, draft = (pair_directories()[name] for name in ("target", "draft"))
    script = tmp_path / "example.py"
    script.write_text(f"TARGET, DRAFT = {target!r}, {draft!r}\n{on_cpu}")
    command = [sys.executable, str(script)]
    printed = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, timeout=400)
    *_, answer, worker = printed.stdout.splitlines()
    assert float(answer.split()[-1]) > 1 and worker == f"dflash_sglang {__version__}", printed.stderr[-2000:]


def steps(server: Server) -> dict[str, int]:
    return json.loads(server.text("/server_info"))["internal_states"][0]["dflash_width"]["steps"]


def test_a_max_width_between_served_widths_acts_as_the_lower_one(server: Server) -> None:
    before = steps(server)
    sampling = dict(temperature=0, max_new_tokens=64, custom_params=LIMITS)
    answer = server.generate(text="def fib(n):", sampling_params=sampling)
    assert answer["meta_info"]["spec_accept_length"] <= 4
    after = steps(server)
    assert [after[width] - before[width] for width in ("16", "6")] == [0, 0]


EXPECTED = "expected limits on drafting in "
NATIVE = "sampling_params.custom_params: {"
MESSAGES = [{"role": "user", "content": "a"}]
MISPLACED = [
    ("/generate", {"text": "a", "max_width": 4}, f"max_width: {EXPECTED}{NATIVE}"),
    ("/generate", {"text": "a", "custom_params": LIMITS}, f"custom_params.dflash: {EXPECTED}{NATIVE}"),
    ("/generate", {"text": "a", "sampling_params": {"max_width": 4}}, "unknown field `max_width`"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"custom_params": {"max_width": 4}}},
        "max_width=4: expected",
    ),
    ("/v1/completions", {"prompt": "a", "max_width": 4}, f"max_width: {EXPECTED}custom_params: {{"),
    ("/v1/chat/completions", {"messages": MESSAGES, "dflash": {}}, f"dflash: {EXPECTED}custom_params: {{"),
]


def test_a_misplaced_limit_is_refused(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    for path, body, message in MISPLACED:
        with pytest.raises(openai.BadRequestError) as refused:
            client.post(path, cast_to=object, body={"model": "default", **body} if "v1" in path else body)
        assert message in refused.value.response.text.replace('\\"', '"'), (path, body)
