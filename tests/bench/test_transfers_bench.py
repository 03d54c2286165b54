"""bench/transfers.py: bytes of configs and of counters, and times to first tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from bench.transfers import APART, bytes_per_token, claims, counted, transferred, wave

QWEN3_8B = dict(
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096
)
BEFORE = """# HELP sglang:kv_transfer_total_mb The total number of MB
sglang:kv_transfer_total_mb_count{rank="0"} 2.0
sglang:kv_transfer_total_mb_sum{rank="0"} 10.0
sglang:kv_transfer_latency_ms_sum{rank="0"} 8.0
sglang:kv_transfer_latency_ms_sum_of_others{rank="0"} 100.0
"""
AFTER = """sglang:kv_transfer_total_mb_count{rank="0"} 3.0
sglang:kv_transfer_total_mb_count{rank="1"} 3.0
sglang:kv_transfer_total_mb_sum{rank="0"} 1.1e+02
sglang:kv_transfer_latency_ms_sum{rank="0"} 28.0
"""


def test_bytes_of_a_token_are_those_of_its_keys_and_values_in_every_layer():
    assert bytes_per_token(QWEN3_8B) == 144 * 1024
    assert bytes_per_token({**QWEN3_8B, "num_hidden_layers": 5}) == 20 * 1024
    of_all_heads = dict(num_hidden_layers=1, num_attention_heads=4, hidden_size=64)
    assert bytes_per_token(of_all_heads, element=4) == 2 * 64 * 4


def test_what_was_sent_lies_between_two_looks_at_the_counters():
    assert counted(AFTER, "sglang:kv_transfer_total_mb_count") == 6 and counted(AFTER, "sglang:none") == 0
    sent = transferred(BEFORE, AFTER, tokens=1024)
    assert sent == {"requests": 4, "bytes_per_token": 102400.0, "milliseconds_per_request": 5.0}
    with pytest.raises(RuntimeError, match="counted no transfer"):
        transferred(BEFORE, BEFORE, tokens=1024)


@pytest.mark.parametrize(("sent", "ok"), [(164 * 1024, True), (166 * 1024, False)])
def test_a_prefill_server_may_send_hardly_more_than_rows(sent, ok):
    figures = {
        "kv_bytes_per_token": {"target": 144 * 1024, "draft": 20 * 1024},
        APART: {"1024 tokens, concurrency 1": {"transfer": {"bytes_per_token": sent}}},
    }
    assert [one["ok"] for one in claims(figures)] == [ok]


def test_a_wave_is_there_at_once_and_its_times_end_with_first_tokens():
    together, drained = threading.Barrier(3, timeout=10), list[int]()

    def ask(prompt: Sequence[int]) -> Iterator[str]:
        together.wait()
        yield "first"
        time.sleep(0.5)
        yield "rest"
        drained.append(len(prompt))

    times = wave(ask, [[1], [1, 2], [1, 2, 3]])
    assert max(times) < 400 and sorted(drained) == [1, 2, 3]
