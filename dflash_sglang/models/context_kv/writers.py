"""Context K/V of all draft layers into the draft's pool in one launch, where the pool and the weights allow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.kernels.context.context_write import FORMATS, Fp8Rows, write_fp8_rows
from dflash_sglang.models.layers import DraftAttention
from dflash_sglang.sglang_names.scheduler import fused_kv_norm_rope_write


class AllLayerWriter:
    """k_norm, RoPE and the pool write of all layers, with the roundings of the block's keys: bfloat16 after the
    norm and after the rotation.

    A bfloat16 pool is written by SGLang's kernel for dense DSpark drafts, an fp8 pool by this package's.
    """

    def __init__(
        self, attentions: list[DraftAttention], k_norms: Tensor, buffers: list[tuple[Tensor, Tensor]]
    ) -> None:
        """k_norms [L, head_dim]: the layers' k_norm weights. buffers: the layers' K and V, at their final
        addresses."""
        self._attention, self._k_norms = attentions[0], k_norms
        self._fp8 = Fp8Rows(*zip(*buffers, strict=True)) if buffers[0][0].dtype in FORMATS else None
        self._table = torch.tensor(
            [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in buffers],
            dtype=torch.int64,
            device=k_norms.device,
        )

    @staticmethod
    def from_pool(attentions: list[DraftAttention], k_norms: Tensor, pool: Any) -> AllLayerWriter | str:
        """The writer into a pool whose buffers have their final addresses, or why there is none."""
        obstacle = _obstacle(attentions, k_norms, pool)
        if obstacle is not None:
            return obstacle
        return AllLayerWriter(attentions, k_norms, [_buffers(pool, attention) for attention in attentions])

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """kv [T, layers, 2 * kv_size] contiguous, K before V, changed; positions and slots [T] int64."""
        attention = self._attention
        if attention.value_scale is not None:
            kv[..., attention.kv_size :].mul_(attention.value_scale)
        cos_sin, eps = attention.rotary_emb.cos_sin_cache, attention.k_norm.variance_epsilon
        if self._fp8 is not None:
            write_fp8_rows(kv, self._k_norms, cos_sin, positions, slots, eps, self._fp8)
            return
        sizes = len(self._table), attention.kv_size, attention.head_dim
        fused_kv_norm_rope_write(kv, self._table, self._k_norms, cos_sin, positions, slots, *sizes, eps)


def _is_scaled(attention: DraftAttention) -> bool:
    """Whether `set_kv_buffer` divides a layer's keys and values before the cast."""
    scales = (attention.attn.k_scale, attention.attn.v_scale)
    return any(scale is not None and float(scale) != 1.0 for scale in scales)


def _buffers(pool: Any, attention: DraftAttention) -> tuple[Tensor, Tensor]:
    layer = attention.attn.layer_id
    return pool.get_key_buffer(layer), pool.get_value_buffer(layer)


def _obstacle(attentions: list[DraftAttention], k_norms: Tensor, pool: Any) -> str | None:
    """Why no kernel for all layers can write into the pool, or None."""
    attention = attentions[0]
    if not k_norms.is_cuda or k_norms.dtype != torch.bfloat16:
        return f"the norms are {k_norms.dtype} on {k_norms.device.type}, not bfloat16 on cuda"
    if attention.no_table_kernel is not None:
        return attention.no_table_kernel
    row = (attention.num_kv_heads, attention.head_dim)
    fp8 = _buffers(pool, attention)[0].dtype in FORMATS
    if fp8 and torch.cuda.get_device_capability(k_norms.device) < (8, 9):
        return "the pool is float8, which this GPU does not convert to"
    if fp8 and any(_is_scaled(a) for a in attentions):
        return "the pool's scales are not 1: the division is the pool's own"
    for a in attentions:
        for buffer in _buffers(pool, a):
            if buffer.dtype != torch.bfloat16 and buffer.dtype not in FORMATS:
                return f"the pool is {buffer.dtype}, not bfloat16 or float8"
            if buffer.shape[1:] != row or buffer.stride()[1:] != (attention.head_dim, 1):
                return f"the pool's rows are {tuple(buffer.shape[1:])}, not contiguous {row}"
    return None
