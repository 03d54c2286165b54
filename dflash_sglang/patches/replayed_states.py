"""Recurrent states of verified rows are not kept: a commit replays the accepted rows.

SGLang keeps the state after every verified row of every request. Of a target with gated delta nets that is most of
what a running request takes: 2.4 GB with 48 layers, 48 heads of 128 x 128 and a block of 16. What a row would have
written into a state is 12 times smaller than a state: its value and key, its decay and beta. SGLang's verify
can keep these instead, in a ring of its pool that only KDA targets get. Here gated delta nets get it, too, and
`kernels.recurrent.replay` moves the states on at the commit.

A step of width 1 has one row, which is accepted. It moves the states on in the forward, as plain decoding does.

A row's output needs the row before it, so that a verify of few requests leaves most of a GPU idle. SGLang's verify
then gives each program fewer values of a state, but not where it keeps rows. Here it does there, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import Any, NamedTuple

import torch

from dflash_sglang.kernels.recurrent.replay import ReplayRows, replay
from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import (
    GPU_MEMORY_TYPE_KV_CACHE,
    HybridReqToTokenPool,
    KVCacheConfigurator,
    MambaPool,
    ModelRunner,
    envs,
    fused_sigmoid_gating_recurrent,
    gdn_replayssm_spec_fold,
    get_exec,
    get_memory,
    get_spec,
    hybrid_gdn_config,
)

logger = logging.getLogger(__name__)


class RowShapes(NamedTuple):
    """Shapes and types of what is kept of a slot's rows in a layer, in the order of `ReplayRows`."""

    values: tuple[int, ...]
    keys: tuple[int, ...]
    gates: tuple[int, ...]
    dtype: torch.dtype  # of values and keys; gates are float32

    @classmethod
    def from_params(cls, params: Any, block: int) -> RowShapes:
        """params: SGLang's of the target's recurrent states."""
        v_heads, v_dim, k_dim = params.shape.temporal
        heads = params.shape.num_k_heads_per_tp
        return cls((v_heads, block, v_dim), (heads, block, k_dim), (v_heads, block), params.dtype.conv)

    @property
    def nbytes(self) -> int:
        rows = math.prod(self.values) + math.prod(self.keys)
        return rows * self.dtype.itemsize + 2 * torch.float32.itemsize * math.prod(self.gates)


def bytes_beside_state(params: Any, block: int, slots_per_request: int) -> int:
    """What a slot takes beside its state, in all layers: its rows, and its share of the windows of convolutions,
    which SGLang keeps of each row of a running request."""
    windows = block * sum(math.prod(shape) for shape in params.shape.conv) * params.dtype.conv.itemsize
    of_layer = RowShapes.from_params(params, block).nbytes + windows // slots_per_request
    return of_layer * len(params.layers)


def install(target: ModelRunner) -> bool:
    """Before the target's pools are sized. Whether its commits replay: with gated delta nets that SGLang's Triton
    kernel verifies, alone and in pools of the usual layout."""
    if not _replays(target):
        return False
    sized = KVCacheConfigurator._handle_max_mamba_cache

    def _handle_max_mamba_cache(configurator: Any, total_rest_memory: float) -> float:
        """As SGLang sizes a pool that keeps no states of rows, with what ours keeps."""
        beside = bytes_beside_state(
            configurator.mambaish_config.mamba2_cache_params,
            get_spec().speculative_num_draft_tokens,
            configurator._calculate_mamba_ratio(),
        )
        before = configurator.extra_mamba_cache_bytes_per_req
        configurator.extra_mamba_cache_bytes_per_req = before + beside
        with get_exec().mamba.override(enable_linear_replayssm_spec=True, linear_replayssm_cache_len=0):
            left = sized(configurator, total_rest_memory)
        configurator.extra_mamba_cache_bytes_per_req = before
        return left

    replace("replay-sizes", KVCacheConfigurator, _handle_max_mamba_cache)
    replace("replay-pool", HybridReqToTokenPool, ReplayPool)
    replace("replay-commit", gdn_replayssm_spec_fold, commit_rows)
    select = fused_sigmoid_gating_recurrent._select_recurrent_launch_config
    replace("replay-tiles", fused_sigmoid_gating_recurrent, narrow_tiles(select))
    return True


