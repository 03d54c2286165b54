"""DFlashDraftModel: the draft as SGLang's loader builds it and its model runner calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from dflash_sglang.checkpoint import draft_config
from dflash_sglang.compat import DraftParallelSpec, DraftTPExecution, LogitsProcessorOutput, WeightsMapper
from dflash_sglang.config import DraftSpec
from dflash_sglang.models.heads import TargetHead, find_embedding, find_head
from dflash_sglang.models.layers import DraftLayer
from dflash_sglang.models.weights import STACKED, Shard, load_draft_weights

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class Borrowed:
    """What the draft uses of the target. Held by a plain object, so that the target's modules are no
    submodules of the draft: its state dict and its weight updates must not reach them."""

    embedding: nn.Module
    embedding_scale: float
    head: TargetHead


class DFlashDraftModel(nn.Module):
    """A plain DFlash draft. `bind_target` lends it the target's embedding and head after loading.

    Raises DraftConfigError for a config that cannot be served.
    """

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    packed_modules_mapping = {
        packed: [name for name, (owner, _) in STACKED.items() if owner == packed]
        for packed in ("qkv_proj", "gate_up_proj")
    }
    # A quantised checkpoint may name its ignored modules with the prefix that its tensors have.
    hf_to_sglang_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        """config: transformers config of the checkpoint; the DraftSpec is read from its raw config.json,
        because transformers drops fields on loading (a Qwen3 `sliding_window`, for one)."""
        super().__init__()
        self.config = config
        raw, _ = draft_config(config._name_or_path, getattr(config, "_commit_hash", None))
        self.spec = spec = DraftSpec.from_config(raw)
        base = f"{prefix}." if prefix else ""
        # A checkpoint that names no target layers has one feature per draft layer.
        self.num_features = len(spec.target_layer_ids) if spec.target_layer_ids else spec.num_layers
        self.fc = ReplicatedLinear(
            self.num_features * spec.hidden_size,
            spec.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{base}fc",
        )
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(spec, i, quant_config, f"{base}layers.{i}") for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.borrowed: Borrowed | None = None
        self.after_load: Callable[[Mapping[str, set[Shard]]], None] | None = None
        self._loaded = False

    def bind_target(self, target_model: nn.Module) -> None:
        """Borrows the target's embedding and head; once, after loading and before graph capture.

        Raises ValueError where the target has no embedding or head that the draft can use.
        """
        # A target whose embedding is scaled outside of its module says by how much.
        scale = getattr(target_model, "get_dflash_noise_embedding_scale", None)
        self.borrowed = Borrowed(
            embedding=find_embedding(target_model),
            embedding_scale=1.0 if scale is None else float(scale()),
            head=TargetHead(find_head(target_model)),
        )

    @property
    def head(self) -> TargetHead:
        """The target's head, for proposals."""
        return self._bound().head

    def get_input_embeddings(self) -> nn.Module:
        return self._bound().embedding

    def get_attention_sliding_window_size(self) -> int | None:
        """Keys to the left of a query that a sliding layer sees; None without sliding layers."""
        windows = [layer.window for layer in self.spec.layers if layer.window is not None]
        return max(windows) - 1 if windows else None

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Block ids [T] -> [T, hidden] by the target's table. Its presence makes SGLang's graph runner
        embed inside of the graph."""
        borrowed = self._bound()
        embeds = borrowed.embedding(input_ids)
        if borrowed.embedding_scale != 1.0:
            embeds = embeds * borrowed.embedding_scale
        return embeds.to(self.norm.weight.dtype)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """One pass over blocks: input_ids and positions [bs * block] -> hidden_states [bs * block, hidden]
        after the final norm; no logits, the head is the target's.

        `get_embedding` and `pp_proxy_tensors` are the runner's and have no meaning for a draft.
        """
        hidden_states = self.forward_embed(input_ids) if input_embeds is None else input_embeds
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        hidden_states, _ = self.norm(hidden_states, residual)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads a whole checkpoint the first time; any part of one afterwards (a weight update).

        Raises ValueError naming the tensor that is missing, unexpected or of the wrong shape.
        """
        loaded = load_draft_weights(self, weights, complete=not self._loaded)
        self._loaded = True
        if self.after_load is not None:
            self.after_load(loaded)

    def post_load_weights(self) -> None:
        """Called by the loaders that fill the parameters without `load_weights` (dummy, sharded state)."""
        self._loaded = True

    def _bound(self) -> Borrowed:
        if self.borrowed is None:
            raise RuntimeError(
                "The draft has no embedding and no head of its own: call bind_target(target_model) first."
            )
        return self.borrowed


EntryClass = [DFlashDraftModel]
