"""What start-up loads: the draft, what it borrows of the target, and its pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_sglang.checkpoint.files import fingerprint, weights_directory
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.checkpoint.token_map import read_token_map
from dflash_sglang.drafting.draft_input import SlotReservation
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.models.mtp.recent_rows import RecentRows
from dflash_sglang.patches import agreement, draft_pool, replayed_states, retracted_rows, weight_updates
from dflash_sglang.patches.target_features import deliver_hidden_states, ensure_capture
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
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
from dflash_sglang.startup.draft_kv import needs_whole_pool, ring_shape
from dflash_sglang.startup.facts import Problem, StartupError, TargetFacts
from dflash_sglang.verify.tables import most_rows

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from dflash_sglang.models.borrowed import Borrowed
    from dflash_sglang.models.draft import DFlashDraftModel
    from dflash_sglang.patches.draft_pool import RingPool


logger = logging.getLogger(__name__)


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
    context_kv: ContextKV | RecentRows
    drafts: bool  # a prefill server's does not
    draws_proposals: bool  # to sampled requests
    proposed_tokens: int | None  # of --speculative-token-map, None without
    rings: RingPool | str  # of its KV, or why its pool is as large as the target's

    @property
    def quantization(self) -> str:
        """Of the checkpoint or of the flags; "none" without."""
        return self.model.spec.quantization or get_spec().speculative_draft_model_quantization or "none"

    @property
    def has_rings(self) -> bool:
        """Once the target's pool is sized."""
        return not isinstance(self.rings, str) and self.rings.rings is not None

    @property
    def swa_window(self) -> int:
        """Sliding slots behind the last committed token that the draft needs; 0 where it has full slots only."""
        spec = self.model.spec
        return spec.reach if isinstance(spec, MtpSpec) and self.runner.model_config.is_hybrid_swa else 0

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
    block_size = int(get_spec().speculative_num_draft_tokens)
    loaded = partial(
        LoadedDraft,
        worker=bundle.draft_worker,
        runner=runner,
        model=model,
        block_size=block_size,
        attention_backend=bundle.resolved_attention_backend,
        parallel_layout=layout,
    )
    if isinstance(model.spec, MtpSpec):
        return _load_mtp(loaded, runner, model, model.spec.draft_rows(block_size), target, config)
    of_target = TargetFacts.from_config(target.model_config.hf_text_config)
    ensure_capture(target.model, model.spec.target_layer_ids, target.spec_aux_config.dflash_target_layer_ids)
    served, page_size = get_spec(), get_schedule().page_size
    flags = served.speculative_draft_window_size, served.speculative_draft_sink_size
    whole_for = needs_whole_pool(get_memory().enable_hierarchical_cache, get_disagg().disaggregation_mode)
    shape = ring_shape(model.spec, config, block_size, page_size, *flags, whole_for)
    path = served.speculative_token_map if drafts else None
    token_map = None if path is None else read_token_map(path)
    if drafts:
        replayed_states.install(target)
    head_form = config.draft_head if drafts else "as_is"
    borrowed = model.bind_target(target.model, layout.attn_tp_size, token_map, head_form, of_target.vocab_size)
    context_kv = ContextKV(model, config.context_kv, partial(draft_tp_context, layout))
    head_copy = borrowed.head_copy
    weight_updates.install(target, runner, context_kv.refresh, None if head_copy is None else head_copy.refresh)
    return loaded(
        feature_layer_ids=model.spec.target_layer_ids,
        borrowed=borrowed,
        context_kv=context_kv,
        drafts=drafts,
        draws_proposals=config.draws(joint=model.edges is not None),
        proposed_tokens=None if token_map is None else len(token_map),
        rings=shape if isinstance(shape, str) else draft_pool.install(shape),
    )


def _load_mtp(
    loaded: Callable[..., LoadedDraft],
    runner: ModelRunner,
    model: Any,
    rows: int,
    target: ModelRunner,
    config: PluginConfig,
) -> LoadedDraft:
    """The rest of `load_draft` for multi-token-prediction layers. rows: of a block in the draft's forward."""
    deliver_hidden_states(target.model)
    spec = model.spec
    recent = RecentRows(most_rows(), rows, spec.num_layers, spec.hidden_size, runner.dtype, runner.device)
    borrowed = model.bind_target(target.model, recent)
    weight_updates.install(target, runner, None, None)
    slots = "multi-token-prediction layers have the target's slots"
    if runner.model_config.is_hybrid_swa:
        of_groups = runner.model_config.full_attention_layer_ids, runner.model_config.swa_attention_layer_ids
        draft_pool.price_groups(*map(len, of_groups))
        slots += ", sliding ones its sliding slots"
    return loaded(
        feature_layer_ids=(),
        borrowed=borrowed,
        context_kv=recent,
        drafts=True,
        draws_proposals=config.draws(joint=True),
        proposed_tokens=None,
        rings=slots,
    )


def bind_pools(draft: LoadedDraft, target: ModelRunner, page_size: int) -> SlotReservation:
    """Let context KV be written to the draft's pool. page_size: of the KV pools. Returns what reserves slots of
    decode steps."""
    if isinstance(draft.context_kv, ContextKV):
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
    shape = draft.model.spec.num_layers, model.get_total_num_kv_heads(), model.head_dim
    dtype = str(draft.runner.kv_cache_dtype).removeprefix("torch.")
    files = fingerprint(weights_directory(path, revision, get_model().download_dir))
    line = agreement.draft_line(*shape, dtype, draft.feature_layer_ids, files)
    if role == "prefill":
        agreement.register_with(line)
        backend = get_disagg().disaggregation_transfer_backend
        agreement.refuse_peers_without_draft(backend)
        if backend == "nixl" and not get_schedule().disable_overlap_schedule:
            # Nixl does not wait for the forward that may still write a cached prefix: it is sent with the rest.
            envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.set(False)
    else:
        of_target = target.model_config
        layers = TargetFacts.from_config(of_target.hf_text_config).num_layers
        if config.prefill == "any" and draft.model.spec.num_layers >= layers:
            expected = (
                f"'same' with a draft of {draft.model.spec.num_layers} layers beside a target of {layers}: SGLang "
                "takes KV that comes without a draft's for that of a part of the layers"
            )
            raise StartupError([Problem(f"{CONFIG_ENV} prefill", "any", expected, "Leave it out.")])
        heads = [(one.get_total_num_kv_heads(), one.head_dim) for one in (of_target, model)]
        agreement.compare_with(line, config.prefill, alike=heads[0] == heads[1])
        retracted_rows.keep(target.token_to_kv_pool_allocator, draft.runner.token_to_kv_pool)
