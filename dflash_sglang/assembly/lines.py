"""The lines of the log that tell operators what a scheduler of this worker has loaded and taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_sglang import __version__
from dflash_sglang.checkpoint.family_specs import VANILLA
from dflash_sglang.checkpoint.in_words import layers_read, rope_read
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.sglang_names.scheduler import get_disagg, get_spec
from dflash_sglang.startup.copying import why_no_copies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash_sglang.assembly.loading import LoadedDraft
    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.drafting.copies import Copies
    from dflash_sglang.patches.draft_pool import RingPool
    from dflash_sglang.settings.plugin_config import PluginConfig
    from dflash_sglang.verify.tables import Tables

GB = 1 << 30
# Of a server that drafts: lines that one that only prefills does not have.
_OF_DRAFTING = (
    "draft_attention", "head", "draft_window", "selector", "proposals", "proposals_from", "markov_head", "domino",
    "copy",
)  # fmt: skip


def worker_line(draft: LoadedDraft, context_len: int, config: PluginConfig) -> str:
    """`dflash_sglang <version> worker active:` and a line `  key: value` for each thing that was read or decided.

    context_len: the target's.
    """
    spec = draft.model.spec
    facts = _of_mtp(draft, spec) if isinstance(spec, MtpSpec) else _of_draft(draft, spec, context_len, config)
    left_out = () if draft.drafts or isinstance(spec, MtpSpec) else _OF_DRAFTING
    told = [f"\n  {key}: {of}" for key, of in facts.items() if of is not None and key not in left_out]
    return f"dflash_sglang {__version__} worker active:{''.join(told)}"


def _of_draft(draft: LoadedDraft, spec: DraftSpec, context_len: int, config: PluginConfig) -> dict[str, Any]:
    """The lines in their order; None: there is no such thing."""
    served, role = get_spec(), get_disagg().disaggregation_mode
    tokens, window = draft.proposed_tokens, served.speculative_draft_window_size
    kept = "" if tokens is None else f"{tokens} tokens ({served.speculative_token_map}), "
    longest, no_copies = spec.max_position_embeddings, why_no_copies(config, spec)
    return {
        "draft": f"{spec.architecture} ({spec.num_layers} layers)",
        "layers": layers_read(spec),
        "rope": rope_read(spec),
        "block": f"{draft.block_size} (trained {spec.block_size})",
        "target_layers": list(draft.feature_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "own_modules": draft.model.own_modules,
        "draft_attention": draft.attention_backend,
        "draft_quantization": draft.quantization,
        "context_kv": draft.context_kv.reason,
        "head": f"{kept}{draft.borrowed.head_form}",
        "role": None if role == "null" else role,
        "positions": f"{context_len} (max_position_embeddings {longest})" if context_len > longest else None,
        "draft_window": window and f"{window} (sinks {served.speculative_draft_sink_size or 0})",
        "draft_kv": _kv_planned(draft.rings),
        "copy": config.copy if no_copies is None else f"off ({no_copies})",
        **dict(_of_family(spec)),
        "proposals": None if draft.model.edges is None else _proposals(draft),
    }


def _of_family(spec: DraftSpec) -> Iterator[tuple[str, str]]:
    """The lines of the parts that only some families have."""
    if spec.dflash2 is not None:
        conv, selector = spec.convolution, spec.dflash2
        yield "convolution", f"{conv.taps} taps, groups of {conv.group_size}" if conv else "none"
        yield "selector", f"rank {selector.selector_rank} over {selector.selector_top_k} candidates"
    if spec.anchor_proposes or spec.dspark is not None or spec.domino is not None:
        yield "proposals_from", f"the {'anchor' if spec.anchor_proposes else 'first mask'}'s row"
    if spec.dspark is not None:
        rank, kind = spec.dspark.rank, spec.dspark.kind
        yield "markov_head", f"{f'{kind}, ' * (kind != VANILLA)}rank {rank}" if rank else "none"
    if spec.domino is not None:
        yield "domino", f"GRU of {spec.domino.state_size}, rank {spec.domino.rank}"
    if spec.laguna is not None:
        yield "attention_gates", f"{spec.laguna.gates} per head"


def _of_mtp(draft: LoadedDraft, spec: MtpSpec) -> dict[str, Any]:
    kinds = ", ".join(layer.kind.removesuffix("_attention") for layer in spec.layers)
    return {
        "draft": f"MTP({spec.num_layers} layers: {kinds}; own heads)",
        "layers": layers_read(spec),
        "block": f"{draft.block_size} (trained {spec.block_size})",
        "draft_attention": draft.attention_backend,
        "features": draft.context_kv.reason,
        "head": draft.borrowed.head_form,
        "draft_kv": _kv_planned(draft.rings),
        "proposals": _proposals(draft),
    }


def _proposals(draft: LoadedDraft) -> str:
    return "drawn" if draft.draws_proposals else "argmax"


def _kv_planned(rings: RingPool | str) -> str:
    """For the start-up line, before the pools are sized."""
    if isinstance(rings, str):
        return f"whole ({rings})"
    return f"rings of {rings.shape.size} tokens (window {rings.shape.window})"


def memory_line(draft: LoadedDraft, tables: Tables | None = None, copies: Copies | None = None) -> str:
    """`dflash_sglang memory ...`: what the draft takes of this rank's device, in GB (2**30 bytes).

    Weights are those it does not borrow, KV its own pool, tables what verification keeps of requests, graphs what
    SGLang saw those of whole blocks take. What other widths took, target and draft, is in a line of their own.
    tables: None on a server that only prefills, which has no graphs of the draft either. copies: they keep the
    token of each slot, and only the sized pools tell how many there are.
    """
    runner, model, head_copy = draft.runner, draft.model, draft.borrowed.head_copy
    # Of the storages: layers may share one, and K and V rows that were stacked are slices of it.
    tensors = [*model.parameters(), *model.buffers(), *(() if head_copy is None else head_copy.tensors)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    pool = runner.token_to_kv_pool
    kv = sum(pool.get_kv_size_bytes())
    line = (
        f"dflash_sglang memory of this rank's draft: weights {sum(storages.values()) / GB:.3f} GB, "
        f"KV {kv / GB:.3f} GB for {_kv_kept(draft, pool)}"
    )
    if tables is None:
        return line
    of_copies = "" if copies is None else f"copies {copies.nbytes / GB:.3f} GB, "
    return (
        f"{line}, tables {tables.nbytes / GB:.3f} GB for {tables.requests} requests, {of_copies}"
        f"graphs of whole blocks {sum(runner.graph_memory_usage.values()):.3f} GB"
    )


def _kv_kept(draft: LoadedDraft, pool: Any) -> str:
    if isinstance(draft.rings, str):
        sliding = f", {pool.size_swa} of sliding layers" if draft.swa_window else ""
        return f"{pool.size} tokens{sliding}"
    if draft.rings.rings is None:
        return f"{pool.size} tokens ({draft.rings.why_whole})"
    return f"{draft.rings.rings} rings of {draft.rings.shape.size} tokens"