def narrow_tiles(select: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """`select` of SGLang's tile and warps of a launch, which takes every launch for a verify that keeps states."""

    def _select_recurrent_launch_config(*shape: Any, **more: Any) -> tuple[int, int]:
        return select(*shape, **{**more, "target_verify": True})

    return _select_recurrent_launch_config


def _replays(target: ModelRunner) -> bool:
    mamba = get_exec().mamba
    decode = mamba.linear_attn_decode_backend or mamba.linear_attn_backend
    config = hybrid_gdn_config(target.model_config)
    verify = mamba.linear_attn_verify_backend or (decode if decode == "flashinfer" else "triton")
    return (
        config is not None
        and not getattr(config, "ple_layer_ids", None)  # SGLang's replay leaves states of other layers behind
        and verify == "triton"
        and not get_memory().enable_unified_memory
        and not get_memory().enable_page_major_kv_layout
        and not envs.SGLANG_ENABLE_PP_SPEC.get()
    )


def move_states_in_forward(attention: Any) -> None:
    """attention: SGLang's backend of steps of width 1, before its graphs are captured."""
    backend = attention.linear_attn_backend

    def decode(*, layer: Any, query: Any, key: Any, value: Any, a: Any, b: Any, **of_batch: Any) -> torch.Tensor:
        # Of the kernel that verifies: FlashInfer's for decode would write to the last slot for padding.
        kernel = backend.kernel_dispatcher.verify_kernel
        states = {name: of_batch[name] for name in ("ssm_states", "cache_indices", "query_start_loc")}
        return kernel.decode(query, key, value, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, **states)

    replace("replay-of-one", backend, decode)


class ReplayPool(MambaPool):
    """SGLang's pool of states, with the rows of each slot in the place of their states."""

    def __init__(
        self, *, cache_params: Any, speculative_num_draft_tokens: int | None = None, **arguments: Any
    ) -> None:
        # The shortest ring of SGLang's: of states of rows there are none then. It goes when ours is there.
        arguments.update(enable_linear_replayssm_spec=True, linear_replayssm_cache_len=1)
        super().__init__(
            cache_params=cache_params, speculative_num_draft_tokens=speculative_num_draft_tokens, **arguments
        )
        if speculative_num_draft_tokens is None:  # a pool without a verify
            return
        self.mamba_cache: Any
        shapes = RowShapes.from_params(cache_params, speculative_num_draft_tokens)
        slots = self.mamba_cache.temporal.shape[:2]

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((*slots, *shape), dtype=dtype, device=self.device)

        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            rows = ReplayRows(
                values=zeros(shapes.values, shapes.dtype),
                keys=zeros(shapes.keys, shapes.dtype),
                decay=zeros(shapes.gates, torch.float32),
                beta=zeros(shapes.gates, torch.float32),
            )
        self.mamba_cache = with_fields(
            self.mamba_cache,
            replayssm_d=None,
            replayssm_k=None,
            replayssm_rawv=rows.values,
            replayssm_rawk=rows.keys,
            replayssm_g=rows.decay,
            replayssm_beta=rows.beta,
        )
        # The states are always those of the committed tokens: SGLang's cursors into its ring have nothing to tell.
        self.replayssm_spec_write_pos = self.replayssm_cache_base = self.replayssm_is_flush = None
        self.replayssm_spec_fold = True
        gigabytes = sum(tensor.nbytes for tensor in rows) / 2**30
        self.mem_usage += gigabytes
        logger.info(
            "dflash_sglang recurrent states: accepted rows are replayed; %.2f GB keep the rows of %d slots",
            gigabytes,
            slots[1],
        )


def commit_rows(
    *,
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    mamba_track_indices: torch.Tensor | None = None,
    mamba_steps_to_track: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """`replay`, with the arguments of `commit_gdn_replayssm_fold_all_layers`."""
    rows = ReplayRows(rawv_cache, rawk_cache, g_cache, beta_cache)
    replay(checkpoint_state, rows, ssm_state_indices, accept_lens, mamba_track_indices, mamba_steps_to_track)
