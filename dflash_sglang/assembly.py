"""Builds the worker's parts from a launch, in the order in which SGLang has what they need.

load_draft           the target is loaded; KV pools are not sized yet
bind_pools           request table and KV pools exist
build_step           the same
check_attention      attention backends exist
add_widths           graphs of whole blocks exist
build_controller     graphs of every width exist

`startup_line` and `memory_line` tell operators what was built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_sglang import __version__
from dflash_sglang.attention.visibility import check_visibility
from dflash_sglang.checkpoint.files import fingerprint, weights_directory
from dflash_sglang.checkpoint.in_words import layers_read, rope_read
from dflash_sglang.checkpoint.token_map import read_token_map
from dflash_sglang.drafting.block import BlockBuilder
from dflash_sglang.drafting.copies import Copies
from dflash_sglang.drafting.draft_input import SlotReservation
from dflash_sglang.drafting.proposer import Proposer, why_no_candidates
from dflash_sglang.drafting.rings import DraftRings, RingContext
from dflash_sglang.drafting.window import DraftWindow, is_imposed
from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.models.context_kv.base import ContextWriter
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.observe.alarm import Alarm
from dflash_sglang.observe.causes import Causes
from dflash_sglang.observe.counts import Counts
from dflash_sglang.observe.observer import Observer
from dflash_sglang.observe.step_split import StepSplit
from dflash_sglang.patches import agreement, draft_pool, replayed_states, retracted_rows, weight_updates
from dflash_sglang.patches.flash3 import spare_launches
from dflash_sglang.patches.flashinfer_windows import plan_windows
from dflash_sglang.patches.target_features import ensure_capture
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.sglang_names.scheduler import (
    build_draft_tp_worker,
    draft_pp_context,
    draft_tp_context,
    envs,
    get_disagg,
    get_memory,
    get_model,
    get_parallel,
    get_schedule,
    get_spec,
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from dflash_sglang.startup.copying import copies_in_words, renamed_slots_problem
from dflash_sglang.startup.draft_kv import needs_whole_pool, ring_shape
from dflash_sglang.startup.facts import Problem, StartupError, TargetFacts
from dflash_sglang.verify.graph_tail import VerifyTail, names_slots_alike
from dflash_sglang.verify.ragged import RaggedVerify
from dflash_sglang.verify.step_clock import StepClock
from dflash_sglang.verify.tables import Tables
from dflash_sglang.verify.target_logits import TargetLogits
from dflash_sglang.verify.tree import TreeVerify
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.width import startup
from dflash_sglang.width.controller import WidthController
from dflash_sglang.width.group import Group
from dflash_sglang.width.ranks import width_group
from dflash_sglang.width.runtime_states import RuntimeStates, most_requests

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from torch import Tensor

    from dflash_sglang.models.draft import Borrowed, DFlashDraftModel
    from dflash_sglang.patches.draft_pool import RingPool
    from dflash_sglang.warmup.dummy_batches import Rehearsal


logger = logging.getLogger(__name__)
GB = 1 << 30


@dataclass
class LoadedDraft:
    """The draft with its weights, and what was decided about it."""

    worker: TpModelWorker
    runner: ModelRunner
    model: DFlashDraftModel
    block_size: int  # of the widest blocks
    attention_backend: str
    parallel_layout: Any
    feature_layer_ids: Sequence[int]
    borrowed: Borrowed
    context_kv: ContextKV
    drafts: bool  # a prefill server's does not
    draws_proposals: bool  # to sampled requests
    proposed_tokens: int | None  # of --speculative-token-map, None without
    rings: RingPool | str  # of its KV, or why its pool is as large as the target's

    @property
    def has_rings(self) -> bool:
        """Once the target's pool is sized."""
        return not isinstance(self.rings, str) and self.rings.rings is not None

    def pool_config(self, of_target: Any) -> Any:
        """SGLang's MemoryPoolConfig of the draft's pool."""
        return of_target if isinstance(self.rings, str) else self.rings.config_of_draft(of_target)

    def rows(self) -> AbstractContextManager[Any]:
        """In which SGLang takes a draft's block to have as many rows as the draft has."""
        return get_spec().override(speculative_num_draft_tokens=self.model.spec.draft_rows(self.block_size))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """In which the draft's backends and graphs are made."""
        # SGLang's scope keeps this flag of the target's, and graphs would wait for other ranks' batches.
        alone = get_parallel().override(attn_dp_enabled=False)
        with draft_pp_context(), draft_tp_context(self.parallel_layout), alone, self.rows():
            yield


