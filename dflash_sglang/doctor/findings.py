"""Puts the findings together: the verdict of start-up, what was read of the draft, sizes and suspicions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import check_family
from dflash_sglang.checkpoint.fields import one_line
from dflash_sglang.checkpoint.files import TensorFacts, draft_config, tensor_facts, weights_directory
from dflash_sglang.checkpoint.in_words import layers_read, rope_read
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.own_modules import OwnModules, head_rows, own_in_words, own_modules
from dflash_sglang.checkpoint.token_map import read_token_map
from dflash_sglang.doctor import launch, sizes, tokens
from dflash_sglang.models.head.draft_head import HeadFacts, choose_form
from dflash_sglang.patches.contract import states
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
from dflash_sglang.sglang_names.launcher import draft_model_config_of, resolving_view
from dflash_sglang.startup.decisions import draft_ranks
from dflash_sglang.startup.draft_kv import needs_whole_pool, ring_shape
from dflash_sglang.startup.facts import TargetFacts
from dflash_sglang.startup.fp8_drafts import FP8_GEMM, obstacle

VERSIONS_OF = ("dflash_sglang", "sglang", "torch", "transformers")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
DEFAULT_REQUESTS = 48  # that run under DFLASH, where SGLang is not told
_KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}


def examine(target: str, draft: str, flags: Sequence[str]) -> dict[str, Any]:
    """The findings by the keys of docs/reference/doctor.md.

    Parts are None where a refusal came before they could be read. Raises Unreadable where flags or checkpoints
    cannot be read.
    """
    server_args = launch.read_flags(target, draft, flags)
    versions = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    versions["python"] = platform.python_version()
    found: dict[str, Any] = {
        **{"target": target, "draft": draft, "device": server_args.device},
        **{"worker": None, "why_built_in": None, "refused": [], "suspicious": []},
        **dict.fromkeys(("model", "serving", "memory_per_rank", "vocabulary", "break_even")),
        **{"versions": versions, "patches": states()},
    }
    if refused := launch.settle(server_args):
        return found | {"refused": refused}
    checkpoints = launch.read_checkpoints(server_args)
    target_config = launch.read_target(server_args)
    no_plugin = launch.plugin_refusal()
    found |= {"refused": [no_plugin]} if no_plugin else launch.verdict_of(server_args)
    cfg = resolving_view(server_args)
    found["device"] = cfg.device
    read = None if found["worker"] == launch.BUILT_IN else _read(cfg)
    if read is None:
        return found
    facts = TargetFacts.from_config(target_config.hf_text_config)
    spec, held, own = read
    vocabulary = tokens.compare(checkpoints.target, checkpoints.draft, spec.mask_token_id)
    found |= {"model": _draft(spec, own), "vocabulary": asdict(vocabulary)}
    if found["worker"] == launch.OURS:
        found |= _sizes(server_args, target_config, spec, held, own, checkpoints.tensors)
        found["suspicious"] = list(_suspicions(spec, own, facts, vocabulary, target_config.context_len))
    return found


def _read(cfg: Any) -> tuple[DraftSpec, dict[str, TensorFacts], OwnModules] | None:
    """The draft, None where it cannot be read, which start-up has refused."""
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    try:
        config = draft_config(path, revision)
        check_family(config)
        spec = DraftSpec.from_config(config, Flags.of(cfg))
        directory = weights_directory(path, revision, cfg.download_dir)
        held = tensor_facts(directory)
        return spec, held, own_modules(directory, held)
    except (DraftConfigError, OSError, ValueError, KeyError, TypeError):
        return None


def _draft(spec: DraftSpec, own: OwnModules) -> dict[str, Any]:
    """`model` of the findings, in words where the start-up line has words."""
    return {
        "architecture": f"{spec.architecture} ({spec.num_layers} layers)",
        "layers": layers_read(spec),
        "rope": rope_read(spec),
        "heads": f"{spec.num_heads} of {spec.head_dim}, {spec.num_kv_heads} for keys and values",
        "target_layers": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "own_modules": own_in_words(spec, own),
        "quantization": spec.quantization or "none",
        "block": spec.block_size,
    }


def _sizes(
    server_args: Any,
    target_config: Any,
    spec: DraftSpec,
    held: dict[str, TensorFacts],
    own: OwnModules,
    target: dict[str, TensorFacts],
) -> dict[str, Any]:
    """`serving`, `memory_per_rank` and `break_even` of the findings. held, target: tensors of the two
    checkpoints."""
    cfg, config = resolving_view(server_args), PluginConfig.from_env()
    ranks = draft_ranks(cfg)
    block = Flags.of(cfg).block_size or spec.block_size
    dtype = draft_model_config_of(server_args, cfg.speculative_draft_model_path).dtype
    in_fp8, why = _draft_form(cfg, spec, held, ranks)
    weights = sizes.draft_weights(spec, held, ranks, dtype.itemsize, in_fp8)
    weights += sizes.rope_table_bytes(spec, target_config.context_len)
    kv_dtype = cfg.speculative_draft_kv_cache_dtype or cfg.kv_cache_dtype
    kv = sizes.kv_bytes_per_token(spec, ranks, _KV_BYTES.get(kv_dtype, dtype.itemsize))
    rings, ring_tokens = _rings(cfg, config, spec, block)
    tokens_kept = cfg.max_total_tokens if rings is None or ring_tokens is None else rings * ring_tokens
    try:
        head, form, read = _head(cfg, config, target_config, own, target, ranks)
    except ValueError as error:  # draft_head asks for a form that this head cannot have
        return {"worker": None, "refused": [launch.refusal(CONFIG_ENV, f"{CONFIG_ENV}: {one_line(error)}")]}
    context = "stacked" if spec.quantization is None and not in_fp8 else "decided when the weights are loaded"
    sizes_of_all = sizes.draft_weights(spec, held, 1, dtype.itemsize, in_fp8)
    of_step = sizes_of_all - (sizes.nbytes(own.embedding, dtype.itemsize) if own.embedding else 0)
    even = sizes.break_even(target, _experts(target_config), of_step, read, block) if head else None
    return {
        "serving": {
            "block": block,
            "widths": list(config.width.states(block)),
            "ragged": config.width.fixed is None,
            "draft_attention": _attention(cfg),
            "head": form,
            "context_kv": context if config.context_kv == "auto" else config.context_kv,
            "draft_weights": why,
            "ranks": ranks,
        },
        "memory_per_rank": {
            "weight_bytes": weights,
            "kv_bytes_per_token": kv,
            "max_total_tokens": cfg.max_total_tokens,
            "kv_bytes": None if tokens_kept is None else kv * tokens_kept,
            "rings": rings,
            "ring_tokens": ring_tokens,
        },
        "break_even": None if even is None else {**asdict(even), "assumes": sizes.ASSUMES},
    }


def _rings(cfg: Any, config: PluginConfig, spec: DraftSpec, block: int) -> tuple[int | None, int | None]:
    """(rings for the requests that may run at most, tokens of a ring), (None, None) where the pool is smaller or
    there are none."""
    flags = cfg.speculative_draft_window_size, cfg.speculative_draft_sink_size
    whole_for = needs_whole_pool(cfg.enable_hierarchical_cache, cfg.disaggregation_mode)
    shape = ring_shape(spec, config, block, cfg.page_size or 1, *flags, whole_for)
    if isinstance(shape, str):
        return None, None
    rings = shape.rings(max(1, (cfg.max_running_requests or DEFAULT_REQUESTS) // cfg.attn_dp_size))
    larger = cfg.max_total_tokens is not None and rings * shape.size >= cfg.max_total_tokens
    return (None, None) if larger else (rings, shape.size)


def _draft_form(cfg: Any, spec: DraftSpec, held: dict[str, TensorFacts], ranks: int) -> tuple[bool, str]:
    """(whether the layers are read in fp8, in words); of a GPU that has fp8 GEMMs."""
    asked = cfg.speculative_draft_model_quantization
    if cfg._speculative_draft_quantization_explicitly_set or asked is not None:
        return asked == "fp8" and spec.quantization is None, f"{asked or 'as they are'}, asked for"
    if not cfg.device.startswith("cuda"):
        return False, "as they are"
    reason = obstacle(spec, held, ranks, cfg.dtype, FP8_GEMM)
    if reason is not None:
        return False, f"as they are: {reason}"
    return True, f"fp8 on a GPU of compute capability {'.'.join(map(str, FP8_GEMM))} or more, else as they are"


def _head(
    cfg: Any, config: PluginConfig, target_config: Any, own: OwnModules, target: dict[str, TensorFacts], ranks: int
) -> tuple[bool, str, int]:
    """(whether its bytes are known, its form in words, bytes that the draft reads beside its own weights)"""
    dtype = target_config.dtype
    size = sizes.head_bytes(target) if own.head is None else sizes.nbytes(own.head, dtype.itemsize)
    if size is None:
        return False, "unknown: the target's weights are not on this machine", 0
    whose = "the target's" if own.head is None else "the draft's"
    if cfg.speculative_token_map is not None:
        kept = len(read_token_map(cfg.speculative_token_map))
        size = size * kept // target_config.vocab_size
        whose += f", {kept} tokens of it"
    facts = HeadFacts(
        device=cfg.device.split(":")[0],
        fp8_gemm=cfg.device.startswith("cuda"),
        method=cfg.quantization if own.head is None and dtype.itemsize == 1 else None,
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
        nbytes=size // ranks,
    )
    in_fp8, why = choose_form(config.draft_head, facts)
    form = f"{whose}, {'fp8 on a GPU that has fp8 GEMMs' if in_fp8 else 'as it is'} ({why})"
    beside = 0 if own.head is not None and not in_fp8 else size
    return True, form, beside // dtype.itemsize if in_fp8 else beside


def _attention(cfg: Any) -> str:
    of_target = "torch_native" if cfg.device == "cpu" else cfg.prefill_attention_backend or cfg.attention_backend
    return str(cfg.speculative_draft_attention_backend or of_target or "chosen by SGLang for the GPU")


def _experts(target_config: Any) -> sizes.Experts | None:
    """Of a mixture whose config has both numbers."""
    config = target_config.hf_text_config
    of_all, of_a_token = (
        next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)
        for names in (_EXPERTS, _OF_A_TOKEN)
    )
    return sizes.Experts(of_a_token, of_all) if of_all and of_a_token else None


def _suspicions(
    spec: DraftSpec, own: OwnModules, target: TargetFacts, vocabulary: tokens.Vocabularies, context: int
) -> Iterator[str]:
    """What start-up lets pass, and what makes drafts accept little."""
    if sorted(spec.target_layer_ids) != list(spec.target_layer_ids):
        field, ids = spec.named_layer_ids(spec.target_layer_ids)
        yield (
            f"draft config {field}={ids}: expected ascending layers, as drafts are trained on. Compare them with "
            "the draft's model card."
        )
    if own.head is None and spec.vocab_size != target.vocab_size:
        yield (
            f"draft config vocab_size={spec.vocab_size}: expected the target's {target.vocab_size}, whose head "
            "the draft uses. Check that the draft was trained for this target."
        )
    if own.head is not None and own.d2t is None and head_rows(spec, own) > target.vocab_size:
        yield (
            f"draft tensor lm_head.weight with {head_rows(spec, own)} rows: expected the target's "
            f"{target.vocab_size}. Rows beyond them are left out as padding; check that the draft was trained for "
            "this target."
        )
    if vocabulary.differing:
        yield (
            f"tokenizers differ in {vocabulary.differing} token ids: expected none. Serve the target that the "
            "draft was trained for."
        )
    if vocabulary.mask_is_ordinary and own.mask_embedding is None:
        yield (
            f"draft config mask_token_id={spec.mask_token_id}: expected an id that no text has, and it is "
            f"{vocabulary.mask_token!r} of the target's tokenizer. Compare it with the draft's model card."
        )
    if context > spec.max_position_embeddings:
        yield (
            f"--context-length {context}: expected at most the draft's max_position_embeddings of "
            f"{spec.max_position_embeddings}. Beyond it fewer tokens are accepted; "
            "set --speculative-draft-window-size."
        )
