"""The CPU platform: its attention against a dense reference, its operators, and where it is active."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.plugins.hook_registry import HookRegistry

from dflash_sglang.attention import dense
from dflash_sglang.platforms import cpu
from dflash_sglang.platforms.cpu import threads
from dflash_sglang.platforms.cpu.hooks import mask_dp_pad_moe_topk_ids, register_rank_hooks

HEADS, KV_HEADS, DIM = 4, 2, 8


def paged_rows(lens: list[int], page_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """req_to_token in pages scattered over a pool, requests in shuffled slots; past a row's end slot 0."""
    shuffle = random.Random(seed)
    pages = [-(-n // page_size) for n in lens]
    free = list(range(1, sum(pages) + 4))
    shuffle.shuffle(free)
    slots = (len(free) + 1) * page_size
    request_slots = shuffle.sample(range(len(lens) + 2), len(lens))
    req_to_token = torch.zeros(len(lens) + 2, max(lens) + 8, dtype=torch.int32)  # slot 0 is poisoned
    for row, n, count in zip(request_slots, lens, pages, strict=True):
        taken = [page * page_size + i for page in free[:count] for i in range(page_size)]
        del free[:count]
        req_to_token[row, :n] = torch.tensor(taken[:n])
    return req_to_token, torch.tensor(request_slots), slots


def visible_keys(q: int, context: int, causal: bool, window: int | None) -> list[int]:
    keys = range(q + 1) if causal else range(context)
    return [k for k in keys if window is None or abs(q - k) < window]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5),
    flags=st.tuples(*[st.booleans()] * 4),
    window=st.one_of(st.none(), st.integers(1, 12)),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 100),
)
def test_attention_equals_softmax_over_exactly_the_visible_keys(
    requests: list[tuple[int, int]], flags: tuple[bool, ...], window: int | None, page_size: int, seed: int
) -> None:
    uniform, causal, bfloat16, with_sinks = flags
    prefix_lens = [prefix for prefix, _ in requests]
    query_lens = [requests[0][1] if uniform else n for _, n in requests]
    lens = [p + n for p, n in zip(prefix_lens, query_lens, strict=True)]
    req_to_token, request_slots, slots = paged_rows(lens, page_size, seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    key, value = (torch.full((slots, KV_HEADS, DIM), float("nan"), dtype=dtype) for _ in range(2))
    for row, n in zip(request_slots.tolist(), lens, strict=True):
        used = req_to_token[row, :n].long()
        for cache in (key, value):
            cache[used] = torch.randn(n, KV_HEADS, DIM, generator=generator).to(dtype)
    query = torch.randn(sum(query_lens), HEADS, DIM, generator=generator).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "MAX_QUERIES", 4)  # prefills of 5 .. 9 queries are cut
        groups = dense.group_queries(req_to_token, request_slots, prefix_lens, query_lens)
    window_left = None if window is None else window - 1
    sinks = torch.randn(HEADS, generator=generator).to(dtype) if with_sinks else None
    options = dict(causal=causal, window_left=window_left, scale=0.3, sinks=sinks)
    got = dense.attend(query, key, value, groups, **options)

    expected = torch.empty_like(query, dtype=torch.float64)
    token = 0
    for row, prefix, n in zip(request_slots.tolist(), prefix_lens, query_lens, strict=True):
        for q in range(prefix, prefix + n):
            seen = req_to_token[row, visible_keys(q, prefix + n, causal, window)].long()
            k, v = (cache[seen].double().repeat_interleave(HEADS // KV_HEADS, 1) for cache in (key, value))
            scores = torch.einsum("hd,khd->hk", query[token].double(), k) * 0.3
            # A sink is a score more, of a key without a value.
            scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], dim=1)
            expected[token] = torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(seen)], v)
            token += 1
    torch.testing.assert_close(got.double(), expected, atol=3e-2 if bfloat16 else 1e-5, rtol=1e-2)


def test_experts_see_no_rows_that_pad_a_data_parallel_ranks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.dp_attention import _DpGatheredBufferWrapper as buffer

    monkeypatch.setattr(buffer, "_global_num_tokens_gpu", torch.tensor([1, 3, 0]))
    monkeypatch.setattr(buffer, "_local_dp_buffer_len", 3)
    chosen = torch.ones(9, 2, dtype=torch.int32)
    mask_dp_pad_moe_topk_ids(chosen)
    assert chosen[:, 0].tolist() == chosen[:, 1].tolist() == [1, -1, -1, 1, 1, 1, -1, -1, -1]
    unpadded = torch.ones(4, 2, dtype=torch.int32)
    mask_dp_pad_moe_topk_ids(unpadded)
    assert unpadded.min() == 1


def test_the_platform_is_active_only_where_it_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    assert cpu.activate() == "dflash_sglang.platforms.cpu.platform.CpuPlatform"


@pytest.mark.parametrize(("own", "siblings", "files", "expected"), [
    ({0, 1, 2, 3}, {}, {}, 4),
    ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, {}, 2),  # hyperthreads
    ({5, 7}, {}, {"cpu.max": "max 100000"}, 2),
    (set(range(64)), {}, {"cpu.max": "250000 100000"}, 2),
    (set(range(64)), {}, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    (set(range(8)), {}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ({0, 1}, {}, {"cpu.max": "50000 100000"}, 1),
])  # fmt: skip
def test_cores_are_the_physical_ones_that_affinity_and_container_allow(
    own: set[int], siblings: dict[int, str], files: dict[str, str], expected: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": of for cpu, of in siblings.items()
    }
    for name, text in (topology | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: own)
    assert threads.cores(tmp_path) == expected


@pytest.mark.parametrize(("variable", "cores", "ranks", "expected"), [
    (None, 2, (1, 1, 1, 1), 1), (None, 16, (1, 1, 1, 1), 15), (None, 16, (2, 1, 2, 1), 3),
    (None, 16, (1, 2, 2, 2), 7),
    (None, 2, (4, 1, 1, 1), 1), ("5", 16, (1, 1, 1, 1), None),
])  # fmt: skip
def test_a_rank_takes_its_share_of_the_cores_unless_the_user_has_chosen(
    variable: str | None, cores: int, ranks: tuple[int, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("tp_size", "pp_size", "dp_size", "nnodes")
    parallel = SimpleNamespace(**dict(zip(names, ranks, strict=True)))
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr(threads, "cores", lambda: cores)
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda name, hook, kind, source: hooks.update({name: hook}))
    register_rank_hooks()
    hooks["sglang.srt.distributed.bootstrap._bind_threads_if_cpu"](device="cpu")
    assert taken == ([] if expected is None else [expected])
