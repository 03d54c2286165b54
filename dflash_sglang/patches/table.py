"""The table of patches: every change that this package makes to SGLang at run time.

`contract` compares the table with the SGLang that is installed. `apply` puts the rows into effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["hook around", "replaced attribute", "added method"]
Process = Literal["every", "launcher", "scheduler"]

_SRT = "sglang.srt"
_COMPONENTS = f"{_SRT}.managers.scheduler_components"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_GRAPHS = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_GRAPH_INPUTS = f"{_SRT}.model_executor.cuda_graph_buffer_registry"
_FLASH3 = f"{_SRT}.layers.attention.flashattention_backend"
_UPDATER = f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater"
_RELAY = f"{_SRT}.managers.overlap_utils"

CORRECTNESS = "correctness"
NOT_MEASURED = "not measured alone"
_BY_WIDTH = "1.42 of the built-in worker's tokens/s at 64 requests"


@dataclass(frozen=True)
class Patch:
    """A row: one place of SGLang's that is changed."""

    name: str
    target: str  # SGLang's dotted name; its last part is the attribute that is replaced
    kind: Kind
    process: Process  # that is changed
    by: str  # our function: the hook, or what replaces the attribute
    fingerprint: str  # of `source`, in SGLANG_VERSION
    why: str
    gain: str = CORRECTNESS
    reader: str = ""  # SGLang's function that reads the target, where the target is data

    @property
    def source(self) -> str:
        """The function or class of SGLang's whose source must be the known one."""
        return self.reader or self.target

    @property
    def attribute(self) -> str:
        return self.target.rpartition(".")[2]


