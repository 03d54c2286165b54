"""SGLang attention backend of the CPU platform: every forward mode of plain and DFLASH decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from dflash_sglang.attention.dense import QueryGroup, attend, group_queries

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.kernels.block.grow_tree import Tree

NON_CAUSAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


def register(name: str) -> None:
    """Makes `TorchCpuAttention` the attention backend that SGLang builds for `name`.

    MLA models attend over their latent rows with it in every forward mode.
    """
    register_attention_backend(name)(TorchCpuAttention)
    AttentionBackendRegistry.register(name, lambda attention, forward_batch: AttnForwardMethod.MLA)


class TorchCpuAttention(AttentionBackend):
    """SGLang attention backend over the token-to-KV pool. Layers that are not `ENCODER_ONLY` are causal."""

    supports_ragged_verify_graph = True
    needs_cpu_seq_lens = False  # as of FlashAttention, so that overlap scheduling takes the same way here

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.groups: list[QueryGroup] = []
        # Of a hybrid pool, whose sliding layers keep their rows in slots of their own.
        self.sliding_groups: list[QueryGroup] = []
        self.sliding_write: torch.Tensor | None = None
        self.tree: Tree | None = None

    def serve_trees(self, tree: Tree) -> None:
        """Verify forwards attend as the trees that stand in these buffers when a forward's first layer runs."""
        self.tree = tree

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Cuts the forward's queries into groups, once for all layers."""
        prefix_lens, query_lens = query_ranges(forward_batch)
        self.groups = group_queries(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            prefix_lens,
            query_lens,
            self.tree if forward_batch.forward_mode.is_target_verify() else None,
        )
        pool = self.token_to_kv_pool
        if isinstance(pool, SWAKVPool):
            translate = pool.translate_loc_from_full_to_swa
            self.sliding_groups = [replace(group, slots=translate(group.slots).long()) for group in self.groups]
            self.sliding_write = translate(forward_batch.out_cache_loc)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `forward_extend`: a decode step is an extend by one query."""
        return self.forward_extend(*args, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,  # [tokens, heads * head_dim]
        k: torch.Tensor,  # [tokens, kv_heads, head_dim]
        v: torch.Tensor,  # [tokens, kv_heads, v_head_dim]
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,  # [heads]
    ) -> torch.Tensor:
        """Writes the tokens' keys and values, then attends. Returns `[tokens, heads * v_head_dim]`.

        Raises NotImplementedError for what no group can express: cross attention and logit caps.
        """
        if layer.is_cross_attention or layer.logit_cap:
            raise NotImplementedError(
                f"attention layer {layer.layer_id}: is_cross_attention={layer.is_cross_attention}, "
                f"logit_cap={layer.logit_cap}; the CPU platform serves self-attention without a logit cap. "
                "Serve this model on a GPU."
            )
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.sliding_write)
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)  # MLA's pool knows none
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v, *scales)
        window_left, pool = layer.sliding_window_size, self.token_to_kv_pool
        slides = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
        # A pool of the model's dtype holds unscaled rows.
        scaled = layer.k_scale is not None and pool.dtype != q.dtype
        output = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.sliding_groups if slides else self.groups,
            causal=layer.attn_type not in NON_CAUSAL,
            window_left=None if window_left is None or window_left < 0 else window_left,
            scale=layer.scaling * float(layer.k_scale) if scaled else layer.scaling,
            sinks=sinks,
        )
        if scaled:
            output *= layer.v_scale
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The `seq_lens` of rows that only pad a data-parallel rank's batch; they attend to the padding slot."""
        return 1

    def support_triton(self) -> bool:
        return False


def query_ranges(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Returns each request's prefix length and number of queries.

    `seq_lens` counts the queries in every mode except TARGET_VERIFY (verify and draft block), where it is the
    prefix; a verify may have another number of queries for each request.
    """
    mode = forward_batch.forward_mode
    seq_lens = forward_batch.seq_lens.tolist()
    if mode.is_target_verify():
        layout = forward_batch.spec_info.ragged_verify_layout
        if layout is not None:
            return seq_lens, layout.verify_lens.tolist()
        return seq_lens, [forward_batch.spec_info.draft_token_num] * len(seq_lens)
    if mode.is_decode():
        return [n - 1 for n in seq_lens], [1] * len(seq_lens)
    if mode.is_idle():
        return [], []
    return forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
