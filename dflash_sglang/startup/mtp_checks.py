"""What of a launch cannot be served with a target's own multi-token-prediction layers as the draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_sglang.checkpoint.files import tensor_facts
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
from dflash_sglang.settings.width import DEFAULT_TREES
from dflash_sglang.startup.facts import Problem, ServingFacts
from dflash_sglang.startup.launch_checks import Unserved, unserved_problems

_WITH = "with multi-token-prediction layers as the draft"
_NOT_TESTED = f"{_WITH} it is not tested"
_NO_WAY = "Serve this target without --speculative-algorithm DFLASH."

UNSERVED_WITH_MTP = (
    Unserved("disaggregation_mode", "null", f"{_WITH} no hidden states are sent"),
    Unserved("enable_mixed_chunk", False, f"{_WITH} a step commits a block, or a prompt's tokens"),
    Unserved("enable_hierarchical_cache", False, _NOT_TESTED),
    Unserved("enable_streaming_session", False, _NOT_TESTED),
    Unserved("enable_lora", None, _NOT_TESTED),
    Unserved("speculative_token_map", None, f"{_WITH} heads are its own"),
    Unserved("speculative_draft_window_size", None, f"{_WITH} windows are the layers' own"),
    Unserved("speculative_draft_kv_cache_dtype", None, _NOT_TESTED),
    Unserved("speculative_draft_load_format", None, _NOT_TESTED),
    Unserved("speculative_draft_model_quantization", None, f"{_WITH} weights are in the model's dtype"),
    Unserved("kv_cache_dtype", "auto", _NOT_TESTED),
    Unserved("json_model_override_args", "{}", f"{_WITH} config.json is read as it is"),
)

_ON_GPU = "fa3"


def attention_problems(device: str, backend: str | None) -> Iterator[Problem]:
    """backend: of the draft's attention; None: SGLang has yet to choose."""
    if device != "cpu" and backend not in (_ON_GPU, None):
        expected = f"{_ON_GPU!r} {_WITH}: their windows and sliding slots have not run with another one"
        fix = f"Set --attention-backend {_ON_GPU} on a GPU of the Hopper generation, or serve without speculation."
        yield Problem("--attention-backend", backend, expected, fix)


def mtp_problems(
    spec: MtpSpec, serving: ServingFacts, server: Any, config: PluginConfig, target: Path, draft: Path
) -> Iterator[Problem]:
    """server: SGLang's arguments. target, draft: directories of their weights."""
    yield from unserved_problems(UNSERVED_WITH_MTP, server)
    yield from attention_problems(server.device, serving.draft_reader)
    if target.resolve() != draft.resolve():
        expected = "the target's own checkpoint, whose multi-token-prediction layers are the draft"
        fix = "Give it the path of --model-path."
        yield Problem("--speculative-draft-model-path", serving.draft_path, expected, fix)
    if serving.block_size not in (None, spec.block_size):
        expected = f"{spec.block_size}: the last token and a proposal of each of {spec.num_layers} layers"
        yield Problem(serving.block_flag, serving.block_size, expected, "Leave it out.")
    for field, value, only in (
        ("width trees", () if config.width.trees == DEFAULT_TREES else config.width.trees, ()),
        ("copy", None if config.copy in ("auto", "off") else config.copy, None),
        ("context_kv", config.context_kv, "auto"),
        ("draft_head fp8", config.draft_head == "fp8", False),
    ):
        if value != only:
            yield Problem(f"{CONFIG_ENV} {field}", value, f"none {_WITH}", "Leave it out.")
    if server.load_format == "dummy":  # weights are made up
        return
    names = tensor_facts(draft)
    missing = [i for i in range(spec.num_layers) if f"{spec.prefix(i)}eh_proj.weight" not in names]
    if missing:
        name = f"{spec.prefix(missing[0])}eh_proj.weight"
        expected = f"safetensors files with {name}, of a multi-token-prediction layer"
        fix = "Serve a checkpoint that holds them."
        yield Problem("--speculative-draft-model-path", serving.draft_path, expected, fix)
    for name, facts in names.items():
        of_mtp = any(name.startswith(spec.prefix(i)) for i in range(spec.num_layers))
        if of_mtp and facts.dtype not in ("BF16", "F16", "F32"):
            yield Problem(f"tensor {name}", facts.dtype, "BF16, F16 or F32", _NO_WAY)
            return
