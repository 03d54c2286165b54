"""Context K/V of all draft layers into the draft's pool in one launch, where the pool and the weights allow it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.kernels.context.context_write import FORMATS, Fp8Rows, write_fp8_rows
from dflash_sglang.models.layers import DraftAttention
from dflash_sglang.sglang_names.scheduler import fused_kv_norm_rope_write


class AllLayerWriter(ABC):
    """k_norm, RoPE and the pool write of all layers, with the roundings of the block's keys: bfloat16 after the
    norm and after the rotation."""

    def __init__(self, attentions: list[DraftAttention], k_norms: Tensor) -> None:
        """k_norms [L, head_dim]: the layers' k_norm weights."""
        self._attention, self._k_norms = attentions[0], k_norms

    @staticmethod
    def from_pool(attentions: list[DraftAttention], k_norms: Tensor, pool: Any) -> AllLayerWriter | str:
        """The writer into a pool whose buffers have their final addresses, or why there is none."""
        obstacle = _obstacle(attentions, k_norms, pool)
        if obstacle is not None:
            return obstacle
        buffers = [_buffers(pool, attention) for attention in attentions]
        kind = _Fp8Writer if buffers[0][0].dtype in FORMATS else _Bfloat16Writer
        return kind(attentions, k_norms, buffers)

    def write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """kv [T, layers, 2 * kv_size] contiguous, K before V, changed; positions and slots [T] int64."""
        attention = self._attention
        if attention.value_scale is not None:
            kv[..., attention.kv_size :].mul_(attention.value_scale)
        self._store(kv, positions, slots)

    @abstractmethod
    def _store(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None: ...


class _Bfloat16Writer(AllLayerWriter):
    """By SGLang's kernel for dense DSpark drafts."""

    def __init__(
        self, attentions: list[DraftAttention], k_norms: Tensor, buffers: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(attentions, k_norms)
        self._table = torch.tensor(
            [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in buffers],
            dtype=torch.int64,
            device=k_norms.device,
        )

    def _store(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention = self._attention
        fused_kv_norm_rope_write(
            kv,
            self._table,
            self._k_norms,
            attention.rotary_emb.cos_sin_cache,
            positions,
            slots,
            len(self._table),
            attention.kv_size,
            attention.head_dim,
            attention.k_norm.variance_epsilon,
        )


class _Fp8Writer(AllLayerWriter):
    """By this package's kernel: SGLang's writes bfloat16."""

    def __init__(
        self, attentions: list[DraftAttention], k_norms: Tensor, buffers: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(attentions, k_norms)
        keys, values = zip(*buffers, strict=True)
        self._rows = Fp8Rows(keys, values)

    def _store(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention = self._attention
        write_fp8_rows(
            kv,
            self._k_norms,
            attention.rotary_emb.cos_sin_cache,
            positions,
            slots,
            attention.k_norm.variance_epsilon,
            self._rows,
        )


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
    if not attention.table_rope:
        return "the draft's RoPE is not a plain rotation of whole heads"
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
