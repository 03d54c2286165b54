"""The table of patches: every change that this package makes to SGLang at run time.

`contract` compares the table with the SGLang that is installed. `apply` puts the rows into effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

Kind = Literal["hook around", "replaced attribute", "added method"]
Process = Literal["every", "launcher", "scheduler"]

_SRT = "sglang.srt"
_COMPONENTS = f"{_SRT}.managers.scheduler_components"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_GRAPHS = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_GRAPH_INPUTS = f"{_SRT}.model_executor.cuda_graph_buffer_registry"
_FLASH3 = f"{_SRT}.layers.attention.flashattention_backend"
_UPDATER = f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater"
_LINEAR = "sglang.kernels.ops.attention.linear"
_RELAY = f"{_SRT}.managers.overlap_utils"
_PD = f"{_SRT}.disaggregation"

_LAUNCHES = "part of 2.0 ms of 7.9 where the host is the limit: 6 launches between graphs, not 33"
_REPLAYED = "4 times the running requests of a 27B on one H200"
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
    gain: str = ""  # a figure, or what an operator has of it
    test: str = ""  # below tests/: the one that shows the fault, where there is no gain
    reader: str = ""  # SGLang's function that reads the target, where the target is data

    @property
    def source(self) -> str:
        """The function or class of SGLang's whose source must be the known one."""
        return self.reader or self.target

    @property
    def worth(self) -> str:
        """What the row is kept for."""
        return f"Gain: {self.gain}." if self.gain else f"Test: tests/{self.test}."

    @property
    def attribute(self) -> str:
        return self.target.rpartition(".")[2]


def _row(kind: Kind, name: str, process: Process, by: str, fingerprint: str, target: str, **more: str) -> Patch:
    return Patch(name, target, kind, process, f"dflash_sglang.{by}", fingerprint, **more)


_hook, _replaced, _added = (partial(_row, kind) for kind in get_args(Kind))