def load_draft(
    server_args: ServerArgs,
    gpu_id: int,
    nccl_port: int,
    target_worker: TpModelWorker,
    config: PluginConfig,
    drafts: bool = True,
) -> LoadedDraft:
    """Load the draft and lend it the target's embedding and head; let the target capture the draft's features.

    Without `drafts` the draft only makes context KV: its head is not copied, and nothing is verified.

    Raises ValueError or DraftConfigError for a draft that does not fit the target or the settings.
    """
    target = target_worker.model_runner
    layout = resolve_draft_parallel_layout(
        model_draft_parallel_spec(target.spec_aux_config.draft_model_config, spec_algorithm=target.spec_algorithm),
        collapse_cp=True,
    )
    # The draft's max_position_embeddings bounds nothing: SGLang makes its RoPE tables as long as this context.
    longer = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.override(True)
    with longer, draft_pp_context(), draft_tp_context(layout):
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=target.model_config,
            algo_label="DFLASH",
        )
    runner, model = bundle.draft_model_runner, bundle.draft_model
    layers = TargetFacts.from_config(target.model_config.hf_text_config).num_layers
    feature_layer_ids = model.spec.feature_layer_ids(layers)
    ensure_capture(target.model, feature_layer_ids)
    block_size = int(get_spec().speculative_num_draft_tokens)
    shape = _ring_shape(model, config, block_size)
    path = get_spec().speculative_token_map if drafts else None
    token_map = None if path is None else read_token_map(path)
    if drafts:
        replayed_states.install(target)
    head_form = config.draft_head if drafts else "as_is"
    borrowed = model.bind_target(target.model, layout.attn_tp_size, token_map, head_form)
    context_kv = ContextKV(model, config.context_kv, partial(draft_tp_context, layout))
    head_copy = borrowed.head_copy
    weight_updates.install(target, runner, context_kv.refresh, None if head_copy is None else head_copy.refresh)
    return LoadedDraft(
        worker=bundle.draft_worker,
        runner=runner,
        model=model,
        block_size=block_size,
        attention_backend=bundle.resolved_attention_backend,
        parallel_layout=layout,
        feature_layer_ids=feature_layer_ids,
        borrowed=borrowed,
        context_kv=context_kv,
        drafts=drafts,
        draws_proposals=config.draws(joint=model.edges is not None),
        proposed_tokens=None if token_map is None else len(token_map),
        rings=shape if isinstance(shape, str) else draft_pool.install(shape),
    )


def _ring_shape(model: DFlashDraftModel, config: PluginConfig, block_size: int) -> RingShape | str:
    return ring_shape(
        model.spec,
        config,
        block_size,
        get_schedule().page_size,
        get_spec().speculative_draft_window_size,
        get_spec().speculative_draft_sink_size,
        needs_whole_pool(get_memory().enable_hierarchical_cache, get_disagg().disaggregation_mode),
    )


def bind_pools(draft: LoadedDraft, target: ModelRunner, page_size: int) -> SlotReservation:
    """Let context KV be written to the draft's pool. page_size: of the KV pools. Returns what reserves slots of
    decode steps."""
    draft.context_kv.bind(draft.runner.token_to_kv_pool, draft.runner.kv_index_translator)
    if get_parallel().tp_rank == 0:
        logger.info("dflash_sglang context KV: %s", draft.context_kv.reason)
    rows, row_width = target.req_to_token_pool.req_to_token.shape
    return SlotReservation(rows, draft.block_size, row_width, page_size, target.device)


