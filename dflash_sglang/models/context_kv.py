"""ContextKV: keys and values of the target's hidden states, projected and written to the draft's KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dflash_sglang.compat import KVWriteLoc, UnquantizedLinearMethod, fused_kv_norm_rope_write
from dflash_sglang.config.plugin_config import ContextKVForm
from dflash_sglang.kernels.context_write import FORMATS, Fp8Rows, write_fp8_rows
from dflash_sglang.models.layers import DraftAttention

if TYPE_CHECKING:
    from dflash_sglang.models.draft import DFlashDraftModel

Form = Literal["stacked", "per_layer"]


class ContextKV:
    """Context K/V of all draft layers.

    Two forms of the projection, equal up to the order of a GEMM's sums:
    per_layer  each layer's qkv_proj through its quantisation method; any quantisation.
    stacked    one batched GEMM over all layers' K and V rows; unquantised weights. The layers' weights
               become slices of one tensor, so a weight update of the draft is an update of this.

    Two ways to the pool: one kernel that norms, rotates and writes all layers (stacked, CUDA, bf16 weights,
    bf16 or fp8 pool, whole-head RoPE), or `set_kv_buffer` per layer. ``form`` and ``reason`` say what was
    taken and why. All methods are capturable in a CUDA graph after `bind`.
    """

    def __init__(self, model: DFlashDraftModel, form: ContextKVForm = "auto") -> None:
        """Once, after the weights are loaded. Raises ValueError for `stacked` on quantised weights."""
        self._model = model
        self._attentions: list[DraftAttention] = [layer.self_attn for layer in model.layers]
        self._pool: Any = None
        self._writer: _AllLayerWriter | None = None
        obstacle = _not_stackable(self._attentions)
        if form == "stacked" and obstacle is not None:
            raise ValueError(
                f"context_kv='stacked': expected unquantised weights, but {obstacle}. "
                "Set context_kv to 'auto' or 'per_layer'."
            )
        self.form: Form = "per_layer" if form == "per_layer" or obstacle is not None else "stacked"
        if form != "auto":
            self._why = "context_kv asks for it"
        else:
            self._why = obstacle or "no qkv_proj is quantised"
        self._stack = _Stack(self._attentions) if self.form == "stacked" else None
        self._why_writer: str | None = None

    @property
    def reason(self) -> str:
        """Form of the projection and way to the pool with their reasons, for the start-up line."""
        projection = f"{self.form} ({self._why})"
        return projection if self._why_writer is None else f"{projection}, {self._why_writer}"

    def bind(self, pool: Any) -> None:
        """pool: the draft's token-to-KV pool, when its buffers have their final addresses; before capture."""
        self._pool = pool
        obstacle = _no_all_layer_write(self._stack, self._attentions, pool)
        self._writer = None
        if self._stack is None or obstacle is not None:
            self._why_writer = f"one write per layer ({obstacle})"
        else:
            fp8 = pool.get_key_buffer(self._attentions[0].attn.layer_id).dtype in FORMATS
            kind = _Fp8AllLayerWriter if fp8 else _AllLayerWriter
            self._writer = kind(self._attentions, self._stack, pool)
            self._why_writer = "one write for all layers"

    @torch.no_grad()
    def project(self, features: Tensor) -> Tensor:
        """features [T, n_ids * hidden], in the checkpoint's layer order -> context rows [T, hidden]."""
        rows, _ = self._model.fc(features.to(self._model.hidden_norm.weight.dtype))
        return self._model.hidden_norm(rows)

    @torch.no_grad()
    def keys_values(self, rows: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Per layer k (after k_norm and RoPE) and v (after the value scale), [T, kv_size] each.

        rows: context rows [T, hidden], positions [T].
        """
        if self._stack is None:
            for attention in self._attentions:
                yield attention.context_key_value(rows, positions)
            return
        kv = self._stack.project(rows)
        for layer, attention in enumerate(self._attentions):
            k, v = kv[:, layer].chunk(2, dim=-1)
            yield attention.finished_keys(k, positions), attention.scaled_values(v)

    @torch.no_grad()
    def write(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Writes K and V of every layer for T tokens into the bound pool.

        features [T, n_ids * hidden], positions [T] int64, slots [T] int64: rows of the pool, none negative.
        Rows that belong to no request go to slot 0, the pool's padding page. Later rows of a slot given
        twice do not reliably win.
        """
        if features.shape[0] == 0:
            return
        rows = self.project(features)
        if self._writer is not None:
            self._writer.write(rows, positions, slots)
            return
        loc = KVWriteLoc(slots, physical=True)
        for attention, (k, v) in zip(self._attentions, self.keys_values(rows, positions), strict=True):
            heads = (-1, attention.num_kv_heads, attention.head_dim)
            cache = attention.attn
            self._pool.set_kv_buffer(cache, loc, k.view(heads), v.view(heads), cache.k_scale, cache.v_scale)


class _Stack:
    """Every layer's K and V rows of qkv_proj, and k_norm, in tensors that share the layers' memory."""

    def __init__(self, attentions: list[DraftAttention]) -> None:
        kv_rows = slice(attentions[0].q_size, None)
        weights = _shared([a.qkv_proj.weight for a in attentions])
        self.weight = weights[:, kv_rows].transpose(1, 2)  # [L, hidden, 2 * kv_size]
        self.bias: Tensor | None = None
        if attentions[0].qkv_proj.bias is not None:
            biases = _shared([a.qkv_proj.bias for a in attentions])
            self.bias = biases[:, None, kv_rows]  # [L, 1, 2 * kv_size]
        self.k_norms = _shared([a.k_norm.weight for a in attentions])  # [L, head_dim]

    def project(self, rows: Tensor) -> Tensor:
        """rows [T, hidden] -> [T, layers, 2 * kv_size], contiguous, K before V."""
        layers, _, width = self.weight.shape
        kv = rows.new_empty(rows.shape[0], layers, width)
        out, rows = kv.transpose(0, 1), rows.expand(layers, -1, -1)
        if self.bias is None:
            torch.bmm(rows, self.weight, out=out)
        else:
            torch.baddbmm(self.bias, rows, self.weight, out=out)
        return kv


class _AllLayerWriter:
    """k_norm, RoPE and the pool write of all layers in one launch of SGLang's kernel for dense DSpark drafts.

    Same roundings as the block's keys: bfloat16 after the norm and after the rotation.
    """

    def __init__(self, attentions: list[DraftAttention], stack: _Stack, pool: Any) -> None:
        self._stack = stack
        self._attention = attentions[0]
        self._num_layers = len(attentions)
        buffers = [_buffers(pool, attention) for attention in attentions]
        self._table = torch.tensor(
            [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in buffers],
            dtype=torch.int64,
            device=stack.weight.device,
        )

    def write(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """rows: context rows [T, hidden], positions and slots [T] int64."""
        attention = self._attention
        kv = self._stack.project(rows)
        if attention.value_scale is not None:
            kv[..., attention.kv_size :].mul_(attention.value_scale)
        self._write(kv, positions, slots)

    def _write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention = self._attention
        fused_kv_norm_rope_write(
            kv,
            self._table,
            self._stack.k_norms,
            attention.rotary_emb.cos_sin_cache,
            positions,
            slots,
            self._num_layers,
            attention.kv_size,
            attention.head_dim,
            attention.k_norm.variance_epsilon,
        )


class _Fp8AllLayerWriter(_AllLayerWriter):
    """The same into a pool of float8, by this package's kernel: SGLang's writes bfloat16."""

    def __init__(self, attentions: list[DraftAttention], stack: _Stack, pool: Any) -> None:
        self._stack = stack
        self._attention = attentions[0]
        keys, values = zip(*(_buffers(pool, attention) for attention in attentions), strict=True)
        scales = [_scales(attention) for attention in attentions]
        self._rows = Fp8Rows(keys, values, scales if any(pair != (1.0, 1.0) for pair in scales) else None)

    def _write(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention = self._attention
        write_fp8_rows(
            kv,
            self._stack.k_norms,
            attention.rotary_emb.cos_sin_cache,
            positions,
            slots,
            attention.k_norm.variance_epsilon,
            self._rows,
        )


def _scales(attention: DraftAttention) -> tuple[float, float]:
    """What `set_kv_buffer` divides a layer's keys and values by."""
    k_scale, v_scale = attention.attn.k_scale, attention.attn.v_scale
    return (1.0 if k_scale is None else float(k_scale), 1.0 if v_scale is None else float(v_scale))


def _shared(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor [L, ...] that the parameters become rows of: an in-place update of one is seen in it."""
    rows = torch.stack([parameter.data for parameter in parameters])
    for parameter, row in zip(parameters, rows, strict=True):
        parameter.data = row
    return rows


def _buffers(pool: Any, attention: DraftAttention) -> tuple[Tensor, Tensor]:
    layer = attention.attn.layer_id
    return pool.get_key_buffer(layer), pool.get_value_buffer(layer)


def _not_stackable(attentions: list[DraftAttention]) -> str | None:
    """Why the layers' weights cannot be sliced and stacked, or None."""
    for layer, attention in enumerate(attentions):
        method = type(attention.qkv_proj.quant_method)
        if method is not UnquantizedLinearMethod:
            return f"layers.{layer}.self_attn.qkv_proj is served by {method.__name__}"
    return None


def _no_all_layer_write(stack: _Stack | None, attentions: list[DraftAttention], pool: Any) -> str | None:
    """Why the all-layer kernel cannot write into the pool, or None."""
    if stack is None:
        return "the projection is per layer"
    attention = attentions[0]
    if not stack.weight.is_cuda or stack.weight.dtype != torch.bfloat16:
        return f"the weights are {stack.weight.dtype} on {stack.weight.device.type}, not bfloat16 on cuda"
    if not attention.table_rope:
        return "the draft's RoPE is not a plain rotation of whole heads"
    row = (attention.num_kv_heads, attention.head_dim)
    fp8 = pool.get_key_buffer(attention.attn.layer_id).dtype in FORMATS
    if fp8 and torch.cuda.get_device_capability(stack.weight.device) < (8, 9):
        return "the pool is float8, which this GPU does not convert to"
    for a in attentions:
        for buffer in _buffers(pool, a):
            if buffer.dtype != torch.bfloat16 and buffer.dtype not in FORMATS:
                return f"the pool is {buffer.dtype}, not bfloat16 or float8"
            if buffer.shape[1:] != row or buffer.stride()[1:] != (attention.head_dim, 1):
                return f"the pool's rows are {tuple(buffer.shape[1:])}, not contiguous {row}"
    return None