PATCHES = (
    # ---- Every process ---------------------------------------------------------------------------------------
    Patch(
        name="worker",
        target=f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        kind="hook around",
        process="every",
        by="dflash_sglang.hooks.create_worker",
        fingerprint="9960ee2b90ad",
        why="The scheduler gets the worker of this package.",
    ),
    Patch(
        name="server-arguments",
        target=f"{_SRT}.arg_groups.speculative_hook.handle_speculative_decoding",
        kind="hook around",
        process="every",
        by="dflash_sglang.hooks.handle_speculative_decoding",
        fingerprint="171f4bc50420",
        why="Start-up checks run before a process starts.",
    ),
    Patch(
        name="draft-config",
        target=f"{_SRT}.utils.hf_transformers.config.HfModelConfigParser.parse",
        kind="hook around",
        process="every",
        by="dflash_sglang.hooks.parse_config",
        fingerprint="42b54bd40092",
        why="transformers cannot read the config of a speculators draft.",
    ),
    Patch(
        name="dead-ranks",
        target=f"{_SRT}.utils.watchdog.SubprocessWatchdog.stop",
        kind="hook around",
        process="every",
        by="dflash_sglang.patches.faults.stop_subprocess_watchdog",
        fingerprint="b9e8a5b59d06",
        why="SGLang may end a server without a word on which rank died, and how.",
    ),
    Patch(
        name="dead-replicas",
        target=f"{_SRT}.utils.watchdog.Watchdog.create",
        kind="hook around",
        process="every",
        by="dflash_sglang.patches.faults.create_watchdog",
        fingerprint="d33716daa21f",
        why="SGLang goes on when the scheduler of a data-parallel replica dies.",
    ),
    # ---- The launcher ----------------------------------------------------------------------------------------
    Patch(
        name="dp-attention",
        target=f"{_SRT}.arg_groups.speculative_hook.attn_dp_enabled_of",
        kind="replaced attribute",
        process="launcher",
        by="dflash_sglang.patches.dp_attention.allowed",
        reader=f"{_SRT}.arg_groups.speculative_hook._handle_dflash",
        fingerprint="1c460489ade4",
        why="SGLang refuses data-parallel attention without a GPU or --enable-dp-lm-head, for its own worker.",
    ),
    Patch(
        name="fatal-requests",
        target=f"{_SRT}.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        kind="hook around",
        process="launcher",
        by="dflash_sglang.patches.fatal_requests.create_tokenized_object",
        fingerprint="34b457358fec",
        why="Requests that would end the scheduler get HTTP status 400.",
    ),
    # ---- The scheduler: requests and results -----------------------------------------------------------------
    Patch(
        name="request-checks",
        target=f"{_SRT}.speculative.dflash_utils.validate_dflash_request",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.request_checks.validate_dflash_request",
        fingerprint="41af38f03656",
        why="Requests that speculation would answer wrongly get HTTP status 400.",
    ),
    Patch(
        name="stops",
        target=f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.stops.update_finish_state",
        fingerprint="fe88beaca569",
        why="The first stop inside an accepted run ends a request, as in plain decoding.",
    ),
    Patch(
        name="logprobs-of-no-token",
        target=f"{_COMPONENTS}.logprob_result_processor.SchedulerLogprobResultProcessor.add_logprob_return_values",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.results.add_logprob_return_values",
        fingerprint="a7bc4e318290",
        why="A request for no new token has no output logprob.",
    ),
    Patch(
        name="width-metrics",
        target=f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.get_internal_state",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.results.get_internal_state",
        fingerprint="1e054f6d1303",
        why="/server_info shows the widths of steps.",
        gain="observability",
    ),
    Patch(
        name="accept-threshold",
        target=f"{_COMPONENTS}.internal_state.SchedulerInternalStateController._validate_accept_threshold",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.results.validate_accept_threshold",
        fingerprint="659afc9019c0",
        why="A threshold below 1 would change the output.",
    ),
    Patch(
        name="session-prompt",
        target=f"{_SRT}.session.session_controller.Session._concat_token_arrays",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.sessions.concat_token_arrays",
        fingerprint="4a0cb3613e85",
        why="A session's next turn follows the stop of the last one, not the accepted run.",
    ),
    Patch(
        name="session-cache",
        target=f"{_SRT}.session.streaming_session.StreamingSession.try_cache_finished_req",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.sessions.try_cache_finished_req",
        fingerprint="fb92fcac6d80",
        why="A session must not keep slots that were reserved for blocks and never written.",
    ),
    # ---- The scheduler: weight updates -----------------------------------------------------------------------
    Patch(
        name="weight-update-roles",
        target=f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager._select_runners",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.weight_updates.select_runners",
        fingerprint="8ac8308a41b5",
        why="The draft's updater must know whether the target gets the same tensors.",
    ),
    Patch(
        name="weight-updaters",
        target=f"{_RUNNER}.weight_updater",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.weight_updates.install",
        reader=_UPDATER,
        fingerprint="16de448ef0ad",
        why="Copies of weights are renewed with them, and captured graphs are kept.",
    ),
    # ---- The scheduler: the step -----------------------------------------------------------------------------
    Patch(
        name="target-features",
        target=f"{_SRT}.model_executor.model_runner_components.attention_backend_setup"
        ".configure_aux_hidden_state_capture",
        kind="added method",
        process="scheduler",
        by="dflash_sglang.patches.target_features.ensure_capture",
        fingerprint="aa2dd7b53823",
        why="Features come in the checkpoint's order, the last layer's among them.",
    ),
    Patch(
        name="relay-lengths",
        target=f"{_RELAY}.FutureMap.resolve_seq_lens_cpu",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.relay.resolve_seq_lens_cpu",
        fingerprint="1f6bdad1f7b3",
        why="A decode step finds the lengths in the relay by itself.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="relay-tokens",
        target=f"{_RELAY}.resolve_forward_inputs",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.relay.resolve_forward_inputs",
        fingerprint="8c11ed0c2781",
        why="A decode step finds the last tokens in the relay by itself.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="relay-asserts",
        target=f"{_RELAY}._DEBUG_ASSERT",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.relay.keep_what_was_read",
        reader=f"{_RELAY}._assert_nonneg_and_invalidate",
        fingerprint="f195b8c2d6d8",
        why="With SGLANG_IS_IN_CI SGLang voids what it has read, and a decode step reads it once more.",
    ),
    Patch(
        name="runtime-attention",
        target=f"{_RUNNER}.attn_backend",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.runtime_state.use",
        reader=f"{_RUNNER}._forward_raw",
        fingerprint="ef63efb73098",
        why="Steps of another width have an attention backend of their own.",
        gain=_BY_WIDTH,
    ),
    Patch(
        name="runtime-graphs",
        target=f"{_RUNNER}.decode_cuda_graph_runner",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.runtime_state.use",
        reader=f"{_RUNNER}._forward_raw",
        fingerprint="ef63efb73098",
        why="Steps of another width have graphs of their own.",
        gain=_BY_WIDTH,
    ),
    Patch(
        name="verify-logits",
        target=f"{_SRT}.layers.logits_processor.LogitsProcessor._get_logits",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.half_precision_logits.keep_half_precision",
        fingerprint="4eda9f7b866a",
        why="A greedy verify needs no float32 copy of its logits, and no gather of whole ones.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="verify-logits-gather",
        target=f"{_SRT}.layers.logits_processor.LogitsProcessor.do_tensor_parallel_all_gather",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.half_precision_logits.keep_half_precision",
        reader=f"{_SRT}.layers.logits_processor.LogitsProcessor._get_logits",
        fingerprint="4eda9f7b866a",
        why="A verify leaves each rank its shard of the logits.",
        gain=NOT_MEASURED,
    ),
    # ---- The scheduler: attention ----------------------------------------------------------------------------
    Patch(
        name="attention-room",
        target=f"{_RUNNER}.init_attention_backends",
        kind="hook around",
        process="scheduler",
        by="dflash_sglang.patches.attention_room.init_attention_backends",
        fingerprint="461c0b4e6129",
        why="Page tables need room for a block that ends beyond the context.",
    ),
    Patch(
        name="attention-context",
        target=f"{_SRT}.configs.model_config.ModelConfig.context_len",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.attention_room.room_for_blocks",
        reader=f"{_SRT}.configs.model_config.ModelConfig._derive_context_length",
        fingerprint="5815447c38b9",
        why="SGLang's backends size page tables by the context's length, while they are made.",
    ),
    Patch(
        name="flash3-schedules",
        target=f"{_FLASH3}.flash_attn_with_kvcache",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.shared_schedule.share_schedule",
        reader=f"{_FLASH3}.FlashAttentionBackend.forward_extend",
        fingerprint="0eaee1695761",
        why="One tile schedule serves all layers of a captured forward.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="flash3-metadata",
        target=f"{_FLASH3}.FlashAttentionBackend.init_forward_metadata_in_graph",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.shared_schedule.share_schedule",
        fingerprint="9d3154f591cf",
        why="A new captured forward begins with a new schedule.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="flash3-queries",
        target=f"{_FLASH3}.FlashAttentionBackend.forward_extend",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.strided_queries.read_by_strides",
        fingerprint="0eaee1695761",
        why="The kernel reads a block's queries where the projection left them, without a copy.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="flashinfer-windows",
        target=f"{_SRT}.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.flashinfer_windows.plan_windows",
        fingerprint="36e49de36b67",
        why="SGLang masks the window of a block's first row only.",
    ),
    # ---- The scheduler: graphs -------------------------------------------------------------------------------
    Patch(
        name="graph-sizes",
        target=f"{_SRT}.model_executor.cuda_graph_config.PhaseConfig.bs",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.graph_captures.captured_at",
        reader=f"{_SRT}.model_executor.runner.base_cuda_graph_runner.get_batch_sizes_to_capture",
        fingerprint="6df268920226",
        why="Graphs of other widths are captured at fewer batch sizes.",
        gain="start-up",
    ),
    Patch(
        name="graph-inputs",
        target=f"{_GRAPH_INPUTS}.GraphSlot.source_fn",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.graph_inputs.leave_in_place",
        reader=f"{_GRAPH_INPUTS}.CudaGraphBufferRegistry.fill_from",
        fingerprint="e4a256756a1b",
        why="Inputs that a step wrote into the graph's tensors are not copied there again.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="graph-inputs-once",
        target=f"{_GRAPHS}._skips_prefilled_inputs",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.graph_inputs.load_inputs_once",
        reader=f"{_GRAPHS}.load_batch",
        fingerprint="746dbbe97cb6",
        why="Verify loads ids and positions before it replays.",
        gain=NOT_MEASURED,
    ),
    Patch(
        name="ragged-graphs",
        target=f"{_GRAPHS.rpartition('.')[0]}.ragged_verify_compact_graphs_enabled",
        kind="replaced attribute",
        process="scheduler",
        by="dflash_sglang.patches.graph_captures.by_tokens",
        reader=f"{_GRAPHS}.__init__",
        fingerprint="33784ad91294",
        why="SGLang makes graphs of a ragged verify for other algorithms.",
        gain="a number of verified tokens per request",
    ),
)


BY_NAME = {patch.name: patch for patch in PATCHES}