def agree(draft: LoadedDraft, target: ModelRunner, config: PluginConfig) -> None:
    """Let a prefill server tell decode servers of its draft, and each refuse the other's where they differ. The
    pools exist.

    Raises StartupError where a decode server may not take requests without context KV.
    """
    role, spec, model = get_disagg().disaggregation_mode, get_spec(), draft.runner.model_config
    if role == "null":
        return
    path, revision = spec.speculative_draft_model_path, spec.speculative_draft_model_revision
    line = agreement.draft_line(
        draft.model.spec.num_layers,
        model.get_total_num_kv_heads(),
        model.head_dim,
        str(draft.runner.kv_cache_dtype).removeprefix("torch."),
        draft.feature_layer_ids,
        fingerprint(weights_directory(path, revision, get_model().download_dir)),
    )
    if role == "prefill":
        agreement.register_with(line)
        if get_disagg().disaggregation_transfer_backend == "mooncake":
            agreement.refuse_peers_without_draft()
    else:
        of_target = target.model_config
        layers = TargetFacts.from_config(of_target.hf_text_config).num_layers
        if config.prefill == "any" and draft.model.spec.num_layers >= layers:
            raise StartupError([_any_problem(draft.model.spec.num_layers, layers)])
        heads = [(one.get_total_num_kv_heads(), one.head_dim) for one in (of_target, model)]
        agreement.compare_with(line, config.prefill, alike=heads[0] == heads[1])
        retracted_rows.keep(target.token_to_kv_pool_allocator, draft.runner.token_to_kv_pool)


def _any_problem(draft_layers: int, target_layers: int) -> Problem:
    expected = (
        f"'same' with a draft of {draft_layers} layers beside a target of {target_layers}: SGLang takes KV that "
        "comes without a draft's for that of a part of the layers"
    )
    return Problem(f"{CONFIG_ENV} prefill", "any", expected, "Leave it out.")


class StepParts(NamedTuple):
    """What a decode step runs, in its order."""

    reservation: SlotReservation
    blocks: BlockBuilder
    proposer: Proposer
    verifier: Verifier
    tail: VerifyTail  # of the target's graphs
    context: ContextWriter
    rings: DraftRings | None
    copies: Copies | None


def build_step(
    draft: LoadedDraft,
    target_worker: TpModelWorker,
    tables: Tables,
    reservation: SlotReservation,
    config: PluginConfig,
) -> StepParts:
    """Build the parts of a decode step, with the tail of the target's graphs."""
    target, runner, block_size = target_worker.model_runner, draft.runner, draft.block_size
    table = target.req_to_token_pool.req_to_token
    slots = tables.acceptor.slots
    slots.fit(len(table))
    assert draft.model.spec.mask_token_id is not None  # start-up validation refuses a draft without
    logits = TargetLogits(target)
    own_table = runner.req_to_token_pool.req_to_token
    rings = _rings(draft, target, table, own_table, reservation.page_size)
    context: ContextWriter = draft.context_kv if rings is None else RingContext(draft.context_kv, rings)
    tail = VerifyTail(target, runner, logits, tables.acceptor, context)
    copies = None
    if copies_of(config) == "block":
        if not names_slots_alike(target, runner):
            raise StartupError([renamed_slots_problem()])
        copies = Copies(target, block_size)
    return StepParts(
        reservation,
        BlockBuilder(
            target,
            block_size,
            draft.model.spec.mask_token_id,
            slots,
            in_place=names_slots_alike(target, runner)
            and not is_imposed()
            and rings is None
            and not draft.model.spec.anchor_proposes,
            draft_slots=None if rings is None else rings.assign_block,
        ),
        Proposer(
            runner,
            draft.model,
            block_size,
            draft.parallel_layout,
            drawn=draft.draws_proposals,
            tree_requests=0 if why_no_candidates(draft.model) else most_requests(config.width.trees),
            window=DraftWindow.imposed(reservation.page_size, table, own_table) if rings is None else rings,
        ),
        Verifier(target_worker, block_size, logits, tables, tail),
        tail,
        context,
        rings,
        copies,
    )


def _rings(
    draft: LoadedDraft, target: ModelRunner, table: Tensor, own_table: Tensor, page_size: int
) -> DraftRings | None:
    """table, own_table: req_to_token of target and draft."""
    pool = draft.rings
    if isinstance(pool, str) or pool.rings is None:
        return None
    slots = target.token_to_kv_pool_allocator.size_full + page_size
    return DraftRings(
        pool.shape, pool.rings, draft.block_size, slots, draft.runner.token_to_kv_pool, table, own_table
    )


