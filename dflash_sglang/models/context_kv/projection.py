"""ContextKV: keys and values of the target's hidden states, projected and written to the draft's KV pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from sglang.srt.layers.layernorm import RMSNorm
from torch import Tensor, nn

from dflash_sglang.models.context_kv.base import Projection
from dflash_sglang.models.context_kv.fp8_projection import Fp8KV, not_sliceable
from dflash_sglang.models.context_kv.writers import AllLayerWriter
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.models.layers import DraftAttention
from dflash_sglang.settings.plugin_config import ContextKVForm
from dflash_sglang.sglang_names.scheduler import KVLocPlan, KVWriteLoc, ScheduleBatch, UnquantizedLinearMethod
from dflash_sglang.startup.facts import LoadError

Form = Literal["stacked", "sliced", "per_layer"]
WRITE_ROWS = 2048  # context rows projected at once: more of them make no GEMM faster, and take memory


class ContextKV:
    """The draft's `ContextWriter`: keys and values of all its layers.

    Three forms of the projection, equal up to the order of a GEMM's sums:
    per_layer  each layer's whole qkv_proj through its quantisation method, Q thrown away; any quantisation.
    sliced     each layer's K and V rows through that method; fp8 with an activation scale of each layer.
    stacked    one GEMM over all layers' K and V rows. Unquantised: a batched one, and the layers' weights
               become slices of its tensor. fp8: the method's own, over a repacked copy of the rows.

    Two ways to the pool: one launch that norms, rotates and writes all layers (`writers.py`: CUDA, bf16 norms,
    bf16 or fp8 pool, whole-head RoPE), or `set_kv_buffer` per layer. ``form`` and ``reason`` say what was
    taken and why. All methods are capturable in a CUDA graph after `bind`.
    """

    def __init__(
        self,
        model: DFlashDraftModel,
        form: ContextKVForm = "auto",
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Once, after the weights are loaded and processed. scope: in which the draft's layers run, its
        tensor-parallel group. Raises ValueError for `stacked` on weights that do not allow it."""
        self._model, self._scope = model, scope
        self._attentions: list[DraftAttention] = [layer.self_attn for layer in model.layers]
        self._pool: Any = None
        self._translator: Any = None
        self._writer: AllLayerWriter | None = None
        self.form: Form
        self.form, self._projection, self._why = _projection(self._attentions, form, model.context_norms)
        self._k_norms = _shared([a.k_norm.weight for a in self._attentions])  # [L, head_dim]
        # Taken now: SGLang gives the KV pools what is free once the weights are there.
        shape = (WRITE_ROWS, len(self._attentions), 2 * self._attentions[0].kv_size)
        self._workspace = model.hidden_norm.weight.data.new_empty(shape)
        self._why_writer: str | None = None

    @property
    def reason(self) -> str:
        """Form of the projection and way to the pool with their reasons, for the start-up line."""
        projection = f"{self.form} ({self._why})"
        return projection if self._why_writer is None else f"{projection}, {self._why_writer}"

    def refresh(self) -> None:
        """After an update of the draft's weights: the projection has them, in the same memory."""
        self._projection.refresh()

    def bind(self, pool: Any, translator: Any = None) -> None:
        """pool: the draft's token-to-KV pool, when its buffers have their final addresses; before capture.
        translator: of the slots that plans name, for `write_planned`."""
        self._pool, self._translator = pool, translator
        writer = AllLayerWriter.from_pool(self._attentions, self._k_norms, pool)
        if isinstance(writer, str):
            self._writer, self._why_writer = None, f"one write per layer ({writer})"
        else:
            self._writer, self._why_writer = writer, "one write for all layers"

    @torch.no_grad()
    def project(self, features: Tensor) -> Tensor:
        """features [T, n_ids * hidden], in the checkpoint's layer order -> context rows [T, hidden].

        Raises ValueError for features of another width.
        """
        width = self._model.fc.input_size
        if features.shape[-1] != width:
            raise ValueError(
                f"features of the target are {features.shape[-1]} wide: expected {width}, which the draft's fc "
                f"takes: {self._model.num_features} layers (target_layer_ids) of the target's hidden_size. The "
                "target's class captures something else; serve the draft on another target."
            )
        features = self._model.joined_features(features.to(self._model.hidden_norm.weight.dtype))
        rows, _ = self._model.fc(features)
        return self._model.hidden_norm(rows)

    @torch.no_grad()
    def keys_values(self, rows: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Per layer k (after k_norm and RoPE) and v (after the value scale), [T, kv_size] each.

        rows: context rows [T, hidden], positions [T].
        """
        kv = self._projection.project(rows)
        for layer, attention in enumerate(self._attentions):
            k, v = kv[:, layer].chunk(2, dim=-1)
            yield attention.finished_keys(k, positions), attention.scaled_values(v)

    def write_planned(self, features: Tensor, positions: Tensor, plan: KVLocPlan) -> None:
        self.write(features, positions, self.slots_of(plan))

    def write_prefill(
        self, features: Tensor, positions: Tensor, plan: KVLocPlan, batch: ScheduleBatch, last_tokens: Tensor
    ) -> None:
        self.write(features, positions, self.slots_of(plan))

    def slots_of(self, plan: KVLocPlan) -> Tensor:
        """[T] int64: the slots that a plan writes."""
        return plan.write_ids(self._translator)

    def write(self, features: Tensor, positions: Tensor, slots: Tensor, requests: Tensor | None = None) -> None:
        """As `ContextWriter.write`, into the bound pool. slots: none negative.

        Rows that belong to no request go to slot 0, the pool's padding page. If a slot is given twice, either row
        may win.
        """
        del requests  # their slots are in the pool
        with torch.inference_mode(), self._scope():
            for start in range(0, features.shape[0], WRITE_ROWS):
                part = slice(start, start + WRITE_ROWS)
                self._write(self.project(features[part]), positions[part], slots[part])

    def _write(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Keys and values of at most WRITE_ROWS context rows."""
        if self._writer is not None:
            kv = self._projection.project(rows, self._workspace[: len(rows)])
            self._writer.write(kv, positions, slots)
            return
        loc = KVWriteLoc(slots, physical=True)
        for attention, (k, v) in zip(self._attentions, self.keys_values(rows, positions), strict=True):
            heads = (-1, attention.num_kv_heads, attention.head_dim)
            cache = attention.attn
            self._pool.set_kv_buffer(cache, loc, k.view(heads), v.view(heads), cache.k_scale, cache.v_scale)


class _Stack(Projection):
    """Every layer's K and V rows of an unquantised qkv_proj, in tensors that share the layers' memory.

    Takes rows [T, hidden], or [layers, T, hidden] where they differ.
    """

    def __init__(self, attentions: list[DraftAttention]) -> None:
        kv_rows = slice(attentions[0].q_size, None)
        weights = _shared([a.qkv_proj.weight for a in attentions])
        self.weight = weights[:, kv_rows].transpose(1, 2)  # [L, hidden, 2 * kv_size]
        self.bias: Tensor | None = None
        if attentions[0].qkv_proj.bias is not None:
            biases = _shared([a.qkv_proj.bias for a in attentions])
            self.bias = biases[:, None, kv_rows]  # [L, 1, 2 * kv_size]

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        layers, _, width = self.weight.shape
        kv = rows.new_empty(rows.shape[-2], layers, width) if out is None else out
        by_layer, rows = kv.transpose(0, 1), rows.expand(layers, -1, -1)
        if self.bias is None:
            torch.bmm(rows, self.weight, out=by_layer)
        else:
            torch.baddbmm(self.bias, rows, self.weight, out=by_layer)
        return kv


class _WholeLayers(Projection):
    """Each layer's qkv_proj as the block runs it; Q is thrown away. Takes rows as `_Stack` does."""

    def __init__(self, attentions: list[DraftAttention]) -> None:
        self._attentions = attentions

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        layers = len(self._attentions)
        shape = (rows.shape[-2], layers, 2 * self._attentions[0].kv_size)
        kv = rows.new_empty(shape) if out is None else out
        for layer, (attention, of_layer) in enumerate(
            zip(self._attentions, rows.expand(layers, -1, -1), strict=True)
        ):
            qkv, _ = attention.qkv_proj(of_layer)
            kv[:, layer].copy_(qkv[:, attention.q_size :])
        return kv


class _NormedRows(Projection):
    """Another projection, of rows that each layer norms first."""

    def __init__(self, norms: list[RMSNorm], of_normed: _Stack | _WholeLayers) -> None:
        self._norms, self._of_normed = norms, of_normed

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self._of_normed.project(torch.stack([norm(rows) for norm in self._norms]), out)


def _shared(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor [L, ...] that the parameters become rows of: an in-place update of one is seen in it."""
    rows = torch.stack([parameter.data for parameter in parameters])
    for parameter, row in zip(parameters, rows, strict=True):
        parameter.data = row
    return rows


def _projection(
    attentions: list[DraftAttention], asked: ContextKVForm, norms: list[RMSNorm] | None
) -> tuple[Form, Projection, str]:
    """The form of the projection, the projection and why. `asked` is the operator's wish, `norms` those of the
    draft's `context_norms`."""

    def normed(projection: _Stack | _WholeLayers) -> Projection:
        return projection if norms is None else _NormedRows(norms, projection)

    wished = "context_kv asks for it"
    obstacle = _not_unquantised(attentions)
    if asked == "per_layer":
        return "per_layer", normed(_WholeLayers(attentions)), wished
    if obstacle is None:
        why = "no qkv_proj is quantised" if asked == "auto" else wished
        return "stacked", normed(_Stack(attentions)), why
    obstacle = "each layer norms its context rows" if norms is not None else not_sliceable(attentions)
    if obstacle is None:
        quantised = Fp8KV(attentions)
        obstacle = quantised.obstacle_to_joining
        repacked = f"{quantised.method}, K and V repacked in {quantised.bytes / 2**20:.1f} MiB"
        if obstacle is None:
            return "stacked", quantised, repacked if asked == "auto" else f"{wished}; {repacked}"
        if asked == "auto":
            return "sliced", quantised, f"{repacked}; {obstacle}"
    if asked == "stacked":
        raise LoadError(
            "context_kv='stacked': expected weights that one GEMM can take over all layers, but "
            f"{obstacle}. Set context_kv to 'auto' or 'per_layer'."
        )
    return "per_layer", normed(_WholeLayers(attentions)), obstacle


def _not_unquantised(attentions: list[DraftAttention]) -> str | None:
    """Which layer's weights are quantised, or None."""
    for layer, attention in enumerate(attentions):
        method = type(attention.qkv_proj.quant_method)
        if method is not UnquantizedLinearMethod:
            return f"layers.{layer}.self_attn.qkv_proj is served by {method.__name__}"
    return None
