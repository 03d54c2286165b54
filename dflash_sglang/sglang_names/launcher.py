"""The SGLang names that read server arguments, apart from `scheduler.py` because the launcher needs no more."""

from collections.abc import Sequence
from typing import Any

from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention
from sglang.srt.arg_groups.serving_hook import handle_missing_default_values, handle_return_hidden_states_mode
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.model_executor.cuda_graph_config import Backend as CudaGraphBackend
from sglang.srt.model_executor.cuda_graph_config import with_phase
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_disagg, get_exec
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import has_hf_quant_config
from sglang.srt.utils.common import get_device
from sglang.srt.utils.hf_transformers_utils import check_gguf_file


def fake_bootstrap_host() -> str:
    """The `bootstrap_host` of requests without a transfer: warm-up, health checks, decode benchmarks."""
    # Imported here: it brings the scheduler's modules, which a server has and the doctor does not need.
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return FAKE_BOOTSTRAP_HOST


def draft_model_config_of(server_args: Any, path: str) -> ModelConfig:
    """As the scheduler reads the draft's config; path: a directory, or a hub repository."""
    return ModelConfig.from_server_args(
        server_args,
        model_path=path,
        model_revision=resolving_view(server_args).speculative_draft_model_revision,
        is_draft_model=True,
    )


def transformers_wrapper(model_config: Any, architectures: Sequence[str]) -> str:
    """The class that serves a model as transformers has it; model_config: SGLang's ModelConfig of the model."""
    # Imported here: only a refusal names it.
    from sglang.srt.model_loader.utils import _get_transformers_backend_arch

    return _get_transformers_backend_arch(model_config, list(architectures))


def settle_without_device(server_args: Any) -> None:
    """Takes the steps of SGLang's resolution that start-up checks build on and that no device is needed for.

    server_args: as parsed, with a device. Raises what SGLang raises of flags that it refuses.
    """
    for step in (handle_deprecated_dp_attention, handle_return_hidden_states_mode, handle_missing_default_values):
        step(server_args)