def check_attention(draft: LoadedDraft, target: ModelRunner, verifier: Verifier) -> None:
    """Check that the attention backends show the draft and the target what they should see.

    Raises StartupError where they do not.
    """
    for runner in (target, draft.runner):
        spare_launches(runner.attn_backend)
        plan_windows(runner.attn_backend)
    with draft.scope():
        rows = draft.model.spec.draft_rows(draft.block_size)
        check_visibility(draft.runner, draft.model, rows, draft.attention_backend)
    verifier.bind_attention_backends()


class ServedWidths(NamedTuple):
    """The widths that steps can have, and how ranks agree on one."""

    states: RuntimeStates
    ragged: RaggedVerify
    trees: TreeVerify
    config: WidthConfig
    group: Group


def add_widths(
    draft: LoadedDraft, target: ModelRunner, parts: StepParts, tables: Tables, config: PluginConfig
) -> ServedWidths:
    """Make attention backends and graphs for the widths of the settings, as far as memory allows, and compile
    what sampled steps launch at each."""
    block_size, group = draft.block_size, width_group()
    asked = startup.servable(config.width, target, block_size)
    states = RuntimeStates(target, draft.runner, draft.model, block_size, draft.scope)
    ragged = startup.can_be_ragged(asked, target, group)
    free = startup.free_memory(target)
    served = startup.add_widths(asked, states, block_size, free, ragged)
    history = None if parts.copies is None else parts.copies.history
    trees = TreeVerify(target, draft.runner, block_size, parts.rings, history)
    reason = why_no_candidates(draft.model)
    if not tables.acceptor.knows_trees:
        reason = "acceptance is forced by a profile, which says nothing of a tree's branches"
    if startup.can_verify_trees(asked, target, draft.runner, group, reason):
        startup.add_trees(asked, states, trees, parts.tail, free)
        parts.reservation.serve_trees(states.trees)
    parts.verifier.after_capture(
        [kind for width in served.states(block_size) for kind in parts.proposer.examples(width)]
    )
    return ServedWidths(states, RaggedVerify(target, block_size, states.captured_requests), trees, served, group)


def build_controller(
    draft: LoadedDraft,
    target: ModelRunner,
    widths: ServedWidths,
    rehearsal: Rehearsal,
    set_max_commit: Callable[..., None],
    split: StepSplit,
) -> WidthController:
    """Build what chooses each step's width, with step times as they are measured now, and what counts steps."""
    block, states = draft.block_size, widths.states
    config = startup.without_misplaced_states(widths.config, states, target, rehearsal, widths.group, block)
    policy = startup.policy_of(config, target, block, widths.group, states)
    chooses = config.fixed is None
    if chooses:
        startup.measure(policy, target, rehearsal, widths.group)
    speaks = get_parallel().tp_rank == 0
    observer = Observer(
        Counts(block, ragged=policy.budgets is not None, chooses=chooses),
        Alarm(block),
        causes(draft, target),
        policy.metrics.gains if chooses else None,
        split,
        policy.confidence.snapshot if chooses else None,
    )
    return WidthController(policy, states, set_max_commit, StepClock(target.device), observer, speaks=speaks)


def causes(draft: LoadedDraft, target: ModelRunner) -> Causes:
    """What the acceptance alarm asks operators to check of this pair."""
    facts = TargetFacts.from_config(target.model_config.hf_text_config)
    return Causes(
        draft.model.spec, draft.feature_layer_ids, facts.num_layers, facts.vocab_size, draft_quantization(draft)
    )


def draft_quantization(draft: LoadedDraft) -> str:
    """Of the checkpoint or of the flags; "none" without."""
    return draft.model.spec.quantization or get_spec().speculative_draft_model_quantization or "none"


def copies_of(config: PluginConfig) -> str:
    """ "block", or "off" and why."""
    needs_texts = needs_whole_pool(get_memory().enable_hierarchical_cache, get_disagg().disaggregation_mode)
    return copies_in_words(config, needs_texts)


