"""Every metrics flag of SGLang at once, on a server with graphs: it starts, answers, and each sink tells of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import zmq

from tests.support.engines import accepted_proposals, greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = [list(text.encode()) for text in held_out_prompts()[:8]]
NEW_TOKENS = 64


def total(exposed: str, series: str) -> float:
    """The sum of a series' samples on a `/metrics` page, over all labels."""
    samples = re.findall(rf"^{re.escape(series)}(?:\{{[^}}]*\}})? (\S+)$", exposed, re.MULTILINE)
    assert samples, f"{series} is not on the page"
    return sum(map(float, samples))


def test_all_metrics_flags_at_once_tell_of_the_same_requests(tmp_path: Path) -> None:
    iterations, directory = f"ipc://{tmp_path / 'iterations'}", tmp_path / "requests"
    flags = dict(
        enable_metrics=True,
        enable_mfu_metrics=True,
        enable_forward_pass_metrics=True,
        forward_pass_metrics_ipc_name=iterations,
        export_metrics_to_file=True,
        export_metrics_to_file_dir=str(directory),
        enable_request_time_stats_logging=True,
        decode_log_interval=1,
        cuda_graph_max_bs_decode=8,
    )
    environment = {**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}
    with serve(TARGET, DRAFT, environment=environment, **flags, **ON_DEVICE) as server, zmq.Context() as context:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(f"{iterations}.0")
        subscriber.subscribe(b"")
        for _ in range(2):  # a subscriber hears what is sent once it is known
            answers = server.generate(input_ids=PROMPTS, sampling_params=greedy_params(NEW_TOKENS))
        assert all(len(answer["output_ids"]) == NEW_TOKENS for answer in answers)
        assert sum(count * proposals for proposals, count in accepted_proposals(answers).items()) > 0
        exposed = server.text("/metrics")
        asked = 2 * len(PROMPTS)
        assert total(exposed, "sglang:generation_tokens_total") >= asked * NEW_TOKENS
        assert total(exposed, "sglang:estimated_flops_per_gpu_total") > 0
        assert total(exposed, "dflash_committed_tokens_total") >= asked * (NEW_TOKENS - 1)
        assert subscriber.poll(5000), "no iteration was published"
        assert len(subscriber.recv_multipart()) == 3  # topic, number, message
        subscriber.close(linger=0)
        told = [json.loads(line) for path in directory.glob("*.log") for line in path.read_text().splitlines()]
        assert len(told) >= asked
        assert "Traceback" not in server.log_text()
