"""Dense drafts that are read in fp8: quantised while they are loaded, where that shortens a step.

The target verifies every token, so all it can cost is accept length (`docs/guide/quantised-drafts.md`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts, draft_config, tensor_facts, weights_directory
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.mtp import holds_mtp
from dflash_sglang.sglang_names.launcher import declare_resolution, resolving_view
from dflash_sglang.startup.decisions import draft_ranks
from dflash_sglang.startup.quantisation_checks import FLAG

logger = logging.getLogger(__name__)

MI = 1 << 20
# On a rank, in a linear layer on average. Half of the bytes of fewer is read in no more time than it takes to
# quantise the rows that the layer multiplies.
LEAST_WEIGHTS = 16 * MI
FP8_GEMM = (8, 9)  # compute capability
_DENSE = {"BF16", "F16"}


def quantise_where_shorter(server_args: Any) -> None:
    """Before SGLang resolves the speculative arguments of a launch of this package's worker: asks for
    `--speculative-draft-model-quantization fp8` where nobody has asked for anything. The log says why, or why not.
    """
    cfg = resolving_view(server_args)
    if not cfg.device.startswith("cuda"):
        return
    if cfg._speculative_draft_quantization_explicitly_set or cfg.speculative_draft_model_quantization is not None:
        return  # the latter alone: the target's --quantization
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    config = draft_config(path, revision)
    if holds_mtp(config):
        return  # they are the target's own layers, in its dtype
    spec = DraftSpec.from_config(config, Flags.of(cfg))
    tensors = tensor_facts(weights_directory(path, revision, cfg.download_dir))
    reason = obstacle(spec, tensors, draft_ranks(cfg), cfg.dtype, torch.cuda.get_device_capability())
    if reason is not None:
        logger.info("dflash_sglang draft weights: as they are, not in fp8: %s", reason)
        return
    logger.info("dflash_sglang draft weights: in fp8; %s unquant keeps them as they are", FLAG)
    declare_resolution(
        server_args,
        "dflash_sglang",
        speculative_draft_model_quantization="fp8",
        _speculative_draft_quantization_explicitly_set=True,
    )


def obstacle(
    spec: DraftSpec, tensors: Mapping[str, TensorFacts], ranks: int, dtype: str, capability: tuple[int, int]
) -> str | None:
    """Why a draft is better not read in fp8, or None.

    tensors: of its checkpoint; ranks: that share its layers; dtype: --dtype; capability: of the GPU.
    """
    if capability < FP8_GEMM:
        return f"a GPU of compute capability {capability[0]}.{capability[1]} has no fp8 GEMM"
    if spec.quantization is not None:
        return f"the checkpoint is quantised ({spec.quantization})"
    families = spec.dflash2, spec.dspark, spec.domino, spec.laguna, spec.swiglu_clamp
    if spec.gemma_norms or any(family is not None for family in families):
        return "what it costs a draft of this family in accept length has not been measured"
    if dtype in ("float32", "float"):
        return f"--dtype {dtype}"
    others = {facts.dtype for facts in tensors.values() if len(facts.shape) == 2} - _DENSE
    if others or not tensors:
        found = ", ".join(sorted(others)) or "unknown before they are loaded"
        return f"the checkpoint's matrices are {found}, not bfloat16 or float16"
    weights = _weights(spec) / ranks
    if weights < LEAST_WEIGHTS:
        few = f"{weights / MI:.1f} Mi weights on a rank on average, less than {LEAST_WEIGHTS // MI}"
        return f"its linear layers have {few}"
    return None


def _weights(spec: DraftSpec) -> float:
    """Of a decoder layer's four matrices, on average."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    return (attention + 3 * spec.hidden_size * spec.intermediate_size) / 4
