"""Each kind of draft layer sees the keys that its config names, or start-up ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.attention.dense import QueryGroup
from dflash_sglang.attention.torch_cpu import TorchCpuAttention
from dflash_sglang.attention.visibility import check_visibility, edges, visible
from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.startup.facts import StartupError
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config, draft_tensors

BLOCK, WINDOW = 8, 16
KINDS: dict[str, dict[str, Any]] = {
    "sliding causal, full not": {},
    "none causal": {"dflash_config": {"sliding_window_non_causal": True}},
    "all causal": {"is_causal": True},
    "a window of less than a block": {"sliding_window": 5, "dflash_config": {"sliding_window_non_causal": True}},
    "a window of more than the pool": {"sliding_window": 2048},
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
}


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def check(directory: Any, config: dict[str, Any], wrong: Callable[[Any], None] = lambda backend: None) -> Any:
    """`check_visibility` on the CPU platform's backend, after `wrong` has changed it; returns the pools."""
    whole = draft_config(**config)
    tensors = draft_tensors(whole)
    if config.get("dflash_config", {}).get("attention_sink_bias"):
        tensors |= {f"layers.{i}.self_attn.attention_sink_bias": torch.ones(4) for i in range(2)}
    model = layers.make_draft(directory, tensors=tensors, **config)
    pool = layers.make_pool(model, slots=100)
    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((2, 200), dtype=torch.int32)),
        token_to_kv_pool=pool,
        kv_index_translator=SimpleNamespace(plan=lambda **_: SimpleNamespace(bind=lambda *_: None)),
        page_size=1,
        model_config=SimpleNamespace(context_len=150),
        max_total_num_tokens=100,
        dtype=torch.float32,
    )
    runner.attn_backend = TorchCpuAttention(runner)
    wrong(runner.attn_backend)
    check_visibility(runner, model, BLOCK, "torch_native")
    return runner


@layers.cpu_only
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())
def test_a_backend_that_honours_causality_and_windows_passes_and_keeps_no_request(tmp_path, config):
    runner = check(tmp_path, config)
    assert not runner.req_to_token_pool.req_to_token.any()


def masked(mask: Callable[..., torch.Tensor]) -> Callable[[Any], None]:
    """Visibility by `mask(distance, causal, window_left)` in place of the backend's, which masks by positions."""

    def change(backend: Any) -> None:
        class Group(QueryGroup):
            def _build_mask(self, causal: bool, window_left: int | None, heads: int, dtype: Any) -> Any:
                rows, queries = self.query_positions.shape
                distance = self.query_positions[:, :, None] - torch.arange(self.slots.shape[1])
                seen = mask(distance, causal, 1 << 20 if window_left is None else window_left)
                bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
                return bias[:, None].repeat(1, heads, 1, 1).view(rows, 1, heads * queries, -1)

        begin = backend.init_forward_metadata

        def init_forward_metadata(forward_batch: Any) -> None:
            begin(forward_batch)
            backend.groups = [Group(**vars(group)) for group in backend.groups]

        backend.init_forward_metadata = init_forward_metadata

    return change


def exact(distance: torch.Tensor, causal: bool, left: int) -> torch.Tensor:
    return (distance <= left) & (distance >= (0 if causal else -left))


NOT_CAUSAL, CAUSAL = (
    "(window 16, not causal): with TorchCpuAttention",
    "(window 16, causal): with TorchCpuAttention",
)
LAST = "row 0 of a block does not see the key 15 tokens before"
# fmt: off
WRONG: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor], str]] = {
    "it ignores that a layer is not causal": (
        {}, lambda distance, causal, left: exact(distance, True, left),
        "full_attention layers (not causal): with TorchCpuAttention row 0 of a block does not see row 1's key"),
    "it ignores that a layer is causal": (
        {}, lambda distance, causal, left: exact(distance, False, left),
        f"sliding_attention layers {CAUSAL} row 0 of a block sees row 1's key"),
    "it cuts keys by the window of the first row": (
        KINDS["none causal"],
        lambda distance, causal, left: exact(distance, causal, left + torch.arange(BLOCK)[:, None]),
        f"{NOT_CAUSAL} row 1 of a block sees the key 15 tokens before the block"),
    "it cuts keys by the window of the last row": (
        KINDS["none causal"],
        lambda distance, causal, left: exact(distance, causal, left) & (distance[:, -1:] <= left),
        f"{NOT_CAUSAL} {LAST}"),
    "its window is a key too narrow": (
        {}, lambda distance, causal, left: exact(distance, causal, left - (left < 100)), f"{CAUSAL} {LAST}"),
    "it sees nothing": (
        {}, lambda distance, causal, left: torch.zeros_like(distance, dtype=torch.bool), f"{CAUSAL} {LAST}"),
}
# fmt: on


@layers.cpu_only
@pytest.mark.parametrize(("config", "mask", "says"), WRONG.values(), ids=WRONG.keys())
def test_a_backend_that_sees_other_keys_ends_start_up_with_one_problem(tmp_path, config, mask, says):
    with pytest.raises(StartupError) as caught:
        check(tmp_path, config, masked(mask))
    (problem,) = caught.value.problems
    text, flag = str(problem), "--speculative-draft-attention-backend"
    assert text.startswith(f"{flag}='torch_native': expected a backend for the draft's ") and says in text
    assert text.endswith(f"Set {flag} to another of flashinfer, fa3, fa4, triton, trtllm_mha.")


@layers.cpu_only
def test_every_key_that_decides_is_asked_for():
    """Of a window: for each row the last key inside and the first outside, which is nobody's once it is short."""
    kind = DraftSpec.from_config(draft_config()).layers[0]
    context, keys = edges(kind, BLOCK, room=100)
    assert context == WINDOW + 3 and set(range(context, context + BLOCK)) <= set(keys)
    for row, seen in enumerate(visible(kind, BLOCK, context, keys)):
        inside = context + row - (WINDOW - 1)
        assert dict(zip(keys, seen.tolist(), strict=True))[inside] and not seen[keys.index(inside - 1)]
    assert edges(kind, BLOCK, room=10) == (10, list(range(0, 3)) + list(range(10, 18)))
    assert edges(kind, BLOCK, room=0) == (0, list(range(8)))