# fmt: off
PATCHES: tuple[Patch, ...] = (
    # ---- Every process ---------------------------------------------------------------------------------------
    _hook("worker", "every", "hooks.create_worker", "9960ee2b90ad",
          f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm.create_worker",
          why="The scheduler gets the worker of this package.", test="engine/test_serving.py"),
    _hook("no-device", "every", "hooks.handle_missing_default_values", "b119ba95224d",
          f"{_SRT}.arg_groups.serving_hook.handle_missing_default_values",
          why="On a machine without a GPU SGLang does not say that this package has a CPU platform.",
          gain="a readable log"),
    _hook("server-arguments", "every", "hooks.handle_speculative_decoding", "171f4bc50420",
          f"{_SRT}.arg_groups.speculative_hook.handle_speculative_decoding",
          why="Start-up checks run before a process starts.", test="unit/test_plugin.py"),
    _hook("draft-config", "every", "hooks.parse_config", "42b54bd40092",
          f"{_SRT}.utils.hf_transformers.config.HfModelConfigParser.parse",
          why="transformers cannot read the config of a speculators draft, nor SGLang that of Gemma 4's layers.",
          test="unit/checkpoint/test_config_parser.py"),
    _hook("draft-overrides", "every", "hooks.get_config", "1b630d4b0822",
          f"{_SRT}.utils.hf_transformers.config.get_config",
          why="SGLang changes the draft's config by --json-model-override-args, which describes the target.",
          test="engine/test_serving.py"),
    _hook("mtp-config", "every", "hooks.config_draft_model", "a9ca103398fe",
          f"{_SRT}.configs.model_config.ModelConfig._config_draft_model",
          why="SGLang reads a target's multi-token-prediction layers as one layer, for a worker of its own.",
          test="unit/startup/test_mtp.py"),
    _hook("dead-ranks", "every", "patches.faults.stop_subprocess_watchdog", "b9e8a5b59d06",
          f"{_SRT}.utils.watchdog.SubprocessWatchdog.stop",
          why="SGLang may end a server without a word on which rank died, and how.",
          test="unit/patches/test_faults.py"),
    _hook("dead-replicas", "every", "patches.faults.create_watchdog", "d33716daa21f",
          f"{_SRT}.utils.watchdog.Watchdog.create",
          why="SGLang goes on when the scheduler of a data-parallel replica dies.",
          test="unit/patches/test_faults.py"),
    _hook("refusals", "every", "patches.refusals.get_exception_traceback", "05594a20727e",
          "sglang.utils.get_exception_traceback",
          why="A scheduler that refuses says why, without a traceback.", gain="a readable log"),
    # ---- The launcher ----------------------------------------------------------------------------------------
    _replaced("dp-attention", "launcher", "hooks.handle_speculative_decoding", "1c460489ade4",
          f"{_SRT}.arg_groups.speculative_hook.attn_dp_enabled_of",
          reader=f"{_SRT}.arg_groups.speculative_hook._handle_dflash",
          why="SGLang refuses data-parallel attention without a GPU or --enable-dp-lm-head, for its own worker.",
          test="engine/test_parallel.py"),
    _hook("fatal-requests", "launcher", "patches.fatal_requests.create_tokenized_object", "34b457358fec",
          f"{_SRT}.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
          why="Requests that would end the scheduler get HTTP status 400.", test="unit/patches/test_requests.py"),
    _hook("bodies", "launcher", "patches.request_checks.generate_contract_error", "11e58e1ffc66",
          f"{_SRT}.entrypoints.api_contract.generate_contract_error",
          why="A limit on drafting outside of custom_params gets HTTP status 400, where SGLang drops it.",
          test="unit/requests/test_misplaced.py"),
    _hook("openai-bodies", "launcher", "patches.request_checks.handle_request", "c95935f87152",
          f"{_SRT}.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
          why="The same for OpenAI's endpoints.", test="unit/requests/test_misplaced.py"),
    _hook("proposals-of-answers", "launcher", "patches.results.of_an_answer", "3edcb023b0a4",
          f"{_SRT}.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
          why="An answer counts the proposals that were verified, not a block in every step.",
          gain="observability"),
    # ---- The scheduler: requests and results -----------------------------------------------------------------
    _hook("request-checks", "scheduler", "patches.request_checks.validate_dflash_request", "41af38f03656",
          f"{_SRT}.speculative.dflash_utils.validate_dflash_request",
          why="Requests that speculation would answer wrongly get HTTP status 400.",
          test="unit/requests/test_misplaced.py"),
    _hook("stops", "scheduler", "patches.stops.update_finish_state", "fe88beaca569",
          f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
          why="The first stop inside an accepted run ends a request, as in plain decoding.",
          test="unit/patches/test_requests.py"),
    _hook("width-metrics", "scheduler", "patches.results.get_internal_state", "1e054f6d1303",
          f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.get_internal_state",
          why="/server_info shows the worker, widths and acceptance.", gain="observability"),
    _hook("decode-report", "scheduler", "patches.results.report_decode_stats", "c27ee9d5714f",
          f"{_COMPONENTS}.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
          why="Log line, alarm and Prometheus series come with SGLang's decode line.", gain="observability"),
    _hook("session-turn", "scheduler", "patches.sessions.create_req", "9c091dd16969",
          f"{_SRT}.session.session_controller.Session.create_req",
          why="A session's next turn follows the stop of the last one, and a refused one leaves it alone.",
          test="engine/test_sessions.py"),
    _hook("session-cache", "scheduler", "patches.sessions.try_cache_finished_req", "fb92fcac6d80",
          f"{_SRT}.session.streaming_session.StreamingSession.try_cache_finished_req",
          why="A session must not keep slots that were reserved for blocks and never written.",
          test="unit/patches/test_requests.py"),
    # ---- The scheduler: weight updates -----------------------------------------------------------------------
    _hook("weight-update-roles", "scheduler", "patches.weight_updates.select_runners", "8ac8308a41b5",
          f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager._select_runners",
          why="The draft's updater must know whether the target gets the same tensors.",
          test="unit/models/loading/test_updates.py"),
    _replaced("weight-updaters", "scheduler", "patches.weight_updates.install", "16de448ef0ad",
          f"{_RUNNER}.weight_updater",
          reader=_UPDATER,
          why="Copies of weights are renewed with them, and captured graphs are kept.",
          test="unit/models/loading/test_updates.py"),
    # ---- The scheduler: prefill and decode on different servers ----------------------------------------------
    _replaced("arrivals", "scheduler", "patches.arrivals.hand_to", "c728121d5868",
          f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input",
          why="A decode server's worker takes over requests that arrive prefilled.",
          test="engine/test_disaggregated.py"),
    _replaced("draft-line", "scheduler", "patches.agreement.register_with", "7109824d2bc5",
          f"{_PD}.common.conn.CommonKVManager.register_to_bootstrap",
          why="A prefill server tells decode servers what its draft is.",
          test="unit/patches/test_disaggregated.py"),
    _replaced("draft-peers", "scheduler", "patches.agreement.refuse_peers_without_draft", "2c7d8f6805df",
          f"{_PD}.common.conn.CommonKVSender.send",
          why="SGLang pairs the draft's KV with that of a decode server without one, and its transfers end.",
          test="unit/patches/test_disaggregated.py"),
    _replaced("nixl-peers", "scheduler", "patches.agreement.refuse_peers_without_draft", "3598ea615233",
          f"{_PD}.nixl.conn.NixlKVManager._prepare_payload_xfer",
          why="A decode server without the draft ends the thread through which every decode server asks.",
          test="unit/patches/test_disaggregated.py"),
    _replaced("draft-agreement", "scheduler", "patches.agreement.compare_with", "dbd068d1993b",
          f"{_PD}.common.conn.CommonKVReceiver.init",
          why="SGLang writes the draft's KV of another draft, type or number of ranks at wrong addresses.",
          test="unit/patches/test_disaggregated.py"),
    _replaced("retracted-rows", "scheduler", "patches.retracted_rows.keep", "1b7a4ac26428",
          f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.get_cpu_copy",
          reader=f"{_SRT}.managers.schedule_batch.Req.offload_kv_cache",
          why="SGLang keeps the target's KV of a retracted request only.",
          test="engine/test_disaggregated.py"),
    _replaced("resumed-rows", "scheduler", "patches.retracted_rows.keep", "b4df3b7ea008",
          f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.load_cpu_copy",
          reader=f"{_SRT}.managers.schedule_batch.Req.load_kv_cache",
          why="The same, when the request goes on.", test="engine/test_disaggregated.py"),
    _hook("retracted-step", "scheduler", "patches.retracted_rows.update_running_batch", "d9006ca33ece",
          f"{_SRT}.managers.scheduler.Scheduler.update_running_batch",
          why="SGLang keeps recurrent states of a retracted request that are a step ahead of its tokens.",
          test="unit/patches/test_disaggregated.py"),
    # ---- The scheduler: the step -----------------------------------------------------------------------------
    _added("target-features", "scheduler", "patches.target_features.ensure_capture", "aa2dd7b53823",
          f"{_SRT}.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture",
          why="Features come in the checkpoint's order, the last layer's among them.",
          test="unit/models/context_kv/test_capture.py"),
    _hook("relay-lengths", "scheduler", "patches.relay.resolve_seq_lens_cpu", "1f6bdad1f7b3",
          f"{_RELAY}.FutureMap.resolve_seq_lens_cpu",
          why="A decode step finds the lengths in the relay by itself.", gain=_LAUNCHES),
    _hook("relay-tokens", "scheduler", "patches.relay.resolve_forward_inputs", "8c11ed0c2781",
          f"{_RELAY}.resolve_forward_inputs",
          why="A decode step finds the last tokens in the relay by itself.", gain=_LAUNCHES),
    _replaced("relay-asserts", "scheduler", "patches.relay.keep_what_was_read", "f195b8c2d6d8",
          f"{_RELAY}._DEBUG_ASSERT",
          reader=f"{_RELAY}._assert_nonneg_and_invalidate",
          why="With SGLANG_IS_IN_CI SGLang voids what it has read, and a decode step reads it once more.",
          test="engine/test_request_fields.py"),
    _replaced("runtime-attention", "scheduler", "patches.graphs.run_on", "ef63efb73098",
          f"{_RUNNER}.attn_backend",
          reader=f"{_RUNNER}._forward_raw",
          why="Steps of another width have an attention backend of their own.", gain=_BY_WIDTH),
    _replaced("runtime-graphs", "scheduler", "patches.graphs.run_on", "ef63efb73098",
          f"{_RUNNER}.decode_cuda_graph_runner",
          reader=f"{_RUNNER}._forward_raw",
          why="Steps of another width have graphs of their own.", gain=_BY_WIDTH),
    _replaced("runtime-recurrent", "scheduler", "patches.graphs.run_on", "ceb5b8e7c800",
          f"{_SRT}.mem_cache.memory_pool.MambaPool.mamba_cache",
          reader=f"{_SRT}.mem_cache.memory_pool.MambaPool.mamba2_layer_cache",
          why="States of a step's verified rows lie as far apart as its width, in every kernel that reads them.",
          test="engine/test_recurrent_serving.py"),
    _replaced("replay-sizes", "scheduler", "patches.replayed_states.install", "8ee3455805f3",
          f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
          why="Slots of recurrent states are sized without states of verified rows.", gain=_REPLAYED),
    _replaced("replay-pool", "scheduler", "patches.replayed_states.install", "100b33fbfee3",
          f"{_SRT}.mem_cache.memory_pool.HybridReqToTokenPool.mamba_pool_cls",
          reader=f"{_SRT}.mem_cache.memory_pool.MambaPool.__init__",
          why="The pool of gated delta nets keeps values, keys and gates of verified rows, and no states.",
          gain=_REPLAYED),
    _replaced("replay-commit", "scheduler", "patches.replayed_states.install", "d4da73780988",
          f"{_LINEAR}.gdn_replayssm_spec_fold.commit_gdn_replayssm_fold_all_layers",
          reader=f"{_LINEAR}.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update_kernel",
          why="A committed state is bit for bit the verified row's. SGLang's replay rounds keys otherwise.",
          gain=_REPLAYED),
    _replaced("replay-of-one", "scheduler", "patches.replayed_states.move_states_in_forward", "8bbd8d952c6c",
          f"{_SRT}.layers.attention.linear.gdn_backend.GDNAttnBackend._replayssm_fold_target_verify",
          why="A step of one row moves the states on as plain decoding does.",
          gain="151 MB a request less to read in a step of width 1 of a 27B, by the sizes of its states"),
    _replaced("replay-tiles", "scheduler", "patches.replayed_states.narrow_tiles", "06a1c47aed89",
          f"{_LINEAR}.fused_sigmoid_gating_recurrent._select_recurrent_launch_config",
          why="A verify that keeps rows has the launch of one that keeps states.",
          gain="8.35 ms a step without it, one request of a 9B on an H200; 8.17 of the built-in worker"),
    _replaced("draft-pool", "scheduler", "patches.draft_pool.install", "d5523eef5b7c",
          f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
          why="A draft that needs fewer slots than the target leaves their memory to the target's tokens.",
          gain="22 % more tokens for 48 requests of a 27B, by SGLang's arithmetic"),
    _replaced("verify-logits", "scheduler", "patches.verify_shards.keep_shards", "4eda9f7b866a",
          f"{_SRT}.layers.logits_processor.LogitsProcessor._get_logits",
          why="A verify leaves each rank its shard of the logits, and ranks exchange best tokens.",
          gain="a step of 32 requests on two GPUs: 0.900 of the built-in worker's, with all else"),
    # ---- The scheduler: attention ----------------------------------------------------------------------------
    _hook("attention-room", "scheduler", "patches.attention_room.init_attention_backends", "461c0b4e6129",
          f"{_RUNNER}.init_attention_backends",
          why="Page tables need room for a block that ends beyond the context.",
          test="unit/patches/test_attention.py"),
    _replaced("attention-context", "scheduler", "patches.attention_room.room_for_blocks", "5815447c38b9",
          f"{_SRT}.configs.model_config.ModelConfig.context_len",
          reader=f"{_SRT}.configs.model_config.ModelConfig._derive_context_length",
          why="SGLang's backends size page tables by the context's length, while they are made.",
          test="unit/patches/test_attention.py"),
    _replaced("flash3-schedules", "scheduler", "patches.flash3.share_schedule", "0eaee1695761",
          f"{_FLASH3}.flash_attn_with_kvcache",
          reader=f"{_FLASH3}.FlashAttentionBackend.forward_extend",
          why="One tile schedule serves all layers of a captured forward.", gain="0.9 to 2.9 % of a step"),
    _replaced("flash3-metadata", "scheduler", "patches.flash3.share_schedule", "9d3154f591cf",
          f"{_FLASH3}.FlashAttentionBackend.init_forward_metadata_in_graph",
          why="A new captured forward begins with a new schedule.", gain="as flash3-schedules"),
    _replaced("flash3-forward", "scheduler", "patches.flash3.read_by_strides", "0eaee1695761",
          f"{_FLASH3}.FlashAttentionBackend.forward_extend",
          why="A block's queries are read without a copy, and a node of a tree attends to its ancestors, too.",
          gain="1.5 to 1.6 % of a step, without trees"),
    _replaced("flash3-prefixes", "scheduler", "patches.flash3.serve_trees", "62c99574ab11",
          f"{_FLASH3}.FlashAttentionBackend._set_decode_page_metadata",
          reader=f"{_FLASH3}.FlashAttentionBackend._apply_cuda_graph_metadata",
          why="The kernel attends to the prefixes of trees. SGLang counts a verify's rows among the keys.",
          test="unit/patches/test_flash3.py"),
    _replaced("flash3-eager-prefixes", "scheduler", "patches.flash3.serve_trees", "63ee282a7dec",
          f"{_FLASH3}.FlashAttentionBackend.init_forward_metadata",
          why="The same without a graph.", test="unit/patches/test_flash3.py"),
    _replaced("flashinfer-windows", "scheduler", "patches.attention_room.plan_windows", "36e49de36b67",
          f"{_SRT}.layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.call_begin_forward",
          why="SGLang masks the window of a block's first row only.",
          test="unit/patches/test_attention.py"),
    # ---- The scheduler: graphs -------------------------------------------------------------------------------
    _replaced("graph-inputs", "scheduler", "patches.graphs.leave_in_place", "e4a256756a1b",
          f"{_GRAPH_INPUTS}.GraphSlot.source_fn",
          reader=f"{_GRAPH_INPUTS}.CudaGraphBufferRegistry.fill_from",
          why="Inputs that a step wrote into the graph's tensors are not copied there again.", gain=_LAUNCHES),
    _replaced("ragged-graphs", "scheduler", "patches.graphs.by_tokens", "33784ad91294",
          f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled",
          reader=f"{_GRAPHS}.__init__",
          why="SGLang makes graphs of a ragged verify for other algorithms.",
          gain="a number of verified tokens per request"),
)
# fmt: on

BY_NAME = {patch.name: patch for patch in PATCHES}
