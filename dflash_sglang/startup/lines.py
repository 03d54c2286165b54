"""What the worker tells operators: a line at start-up with every decision it took, and one with its memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from dflash_sglang import __version__
from dflash_sglang.sglang_names.scheduler import get_spec

if TYPE_CHECKING:
    from dflash_sglang.assembly import LoadedDraft
    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.verify.tables import Tables

GB = 1 << 30


def startup_line(draft: LoadedDraft, context_len: int) -> str:
    """`dflash_sglang <version> worker active: ...`, as one line of key=value pairs. context_len: the target's."""
    spec = draft.model.spec
    decisions = {
        "draft": f"{spec.architecture} ({spec.num_layers} layers)",
        "layers": layers_read(spec),
        "rope": rope_read(spec),
        "block": f"{draft.block_size} (trained {spec.block_size})",
        "target_layers": list(draft.feature_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "own_modules": draft.model.own_modules,
        "draft_attention": draft.attention_backend,
        "draft_quantization": spec.quantization or get_spec().speculative_draft_model_quantization or "none",
        "context_kv": draft.context_kv.reason,
        "head": draft.borrowed.head_form,
    }
    if draft.proposed_tokens is not None:
        tokens = f"{draft.proposed_tokens} tokens ({get_spec().speculative_token_map})"
        decisions["head"] = f"{tokens}, {draft.borrowed.head_form}"
    if context_len > spec.max_position_embeddings:
        decisions["positions"] = f"{context_len} (max_position_embeddings {spec.max_position_embeddings})"
    if get_spec().speculative_draft_window_size is not None:
        sinks = get_spec().speculative_draft_sink_size or 0
        decisions["draft_window"] = f"{get_spec().speculative_draft_window_size} (sinks {sinks})"
    if spec.dflash2 is not None:
        conv, selector = spec.dflash2.convolution, spec.dflash2
        decisions["convolution"] = f"{conv.taps} taps, groups of {conv.group_size}" if conv else "none"
        decisions["selector"] = f"rank {selector.selector_rank} over {selector.selector_top_k} candidates"
        decisions["proposals"] = "drawn" if draft.draws_proposals else "argmax"
    return f"dflash_sglang {__version__} worker active: " + " ".join(
        f"{key}={value};" for key, value in decisions.items()
    )


def layers_read(spec: DraftSpec) -> str:
    """Kind, window and causality of every layer, equal neighbours as one: `0-4 sliding(4096) causal, 5 full not
    causal`. The window is in tokens and counts the query's own."""
    parts, start = [], 0
    for layer, equal in itertools.groupby(spec.layers):
        last = start + len(list(equal)) - 1
        numbers = f"{start}" if last == start else f"{start}-{last}"
        kind = layer.kind.removesuffix("_attention") + (f"({layer.window})" if layer.window else "")
        parts.append(f"{numbers} {kind} {'causal' if layer.causal else 'not causal'}")
        start = last + 1
    return ", ".join(parts)


def rope_read(spec: DraftSpec) -> str:
    """Base, rotated dimensions and scaling, the same in every layer: `theta 10000, 64 of 128 dimensions`."""
    rope = spec.rope
    scaling = rope.scaling or {}
    arguments = [f" {key} {value}" for key, value in scaling.items() if key != "rope_type"]
    parts = [
        f"theta {rope.theta:.10g}",
        f"{rope.rotary_dim} of {spec.head_dim} dimensions",
        *([] if rope.is_neox else ["interleaved"]),
        *([scaling["rope_type"] + "".join(arguments)] if scaling else []),
    ]
    return ", ".join(parts)


def memory_line(draft: LoadedDraft, tables: Tables) -> str:
    """`dflash_sglang memory ...`: what the draft takes of this rank's device, in GB (2**30 bytes).

    Weights are those it does not borrow, KV its own pool, tables what verification keeps of requests, graphs what
    SGLang saw those of whole blocks take. What other widths took, target and draft, is in a line of their own.
    """
    runner, model, head_copy = draft.runner, draft.model, draft.borrowed.head_copy
    # Of the storages: layers may share one, and K and V rows that were stacked are slices of it.
    tensors = [*model.parameters(), *model.buffers(), *(() if head_copy is None else head_copy.tensors)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    pool = runner.token_to_kv_pool
    kv = sum(pool.get_kv_size_bytes())
    return (
        f"dflash_sglang memory of this rank's draft: weights {sum(storages.values()) / GB:.3f} GB, "
        f"KV {kv / GB:.3f} GB for {pool.size} tokens, "
        f"tables {tables.nbytes / GB:.3f} GB for {tables.requests} requests, "
        f"graphs of whole blocks {sum(runner.graph_memory_usage.values()):.3f} GB"
    )
