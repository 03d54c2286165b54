"""`dflash-sglang bench --profile`: a trace taken apart, and its table."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from dflash_sglang.bench import profile, table, trace
from dflash_sglang.demo.progress import Progress
from tests.support.bench_runs import kernel, rows_of, steps


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "1763-TP-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": steps(3)[::-1]}, file)
    return path


def test_a_trace_is_split_into_verify_draft_other_kernels_and_gaps(trace_file):
    whole = trace_file.read_bytes()
    trace_file.write_bytes(whole[:-20])
    with pytest.raises(trace.TraceError, match="no complete trace"):
        profile.wait_for_trace(trace_file.parent, Progress(io.StringIO()), timeout=0)
    trace_file.write_bytes(whole)
    path, step = profile.wait_for_trace(trace_file.parent, Progress(io.StringIO()), timeout=0)
    assert path == trace_file and step.steps == 2
    begun = [kernel(10 * i - 200, 9, -1) for i in range(4)]  # a verify graph that the profile began in
    assert trace.step_of([*begun, *steps(3)]) == step
    assert step.step_ms == pytest.approx(0.2)
    assert step.verify_ms == pytest.approx(0.090)
    assert step.draft_ms == pytest.approx(0.020)
    assert step.other_graphs_ms == pytest.approx(0.002)
    assert step.outside_ms == pytest.approx(0.019)  # 105 to 114, and 140 to 150: beside the draft is the draft's
    assert step.gaps_ms == pytest.approx(0.069) and step.gaps_in_graphs_ms == pytest.approx(0.009)
    assert step.idle == pytest.approx(0.345)
    assert step.kernels == {"verify": 10, "draft": 4, "other_graphs": 1, "outside": 3}
    assert step.outside_kernels == [("fill", 1, 20), ("accept", 1, 6), ("copy", 1, 5)]
    assert step.verify_span_ms == pytest.approx(0.099)  # 10 kernels and the gaps between them
    assert step.graph_kernels == {
        "verify": [("gemm", 10, 90)], "draft": [("gemm", 4, 20)], "other_graphs": [("one", 1, 2)],
    }  # fmt: skip
    text = table.step_table({"server": "ours, width 16", "concurrency": 8, **vars(step), "idle": step.idle})
    rows = rows_of(text)
    assert "the GPU is idle for 34.5%." in text and rows[2] == ["verify graph", "0.090", "45.0%", "10.0"]
    assert sum(float(row[1]) for row in rows[2:8]) == pytest.approx(0.2)


@pytest.mark.parametrize("events, lacks", [
    ([dict(cat="cpu_op", name="aten::mm", ts=0, dur=1)], "no kernel of a GPU"),
    ([kernel(10 * i, 5, i) for i in range(9)], "0 launches of a verify graph"),
    (steps(1), "1 launches of a verify graph"),
])  # fmt: skip
def test_a_trace_without_whole_steps_says_what_it_lacks(events, lacks):
    with pytest.raises(trace.TraceError, match=lacks):
        trace.step_of(events)
