"""The unstable SGLang names that this package uses, imported in one place; `probe.py` checks that they exist.

One import per source module, sorted; add a name here before using it elsewhere.
"""

from sglang.kernels.ops.activation.minimax_m3_swiglu import swiglu_oai_split
from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent, gdn_replayssm_spec_fold
from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import track_mamba_states_all_layers
from sglang.kernels.ops.speculative.dspark.fused_kv_write import fused_kv_norm_rope_write
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, CommonKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from sglang.srt.layers.logits_processor import (
    LogitsProcessor,
    LogitsProcessorOutput,
    SamplingMaskOutput,
    SamplingMaskStatus,
    should_apply_lm_head_quant_method,
)
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear, cutlass_fp8_supported
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod, ModelOptNvFp4A16LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.overlap_utils import FutureRelayBuffers, offer_future_relay_buffers
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation import (
    alloc_for_spec_decode,
    assign_req_to_token_pool_func,
    write_cache_indices,
)
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, KVWriteLoc, MambaPool, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    compute_position,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import SWARequestCapPoolConfigurator
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend
from sglang.srt.model_loader.weight_utils import maybe_remap_kv_scale_name
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_memory,
    get_model,
    get_observability,
    get_parallel,
    get_schedule,
    get_spec,
    mamba_checkpoint_grid,
    mamba_track_grid,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_parallel import model_draft_parallel_spec, resolve_draft_parallel_layout
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    draft_pp_context,
    draft_tp_context,
)
from sglang.srt.utils.async_probe import sanitize_nan_logits
from sglang.srt.utils.common import (
    async_d2h,
    async_h2d,
    get_available_gpu_memory,
    get_cuda_graph_batch_size_alignment,
    is_pin_memory_available,
    require_mlp_sync,
    require_mlp_tp_gather,
)
from sglang.srt.utils.device_timer import device_timer_ctx
