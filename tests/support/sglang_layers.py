"""SGLang layers in a test process without a server: one rank, a draft model, its KV pool, an attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny import draft_config, draft_tensors, write_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("SGLANG_PLATFORM", "dflash_cpu")  # before SGLang is imported: it decides its operators


cpu_only = pytest.mark.skipif(
    DEVICE == "cuda", reason="SGLang's CUDA norms have no float32 kernel: run with CUDA_VISIBLE_DEVICES=''"
)


def start_rank() -> None:
    """Makes this process rank 0 of 1, which SGLang's layers require even without parallelism."""
    from sglang.test.layer_ut_utils import init_single_process_dist

    # Held as long as this process lives: below all ports that servers take, and those that they derive from them.
    init_single_process_dist(master_port=10_000 + os.getpid() % 2000)


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made with this dtype, on the device of the test run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.set_default_dtype(before)


def hf_config(directory: Path) -> Any:
    """What the draft model reads of a transformers config: where its checkpoint is."""
    return SimpleNamespace(_name_or_path=str(directory))


def load_draft(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    quant_config: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The served model of a draft of any architecture, its checkpoint written and its weights loaded."""
    from dflash_sglang.models import dflash2, draft, dspark, gemma4, laguna

    entries = [one for module in (draft, dflash2, dspark, gemma4, laguna) for one in module.EntryClass]
    (model_class,) = (one for one in entries if one.__name__ == config["architectures"][0])
    write_checkpoint(directory, config, tensors)
    with defaults(dtype):
        model = model_class(hf_config(directory), quant_config)
        model.load_weights(tensors.items())
    return model.to(DEVICE)


def make_draft(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    quant_config: Any = None,
    tensors: dict[str, Tensor] | None = None,
    **overrides: Any,
) -> Any:
    """The same of `tests.support.tiny`'s config with `overrides`."""
    config = draft_config(**overrides)
    tensors = draft_tensors(config) if tensors is None else tensors
    return load_draft(directory, config, tensors, quant_config, dtype)


def context_key_value(attention: Any, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What context KV has to hold of one layer: keys and values through its own qkv_proj, quantised or not.

    rows [T, hidden] (after `fc` and `hidden_norm`; no input_layernorm), positions [T] -> k, v, each [T, kv_size]:
    k after k_norm and RoPE, v after the value scale.
    """
    qkv, _ = attention.qkv_proj(rows)
    _, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    return attention.finished_keys(k, positions), attention.scaled_values(v)


def make_pool(model: Any, slots: int = 256, dtype: torch.dtype = torch.float32) -> Any:
    """SGLang's KV pool for the draft's layers, every row filled with 7; row 0 is the padding page."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    attention = model.layers[0].self_attn
    pool = MHATokenToKVPool(
        size=slots,
        page_size=1,
        dtype=dtype,
        head_num=attention.num_kv_heads,
        head_dim=attention.head_dim,
        layer_num=len(model.layers),
        device=DEVICE,
        enable_memory_saver=False,
    )
    for layer in range(len(model.layers)):
        for buffer in pool.get_kv_buffer(layer):
            buffer.copy_(torch.full(buffer.shape, 7.0))
    return pool


class PlainAttention:
    """Attention of one draft forward by a dense mask over every slot, request after request.

    requests: (slots of positions 0.., position of the block's first row) of each; the block's rows are the
    last positions. Written from the definition of LayerAttention, apart from the served backends.
    """

    def __init__(self, pool: Any, requests: list[tuple[Tensor, int]], block: int) -> None:
        self.token_to_kv_pool, self.requests, self.block = pool, requests, block

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        from sglang.srt.layers.radix_attention import AttentionType
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        own = [slots[start : start + self.block] for slots, start in self.requests]
        if own:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(torch.cat(own)), k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        groups = layer.tp_q_head_num // layer.tp_k_head_num
        out = torch.zeros_like(q)
        for i, (slots, start) in enumerate(self.requests):
            rows = slice(i * self.block, (i + 1) * self.block)
            positions = torch.arange(start + self.block)
            gap = positions[start:, None] - positions
            visible = gap >= 0 if layer.attn_type is AttentionType.DECODER else torch.ones_like(gap).bool()
            if layer.sliding_window_size >= 0:
                visible &= gap.abs() <= layer.sliding_window_size
            seen = slots[: start + self.block]
            query = q[rows].view(self.block, -1, layer.head_dim)
            key, value = (x[seen].to(q.dtype).repeat_interleave(groups, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scaling
            weights = scores.masked_fill(~visible, float("-inf"))
            if sinks is None:
                weights = weights.softmax(-1)
            else:
                column = sinks.to(q.dtype)[:, None, None].expand(-1, self.block, 1)
                weights = torch.cat((weights, column), dim=-1).softmax(-1)[..., :-1]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, value).reshape(self.block, -1)
        return out


def run_draft(model: Any, rows: Tensor, positions: Tensor, attention: Any, **of_batch: Any) -> Tensor:
    """One draft forward over rows [bs * block, hidden] of embeddings, or [bs * block] ids, which the draft embeds.

    positions [bs * block] -> hidden [bs * block, hidden]. attention: PlainAttention, or a backend of SGLang that
    is given a batch of `of_batch` first.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, moe_num_token_non_padded=None, **of_batch)
    if of_batch:
        attention.init_forward_metadata(batch)
    ids, embeds = (rows, None) if rows.ndim == 1 else (torch.empty(0), rows)
    with forward_context(ForwardContext(attn_backend=attention)):
        return model(ids, positions, batch, input_embeds=embeds).hidden_states


def assert_idle_batch_writes_nothing(model: Any) -> None:
    """No rows: every layer of a draft of two runs the modules that all-reduce, and the pool stays as it was.

    The draft gets ids and embeds them itself, as SGLang's runner calls it.
    """
    pool, calls = make_pool(model), []
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    nothing = torch.empty(0, dtype=torch.long)
    hidden = run_draft(model, nothing, nothing, PlainAttention(pool, [], 8))
    assert hidden.shape == (0, 64)
    assert calls == [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert all(bool((buffer == 7).all()) for i in (0, 1) for buffer in pool.get_kv_buffer(i))


def assert_context_kv(model: Any, reference: Any) -> None:
    """The model's context KV is the reference's, in both forms of the projection."""
    from dflash_sglang.models.context_kv.projection import ContextKV

    features = torch.randn(9, model.fc.input_size, generator=torch.Generator().manual_seed(4))
    expected = reference.context_kv(features, torch.arange(9))
    for form in ("per_layer", "stacked"):
        context = ContextKV(model, form)
        assert context.form == form
        found = context.keys_values(context.project(features), torch.arange(9))
        for pair, of_layer in zip(expected, found, strict=True):
            for one, other in zip(pair, of_layer, strict=True):
                torch.testing.assert_close(other, one.flatten(1), rtol=1e-4, atol=1e-4)
