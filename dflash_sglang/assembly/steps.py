"""What a decode step is made of, once memory is there: its parts, then its widths and their controller."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from dflash_sglang.assembly.loading import LoadedDraft
from dflash_sglang.attention.visibility import check_visibility
from dflash_sglang.checkpoint.in_words import PairFacts
from dflash_sglang.drafting.block import BlockBuilder
from dflash_sglang.drafting.copies import Copies
from dflash_sglang.drafting.draft_input import SlotReservation
from dflash_sglang.drafting.mtp.source import MtpSource
from dflash_sglang.drafting.proposals import Changed, ProposalSource
from dflash_sglang.drafting.proposer import Proposer, why_no_candidates
from dflash_sglang.drafting.rings import DraftRings, RingContext
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.drafting.window import DraftWindow, is_imposed
from dflash_sglang.models.context_kv.base import ContextWriter
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.models.mtp.recent_rows import RecentRows
from dflash_sglang.observe.alarm import Alarm, Causes
from dflash_sglang.observe.counts import Counts
from dflash_sglang.observe.observer import Observer
from dflash_sglang.patches.attention_room import plan_windows
from dflash_sglang.patches.flash3 import spare_launches
from dflash_sglang.settings.plugin_config import FORCED_ENV, PluginConfig
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.sglang_names.scheduler import SIMULATE_ACC_LEN, ModelRunner, TpModelWorker, get_parallel
from dflash_sglang.startup.copying import (
    RENAMED,
    chains_of,
    more_rows_problem,
    renamed_slots_problem,
    why_no_copies,
)
from dflash_sglang.startup.facts import StartupError, TargetFacts
from dflash_sglang.startup.mtp_checks import attention_problems
from dflash_sglang.verify.acceptance import Answers
from dflash_sglang.verify.graph_tail import VerifyTail, names_slots_alike
from dflash_sglang.verify.ragged import RaggedVerify
from dflash_sglang.verify.step_clock import StepClock
from dflash_sglang.verify.tables import Tables
from dflash_sglang.verify.target_logits import TargetLogits
from dflash_sglang.verify.tree import TreeVerify
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.warmup.dummy_batches import Rehearsal
from dflash_sglang.width import startup
from dflash_sglang.width.controller import WidthController
from dflash_sglang.width.ranks import Group, width_group
from dflash_sglang.width.runtime_states import RuntimeStates, most_requests

logger = logging.getLogger(__name__)


class StepParts(NamedTuple):
    """What a decode step runs, in its order."""

    reservation: SlotReservation
    blocks: BlockBuilder
    proposer: ProposalSource
    verifier: Verifier
    tail: VerifyTail  # of the target's graphs
    context: ContextWriter
    rings: DraftRings | None
    copies: Copies | None


def forced_answers(slots: StepSlots) -> Answers | None:
    """What answers in the target's place, in a measurement that the environment asks for; None: the target."""
    if FORCED_ENV not in os.environ and SIMULATE_ACC_LEN <= 0:
        return None
    from dflash_sglang.bench.forced import answers

    return answers.from_environment(slots.block_size, slots.max_requests, slots.device)


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
    logits = TargetLogits(target)
    own_table = runner.req_to_token_pool.req_to_token
    rings = _rings(draft, target, table, own_table, reservation.page_size)
    context: ContextWriter = draft.context_kv
    if rings is not None:
        assert isinstance(draft.context_kv, ContextKV)
        context = RingContext(draft.context_kv, rings)
    tail = VerifyTail(target, runner, logits, tables.acceptor, context)
    copies, answers = _copies(draft, target, slots.longest, config), tables.acceptor.answers
    window = rings or DraftWindow.imposed(reservation.page_size, table, own_table)
    source = _source(draft, config, window, None if answers is not None else copies)
    if answers is not None:
        source = Changed(source, answers.foretell)
    if copies is not None:
        source = Changed(source, copies.propose)
    mask, assign = draft.model.spec.mask_token_id, None if rings is None else rings.assign_block
    alike = names_slots_alike(target, runner) and not is_imposed() and rings is None
    # Without a mask token the source reads no row of the block.
    in_place = mask is not None and alike and not draft.model.spec.has_row_less
    blocks = BlockBuilder(target, runner, block_size, mask or 0, slots, in_place, assign)
    verifier = Verifier(target_worker, block_size, logits, tables, tail)
    return StepParts(reservation, blocks, source, verifier, tail, context, rings, copies)


