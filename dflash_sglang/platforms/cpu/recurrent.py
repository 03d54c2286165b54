"""Torch forms of SGLang's kernels for recurrent layers: convolution, delta rule, states, gates.

They take the kernels' arguments, of which those that SGLang's GDN backend leaves alone are not here, and write the
same states. Every sequence runs token by token, in prefill as in decode and verify, so that a token's output does
not depend on how a sequence was cut.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from dflash_sglang.kernels.recurrent.replay import delta_rule, unit
from dflash_sglang.platforms.cpu.mamba2 import mamba_chunk_scan_combined, selective_state_update

CHUNK = 64  # tokens between the states that prefill hands to the prefix cache


def register(source: HookSource) -> None:
    """Puts the functions of this module in the place of the kernels; a second call changes nothing."""
    from sglang.srt.layers.attention.mamba import mamba

    # SGLang pins the mask of states to track without asking whether there is a GPU.
    Tensor.pin_memory = lambda self, *_: self
    # Its Mamba2 mixer imports convolutions by the device's maker: on a CPU none.
    mamba.causal_conv1d_fn_triton = causal_conv1d_fn
    mamba.causal_conv1d_update_triton = causal_conv1d_update
    kernels: dict[str, tuple[Any, ...]] = {
        "mamba.causal_conv1d_triton": (causal_conv1d_fn, causal_conv1d_update),
        "mamba.mamba_state_scatter_triton": (
            track_mamba_states_all_layers,
            scatter_mamba_states_after_mtp_verify,
            fused_conv_window_scatter_with_mask,
            track_mamba_states_if_needed,
        ),
        "mamba.triton_ops.ssd_combined": (mamba_chunk_scan_combined,),
        "mamba.triton_ops.ssu_dispatch": (selective_state_update,),
        "attention.fla.chunk": (chunk_gated_delta_rule,),
        "attention.fla.fused_recurrent": (fused_recurrent_gated_delta_rule_packed_decode,),
        "attention.fla.fused_norm_gate": (rms_norm_gated,),
        "attention.fla.layernorm_gated": (layernorm_fn,),
        "attention.linear.fused_gdn_gating": (fused_gdn_gating,),
        "attention.linear.fused_sigmoid_gating_recurrent": (fused_sigmoid_gating_delta_rule_update,),
        "attention.triton_gdn_fused_proj": (
            fused_qkvzba_split_reshape_cat,
            fused_qkvzba_split_reshape_cat_contiguous,
        ),
        "elementwise.elementwise": (fused_gate_sigmoid_mul_add, fused_sigmoid_mul),
    }
    for module, functions in kernels.items():
        for function in functions:
            target = f"sglang.kernels.ops.{module}.{function.__name__}"
            if target not in HookRegistry._hooks:
                HookRegistry.register(target, function, HookType.REPLACE, source=source)


def _convolve(
    history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """history [n, dim, width - 1], x [n, dim, T], weight [dim, width] -> output [n, dim, T] and the T windows
    [n, T, dim, width - 1] that follow each token. activation: "silu", "swish" or None."""
    width = weight.shape[1]
    inputs = torch.cat([history.to(x.dtype), x], dim=-1)
    out = (inputs.unfold(-1, width, 1) * weight[:, None]).sum(dim=-1)
    if bias is not None:
        out = out + bias[:, None]
    if activation is not None:
        out = silu(out)
    return out, inputs[..., 1:].unfold(-1, width - 1, 1).transpose(1, 2)


def causal_conv1d_fn(
    x: Tensor,  # [dim, tokens], request after request
    weight: Tensor,  # [dim, width]
    bias: Tensor | None,
    *,
    conv_states: Tensor,  # [slots, dim, width - 1], written
    query_start_loc: Tensor,  # [requests + 1]
    cache_indices: Tensor,  # [requests]
    has_initial_state: Tensor,  # [requests] bool
    activation: str | None = "silu",
    **_: Any,
) -> Tensor:
    """Prefill. Returns [dim, tokens]."""
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        span = slice(bounds[i], bounds[i + 1])
        history = conv_states[slot, None] * has_initial_state[i]
        convolved, windows = _convolve(history, x[None, :, span], weight, bias, activation)
        out[:, span], conv_states[slot] = convolved[0], windows[0, -1]
    return out


def causal_conv1d_update(
    x: Tensor,  # [requests, dim] or [requests, dim, T]
    conv_state: Tensor,  # [slots, dim, width - 1], written: the window after the last token
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,  # [requests]
    intermediate_conv_window: Tensor | None = None,  # [requests, T, dim, width - 1], written
    intermediate_state_indices: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Decode and verify. Returns the shape and layout of x."""
    slots = conv_state_indices.long()
    out, windows = _convolve(conv_state[slots], x.view(*x.shape[:2], -1), weight, bias, activation)
    conv_state[slots] = windows[:, -1].to(conv_state.dtype)
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        rows = intermediate_state_indices.long()
        for step in range(windows.shape[1]):  # windows may share memory
            intermediate_conv_window[rows, step] = windows[:, step].to(intermediate_conv_window.dtype)
    return torch.empty_like(x).copy_(out.view(x.shape))  # x's strides


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [n, T, heads, K], v [n, T, v_heads, V], decay (log) and beta [n, T, v_heads], state [n, v_heads, V, K].

    Each token decays the state, moves what it holds at the token's key towards the token's value by beta, and
    reads it at the token's query. Returns the outputs [n, T, v_heads, V] and the states after each token
    [n, T, v_heads, V, K], float32.
    """
    shared = v.shape[2] // k.shape[2]
    q, k = (unit(x).repeat_interleave(shared, dim=2) for x in (q, k))
    q, v = q * q.shape[-1] ** -0.5, v.float()
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = delta_rule(state, k[:, t], v[:, t], decay[:, t], beta[:, t])
        outputs.append((state * q[:, t, :, None]).sum(dim=-1))
        states.append(state)
    return torch.stack(outputs, dim=1), torch.stack(states, dim=1)


def chunk_gated_delta_rule(
    q: Tensor,  # [1, tokens, heads, K]
    k: Tensor,
    v: Tensor,  # [1, tokens, v_heads, V]
    g: Tensor,  # [1, tokens, v_heads] log decay
    beta: Tensor,
    *,
    initial_state: Tensor,  # [slots, v_heads, V, K], written
    initial_state_indices: Tensor,  # [requests]
    cu_seqlens: Tensor,  # [requests + 1]
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Prefill. Returns the output [1, tokens, v_heads, V] and the states before each chunk of each request,
    [1, chunks, v_heads, V, K]."""
    bounds = cu_seqlens.tolist()
    outputs, chunks = [], []
    for i, slot in enumerate(initial_state_indices.tolist()):
        span = slice(bounds[i], bounds[i + 1])
        before = initial_state[slot, None].float()
        output, states = _delta_rule(q[:, span], k[:, span], v[:, span], g[:, span], beta[:, span], before)
        initial_state[slot] = states[0, -1].to(initial_state.dtype)
        outputs.append(output[0])
        chunks.append(torch.cat([before, states[0, CHUNK - 1 :: CHUNK]])[: -(-states.shape[1] // CHUNK)])
    return torch.cat(outputs)[None].to(v.dtype), None, torch.cat(chunks)[None]


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,  # [v_heads]
    a: Tensor,  # [tokens, v_heads]
    dt_bias: Tensor,
    q: Tensor,  # [1, tokens, heads, K]
    k: Tensor,
    v: Tensor,  # [1, tokens, v_heads, V]
    b: Tensor,
    initial_state_source: Tensor,  # [slots, v_heads, V, K], written unless disable_state_update
    initial_state_indices: Tensor,  # [requests], the same number of tokens each
    cu_seqlens: Tensor,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,  # [requests, T, v_heads, V, K], written
    intermediate_state_indices: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,  # [slots, v_heads, block, V], written if cache_ring, as all of these
    replayssm_rawk: Tensor | None = None,  # [slots, heads, block, K]
    replayssm_g: Tensor | None = None,  # [slots, v_heads, block]
    replayssm_beta: Tensor | None = None,  # [slots, v_heads, block]
    **_: Any,
) -> Tensor:
    """Decode and verify. Returns [1, tokens, v_heads, V]."""
    requests = cu_seqlens.shape[0] - 1
    slots = initial_state_indices[:requests].long()
    decay, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    q, k, values, decay, beta = (x.reshape(requests, -1, *x.shape[2:]) for x in (q, k, v, decay, beta))
    output, states = _delta_rule(q, k, values, decay, beta, initial_state_source[slots].float())
    if not disable_state_update:
        initial_state_source[slots] = states[:, -1].to(initial_state_source.dtype)
    if intermediate_states_buffer is not None and intermediate_state_indices is not None:
        rows = intermediate_state_indices[:requests].long()
        intermediate_states_buffer[rows, : states.shape[1]] = states.to(intermediate_states_buffer.dtype)
    if cache_ring:
        there = slots >= 0  # padding has none
        kept = (replayssm_rawv, values), (replayssm_rawk, k), (replayssm_g, decay), (replayssm_beta, beta)
        for ring, rows in kept:
            assert ring is not None
            ring[slots[there], :, : rows.shape[1]] = rows[there].transpose(1, 2).to(ring.dtype)
    return output.reshape(v.shape).to(v.dtype)


def fused_recurrent_gated_delta_rule_packed_decode(
    *,
    mixed_qkv: Tensor,  # [requests, q + k + v]
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,  # [slots, v_heads, V, K], written
    out: Tensor,  # [requests, 1, v_heads, V], written
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """Decode, one token of each request."""
    requests, (v_heads, v_dim, k_dim) = mixed_qkv.shape[0], initial_state.shape[1:]
    q_size = (mixed_qkv.shape[1] - v_heads * v_dim) // 2
    q, k, v = mixed_qkv.split([q_size, q_size, v_heads * v_dim], dim=-1)
    output = fused_sigmoid_gating_delta_rule_update(
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        q=q.reshape(1, requests, -1, k_dim),
        k=k.reshape(1, requests, -1, k_dim),
        v=v.reshape(1, requests, v_heads, v_dim),
        b=b,
        initial_state_source=initial_state,
        initial_state_indices=ssm_state_indices,
        cu_seqlens=torch.arange(requests + 1),
    )
    out.copy_(output.transpose(0, 1))


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,  # [layers, slots, ...], written
    ssm_states_pool: Tensor,  # [layers, slots, ...], written
    cache_indices: Tensor,  # [requests]
    mamba_track_mask: Tensor,  # [requests] bool
    mamba_track_indices: Tensor,  # [requests]
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Decode: copies the states of the masked requests to the slots that the prefix cache will take."""
    rows = mamba_track_mask[:batch_size].nonzero().flatten()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, mamba_track_indices[rows]] = pool[:, cache_indices[rows].long()]


def track_mamba_states_if_needed(conv_states: Tensor, ssm_states: Tensor, *of_batch: Any, **more: Any) -> None:
    """`track_mamba_states_all_layers` of one layer, whose states are [slots, ...]."""
    track_mamba_states_all_layers(conv_states[None], ssm_states[None], *of_batch, **more)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices: Tensor,
    steps: Tensor,
    track_indices: Tensor | None,
    track_steps: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Verify: moves the states after each request's row `steps` [requests] to its slot, and those after row
    `track_steps` (none where negative) to the slots that the prefix cache will take."""
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    for states, by_step in pairs:
        fused_conv_window_scatter_with_mask(states, by_step, state_indices, steps, src_indices_raw)
        if track_indices is not None and track_steps is not None:
            fused_conv_window_scatter_with_mask(states, by_step, track_indices, track_steps, src_indices_raw)


def fused_conv_window_scatter_with_mask(
    states: Tensor,  # [layers, slots, ...], written
    by_step: Tensor,  # [layers, requests, T, ...]
    slots: Tensor,  # [requests], negative for none, as the next
    steps: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Verify: moves what is kept of each request's row `steps` to its slot."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    HybridLinearAttnBackend._scatter_speculative_state_with_mask(states, by_step, slots, steps, src_indices_raw)


# ---- Pointwise kernels around gated delta nets ---------------------------------------------------------------


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b [tokens, v_heads] -> log decay and beta, each [1, tokens, v_heads] float32."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tokens, q + k + v + z] and [tokens, b + a] -> qkv, z [tokens, num_heads_v, head_v], b, a."""
    v_size = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - v_size, v_size], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of Qwen3-Next, whose q, k, v, z and b, a lie key head after key head."""
    shared = num_heads_v // num_heads_qk
    by_head = mixed_qkvz.view(len(mixed_qkvz), num_heads_qk, -1)
    q, k, v, z = by_head.split([head_qk, head_qk, shared * head_v, shared * head_v], dim=-1)
    b, a = mixed_ba.view(len(mixed_ba), num_heads_qk, -1).split(shared, dim=-1)
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    return qkv, z.reshape(-1, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str, eps: float, **_: Any
) -> Tensor:
    return layernorm_fn(x, weight, bias, g, eps, activation)


def layernorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, eps: float, activation: str = "swish", **_: Any
) -> Tensor:
    """RMS norm of x, gated with z."""
    gate = {"swish": silu, "silu": silu, "sigmoid": torch.sigmoid}[activation]
    return (rms_norm(x.float(), weight.shape, weight.float(), eps) * gate(z.float())).to(x.dtype)


def fused_sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """attn_output [tokens, heads * head_dim], gate the same or [tokens, heads, head_dim]."""
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Adds the shared expert's output [tokens, hidden], gated, to that of the routed experts, which is written."""
    final_hidden_states += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output