def startup_line(draft: LoadedDraft, context_len: int, config: PluginConfig) -> str:
    """`dflash_sglang <version> worker active:` and a line `  key: value` for each thing that was read or decided.

    context_len: the target's.
    """
    spec = draft.model.spec
    role = get_disagg().disaggregation_mode
    decisions = {
        "draft": f"{spec.architecture} ({spec.num_layers} layers)",
        "layers": layers_read(spec),
        "rope": rope_read(spec),
        "block": f"{draft.block_size} (trained {spec.block_size})",
        "target_layers": list(draft.feature_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "own_modules": draft.model.own_modules,
        "draft_attention": draft.attention_backend,
        "draft_quantization": draft_quantization(draft),
        "context_kv": draft.context_kv.reason,
        "head": draft.borrowed.head_form,
    }
    if role != "null":
        decisions["role"] = role
    if draft.proposed_tokens is not None:
        tokens = f"{draft.proposed_tokens} tokens ({get_spec().speculative_token_map})"
        decisions["head"] = f"{tokens}, {draft.borrowed.head_form}"
    if context_len > spec.max_position_embeddings:
        decisions["positions"] = f"{context_len} (max_position_embeddings {spec.max_position_embeddings})"
    if get_spec().speculative_draft_window_size is not None and draft.drafts:
        sinks = get_spec().speculative_draft_sink_size or 0
        decisions["draft_window"] = f"{get_spec().speculative_draft_window_size} (sinks {sinks})"
    decisions["draft_kv"] = draft_kv_in_words(draft.rings)
    decisions["copy"] = copies_of(config)
    if spec.dflash2 is not None:
        conv, selector = spec.dflash2.convolution, spec.dflash2
        decisions["convolution"] = f"{conv.taps} taps, groups of {conv.group_size}" if conv else "none"
        decisions["selector"] = f"rank {selector.selector_rank} over {selector.selector_top_k} candidates"
    if spec.dspark is not None:
        rank = spec.dspark.rank
        first = "anchor" if spec.dspark.from_anchor else "first mask"
        decisions["proposals_from"] = f"the {first}'s row"
        decisions["markov_head"] = f"{'gated, ' * spec.dspark.gated}rank {rank}" if rank else "none"
    if draft.model.edges is not None:
        decisions["proposals"] = "drawn" if draft.draws_proposals else "argmax"
    if not draft.drafts:
        for of_drafting in (
            "draft_attention",
            "head",
            "selector",
            "proposals",
            "proposals_from",
            "markov_head",
            "copy",
        ):
            decisions.pop(of_drafting, None)
    lines = (f"\n  {key}: {value}" for key, value in decisions.items())
    return f"dflash_sglang {__version__} worker active:{''.join(lines)}"


def draft_kv_in_words(rings: RingPool | str) -> str:
    """For the start-up line, before the pools are sized."""
    if isinstance(rings, str):
        return f"whole ({rings})"
    return f"rings of {rings.shape.size} tokens (window {rings.shape.window})"


def memory_line(draft: LoadedDraft, tables: Tables | None = None) -> str:
    """`dflash_sglang memory ...`: what the draft takes of this rank's device, in GB (2**30 bytes).

    Weights are those it does not borrow, KV its own pool, tables what verification keeps of requests, graphs what
    SGLang saw those of whole blocks take. What other widths took, target and draft, is in a line of their own.
    tables: None on a server that only prefills, which has no graphs of the draft either.
    """
    runner, model, head_copy = draft.runner, draft.model, draft.borrowed.head_copy
    # Of the storages: layers may share one, and K and V rows that were stacked are slices of it.
    tensors = [*model.parameters(), *model.buffers(), *(() if head_copy is None else head_copy.tensors)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    pool = runner.token_to_kv_pool
    kv = sum(pool.get_kv_size_bytes())
    line = (
        f"dflash_sglang memory of this rank's draft: weights {sum(storages.values()) / GB:.3f} GB, "
        f"KV {kv / GB:.3f} GB for {_kept(draft, pool)}"
    )
    if tables is None:
        return line
    return (
        f"{line}, tables {tables.nbytes / GB:.3f} GB for {tables.requests} requests, "
        f"graphs of whole blocks {sum(runner.graph_memory_usage.values()):.3f} GB"
    )


def _kept(draft: LoadedDraft, pool: Any) -> str:
    if isinstance(draft.rings, str):
        return f"{pool.size} tokens"
    if draft.rings.rings is None:
        return f"{pool.size} tokens ({draft.rings.why_whole})"
    return f"{draft.rings.rings} rings of {draft.rings.shape.size} tokens"
