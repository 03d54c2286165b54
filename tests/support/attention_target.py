"""A target of attention layers alone, as SGLang's attention backends ask for one: a model runner with a pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.support import sglang_layers

ON_GPU = sglang_layers.DEVICE == "cuda"
HEADS, KV_HEADS, DIM = (32, 8, 128) if ON_GPU else (4, 2, 64)
DTYPE, TOLERANCE = (torch.bfloat16, 0.03) if ON_GPU else (torch.float32, 1e-5)
LAYERS, CONTEXT = 2, 320
SCALE = DIM**-0.5


class Target:
    """Requests with slots in random order. `runner` is the model runner."""

    def __init__(self, page_size: int, requests: int) -> None:
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        from dflash_sglang.sglang_names.scheduler import MHATokenToKVPool

        self.layers: list[Any] = [RadixAttention(HEADS, DIM, SCALE, KV_HEADS, layer_id=i) for i in range(LAYERS)]
        pages = -(-(CONTEXT + 64) // page_size)  # of a request; row 0 and page 0 are of padding
        order = 1 + torch.randperm(requests * pages).view(requests, pages)
        slots = order[..., None] * page_size + torch.arange(page_size)
        table = torch.cat([torch.zeros(1, pages * page_size), slots.flatten(1)]).int()
        size = requests * pages * page_size
        self.pool = MHATokenToKVPool(
            size=size, page_size=page_size, dtype=DTYPE, head_num=KV_HEADS, head_dim=DIM, layer_num=LAYERS,
            device=sglang_layers.DEVICE, enable_memory_saver=False,
        )  # fmt: skip
        for layer in range(LAYERS):
            for buffer in self.pool.get_kv_buffer(layer):
                buffer.copy_(torch.randn(buffer.shape))
        self.table = table.to(sglang_layers.DEVICE)
        config = SimpleNamespace(
            attention_arch=AttentionArch.MHA, context_len=CONTEXT + 64, head_dim=DIM, v_head_dim=DIM,
            swa_v_head_dim=DIM, get_max_num_attention_heads=lambda: HEADS, get_num_kv_heads=lambda *_: KV_HEADS,
            hf_config=PretrainedConfig(), hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
            is_draft_model=False, is_encoder_decoder=False, is_local_attention_model=False,
            linear_attn_registry_result=None,
        )  # fmt: skip
        translator = KVIndexTranslator(
            req_to_token=self.table, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
            page_size=page_size, device=sglang_layers.DEVICE,
        )  # fmt: skip
        self.runner: Any = SimpleNamespace(
            device=sglang_layers.DEVICE, dtype=DTYPE, kv_cache_dtype=DTYPE, kv_cache_dtype_str="auto", gpu_id=0,
            is_draft_worker=False, kv_index_translator=translator, model=torch.nn.ModuleList(self.layers),
            model_config=config, page_size=page_size, sliding_window_size=None, token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )  # fmt: skip


def verify_batch(requests: int, rows: int, **of_spec_info: Any) -> Any:
    """The inputs of a verify forward, which keep their place; all are of padding."""
    from dflash_sglang.sglang_names.scheduler import ForwardMode, SpeculativeAlgorithm

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)

    nothing = dict.fromkeys(("seq_lens_cpu", "seq_lens_sum", "encoder_lens", "extend_seq_lens_cpu", "kv_loc_plan"))
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=requests, req_pool_indices=zeros(requests),
        seq_lens=zeros(requests) + 1, positions=zeros(rows), out_cache_loc=zeros(rows),
        out_cache_loc_is_physical=False, mha_one_shot=False, spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=SimpleNamespace(**of_spec_info), **nothing,
    )  # fmt: skip


def dense(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The output [rows, heads, dim] in float32.

    queries [rows, heads, dim], keys and values [tokens, kv_heads, dim], visible [rows, tokens].
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("ihd,jhd->hij", queries.float(), keys) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), values)


def torch_attention(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> Any:
    """Stands for FlashAttention on a CPU, where requests have `max_seqlen_q` queries each.

    A row that sees nothing has no numbers in its output, and -inf as its LSE.
    """
    del rest
    bs, (rows, heads, dim), queries = len(cache_seqlens), q.shape, max_seqlen_q
    pools = (pool[page_table.long()].flatten(1, 2) for pool in (k_cache, v_cache))
    keys, values = (pool.repeat_interleave(heads // pool.shape[2], dim=2) for pool in pools)
    scores = torch.einsum("bihd,bjhd->bhij", q.reshape(bs, queries, heads, dim), keys) * softmax_scale
    lengths, place = cache_seqlens[:, None, None], torch.arange(keys.shape[1])
    last = lengths - queries + torch.arange(queries)[:, None] if causal else lengths - 1
    scores = scores.masked_fill((place > last)[:, None], -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), values).reshape(rows, heads, dim)
    return (out, scores.logsumexp(dim=-1).transpose(0, 1).flatten(1)) if return_softmax_lse else out
