"""SGLang attention backend of the CPU platform: every forward mode of plain and DFLASH decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from dflash_sglang.attention.dense import QueryGroup, attend, group_queries

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NON_CAUSAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


def register(name: str) -> None:
    """Makes `TorchCpuAttention` the attention backend that SGLang builds for `name`."""
    register_attention_backend(name)(TorchCpuAttention)


class TorchCpuAttention(AttentionBackend):
    """SGLang attention backend over the token-to-KV pool. Layers that are not `ENCODER_ONLY` are causal."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError(
                "KV pool SWAKVPool: the CPU platform reads one pool for all layers. "
                "Start the server with --disable-hybrid-swa-memory."
            )
        self.groups: list[QueryGroup] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Cuts the forward's queries into groups, once for all layers."""
        prefix_lens, query_lens = query_ranges(forward_batch)
        self.groups = group_queries(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, prefix_lens, query_lens
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same as `forward_extend`: a decode step is an extend by one query."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

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
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        window_left = layer.sliding_window_size
        output = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.groups,
            causal=layer.attn_type not in NON_CAUSAL,
            window_left=None if window_left is None or window_left < 0 else window_left,
            scale=layer.scaling,
            sinks=sinks,
        )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False


def query_ranges(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Returns each request's prefix length and number of queries.

    `seq_lens` counts the queries in every mode except TARGET_VERIFY (verify and draft block), where it is the
    prefix.
    """
    mode = forward_batch.forward_mode
    seq_lens = forward_batch.seq_lens.tolist()
    if mode.is_target_verify():
        return seq_lens, [forward_batch.spec_info.draft_token_num] * len(seq_lens)
    if mode.is_decode():
        return [n - 1 for n in seq_lens], [1] * len(seq_lens)
    if mode.is_idle():
        return [], []
    return forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