def _copies(draft: LoadedDraft, target: ModelRunner, longest: int, config: PluginConfig) -> Copies | None:
    if why_no_copies(config, draft.model.spec) is not None:
        return None
    if names_slots_alike(target, draft.runner):
        return Copies(target, longest)
    if config.copy != "auto":
        raise StartupError([renamed_slots_problem(config.copy)])
    if get_parallel().tp_rank == 0:
        logger.info("dflash_sglang copies: none %s", RENAMED)
    return None


def _source(
    draft: LoadedDraft, config: PluginConfig, window: DraftWindow | None, copies: Copies | None
) -> ProposalSource:
    """copies: of proposals that nobody else changes."""
    if isinstance(draft.context_kv, RecentRows):
        recent, layout = draft.context_kv, draft.parallel_layout
        return MtpSource(draft.runner, draft.model, recent, layout, drawn=draft.draws_proposals)
    of_trees = 0 if why_no_candidates(draft.model) else most_requests(config.width.trees)
    of_draft = draft.runner, draft.model, draft.block_size, draft.parallel_layout
    return Proposer(*of_draft, drawn=draft.draws_proposals, window=window, tree_requests=of_trees, copies=copies)


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
    if isinstance(draft.context_kv, RecentRows):
        problems = list(attention_problems(target.device, draft.attention_backend))
        if problems:
            raise StartupError(problems)
        verifier.bind_attention_backends()  # the layers are of the target's classes, and see what those see
        return
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
    is_mtp = isinstance(draft.context_kv, RecentRows)
    full_blocks = "multi-token-prediction layers keep as many rows of each request" if is_mtp else None
    asked = startup.servable(config.width, target, block_size)
    states = RuntimeStates(target, draft.runner, draft.model, block_size, draft.scope)
    ragged = startup.can_be_ragged(asked, target, group, full_blocks)
    free = startup.free_memory(target)
    served = startup.add_widths(asked, states, block_size, free, ragged)
    history = None if parts.copies is None else parts.copies.history
    trees = TreeVerify(target, draft.runner, block_size, parts.rings, history)
    reason = full_blocks or why_no_candidates(draft.model)
    answers = tables.acceptor.answers
    if answers is not None and not answers.trees:
        reason = "acceptance is forced by a profile, which says nothing of a tree's branches"
    if startup.can_verify_trees(asked, target, draft.runner, group, reason):
        startup.add_trees(asked, states, trees, parts.tail, free)
        parts.reservation.serve_trees(states.trees)
    if parts.copies is not None and config.copy != "block":
        chains = chains_of(config, draft.model.spec, block_size)
        reason = _why_no_more_rows(parts, chains) or startup.why_no_chains(asked, target, group)
        if reason is not None and config.copy == 64:
            raise StartupError([more_rows_problem(reason)])
        startup.add_chains(chains, states, free, asked.memory_reserve, reason)
        parts.reservation.serve_chains(states.chains)
    parts.verifier.after_capture(
        [kind for width in served.states(block_size) for kind in parts.proposer.examples(width)]
    )
    return ServedWidths(states, RaggedVerify(target, block_size, states.captured_requests), trees, served, group)


def _why_no_more_rows(parts: StepParts, chains: Mapping[int, int]) -> str | None:
    """Why the draft takes no more rows of a step than a block; None if it does."""
    if not chains:
        return "blocks have as many rows"
    if is_imposed():
        return "the draft's window is imposed, and no test has more rows with it"
    return None if parts.rings is None else "rings, which draft_kv 'whole' turns off, have room for blocks"


def build_controller(
    draft: LoadedDraft,
    target: ModelRunner,
    widths: ServedWidths,
    rehearsal: Rehearsal,
    set_max_commit: Callable[..., None],
    copies: Copies | None,
) -> WidthController:
    """Build what chooses each step's width, with step times as they are measured now, and what counts steps."""
    block, states = draft.block_size, widths.states
    config = startup.without_misplaced_states(widths.config, states, target, rehearsal, widths.group, block)
    policy = startup.policy_of(config, target, block, widths.group, states)
    chooses = config.fixed is None
    if chooses:
        startup.measure(policy, target, rehearsal, widths.group)
    facts = TargetFacts.from_config(target.model_config.hf_text_config)
    observer = Observer(
        Counts(policy.chains.longest, ragged=policy.budgets is not None, chooses=chooses),
        Alarm(block),
        Causes(PairFacts(draft.model.spec, facts.num_layers, facts.vocab_size, draft.quantization)),
        (lambda: policy.metrics.over_width_1) if chooses else None,
        None if copies is None else copies.snapshot,
    )
    return WidthController(policy, states, set_max_commit, StepClock(target.device), observer)
