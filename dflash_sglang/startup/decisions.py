"""Gathers the facts of a launch from SGLang's server arguments and decides which worker runs it, if any."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec, is_speculators
from dflash_sglang.checkpoint.draft_spec import anchor_field
from dflash_sglang.checkpoint.families import (
    DFLASH2,
    LAGUNA,
    PLAIN,
    Foreign,
    check_family,
    family_of,
    foreign,
    mixed_up,
)
from dflash_sglang.checkpoint.fields import described
from dflash_sglang.checkpoint.files import draft_config, tensor_facts, weights_directory
from dflash_sglang.checkpoint.left_out import BLOCK_FLAGS, Flags
from dflash_sglang.checkpoint.mtp import MtpSpec, holds_mtp
from dflash_sglang.checkpoint.own_modules import own_modules
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.sglang_names.launcher import (
    check_gguf_file,
    declare_resolution,
    draft_model_config_of,
    has_hf_quant_config,
    hybrid_gdn_config,
    mambaish_config,
    model_config_of,
    resolving_view,
    transformers_wrapper,
)
from dflash_sglang.startup.facts import GPU_DRAFT_BACKENDS, Problem, ServingFacts, StartupError, TargetFacts
from dflash_sglang.startup.fit_checks import draft_problems, pool_problems
from dflash_sglang.startup.launch_checks import launch_problems
from dflash_sglang.startup.mtp_checks import mtp_problems
from dflash_sglang.startup.quantisation_checks import MODELOPT, quantisation_problems
from dflash_sglang.startup.serving_checks import serving_problems
from dflash_sglang.startup.target_class import CAPTURE_METHODS, hands_out_features, target_class
from dflash_sglang.startup.tensor_checks import SAFETENSORS_FORMATS, presence_problems, weights_problems
from dflash_sglang.startup.vocabulary_checks import token_map_problems

# Targets with recurrent layers beside gated delta nets that are served, by their model type.
_RECURRENT_ON_CPU = ("lfm2", "lfm2_moe", "nemotron_h")
_KDA = ("kimi_k3", "kimi_linear")
_RECURRENT_ON_GPU = (*_RECURRENT_ON_CPU, *_KDA)
_NO_CHUNKS = "whose layers attend to the whole context or a window, and not to chunks of it"
_NO_NGRAMS = "that embeds tokens one by one, and not n-grams, which SGLang does not do in a verify"
_WITHOUT = "Serve it without --speculative-algorithm DFLASH."


def check_startup(server_args: Any) -> Foreign | None:
    """None when this package's worker can run the launch, else why the built-in worker does.

    Works on server arguments before and after SGLang resolved the speculative ones. Raises StartupError
    listing every problem, and PluginConfigError.
    """
    cfg, problems = resolving_view(server_args), list[Problem]()
    try:
        other = _check(cfg, server_args, problems)
        if other is not None and cfg.speculative_draft_model_path is not None:
            _refuse_what_no_worker_reads(cfg, other, server_args)
    except DraftConfigError as error:
        refused = (Problem(f"draft config {of.field}", of.value, of.expected, of.fix) for of in error.all)
        raise StartupError([*problems, *refused]) from error
    return other


def serve_trained_block(server_args: Any) -> None:
    """Before SGLang resolves the speculative arguments of a launch of this package's worker: asks for the trained
    block where nobody has asked for another. SGLang takes the draft's rows for it, and a DSpark draft proposes one
    token more."""
    cfg = resolving_view(server_args)
    if cfg.speculative_dflash_block_size is not None or cfg.speculative_num_draft_tokens is not None:
        return
    config = draft_config(cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision)
    of_target = holds_mtp(config)
    spec = MtpSpec.from_config(config) if of_target else DraftSpec.from_config(config, Flags.of(cfg))
    if of_target or spec.draft_rows(spec.block_size) != spec.block_size:
        declare_resolution(server_args, "dflash_sglang", speculative_num_draft_tokens=spec.block_size)


def _check(cfg: Any, server_args: Any, problems: list[Problem]) -> Foreign | None:
    """As `check_startup`. Adds to `problems` before it reads on; a DraftConfigError ends the reading."""
    if not cfg.device.startswith("cuda") and cfg.device != "cpu":  # the latter: through this package's platform
        return Foreign("--device", cfg.device, "a device without kernels of this package")
    serving = _serving_facts(cfg)
    target_config = model_config_of(server_args)
    problems += [*launch_problems(cfg), *_no_tokens(target_config, server_args), *serving_problems(serving)]
    if serving.draft_path is None or cfg.decrypted_draft_config_file is not None:
        raise StartupError(problems)
    config = _draft_config(cfg, problems)
    if holds_mtp(config):
        target = weights_directory(cfg.model_path, cfg.revision, cfg.download_dir)
        spec = MtpSpec.from_config(config)
        problems += mtp_problems(spec, serving, cfg, PluginConfig.from_env(), target, _draft_weights(cfg))
    else:
        same = Path(cfg.model_path).resolve() == Path(serving.draft_path).resolve()
        mistake = mixed_up({"architectures": target_config.hf_config.architectures}, config, same)
        if mistake is not None:
            mixed = Problem("--model-path", cfg.model_path, mistake.expected, mistake.fix)
            raise StartupError([*problems, mixed])
        check_family(config)
        other = foreign(config) or _recurrent(target_config, cfg.attn_dp_size, cfg.device)
        if other is not None:
            return other
        problems += _target_problems(target_config)
        # What it says before a DraftConfigError stays.
        problems += _of_draft(cfg, config, serving, TargetFacts.from_config(target_config.hf_text_config))
    if problems:
        raise StartupError(problems)
    _check_sglang_reads(config, serving.draft_path, server_args)
    return None


def _of_draft(cfg: Any, config: dict[str, Any], serving: ServingFacts, target: TargetFacts) -> Iterator[Problem]:
    """Problems of a draft of a family of ours; `config`: its raw config.json."""
    path, asked = cfg.speculative_draft_model_path, cfg.speculative_draft_model_quantization
    inherited = not cfg._speculative_draft_quantization_explicitly_set
    in_own_file = asked in MODELOPT and has_hf_quant_config(path)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    yield from quantisation_problems(config, asked, cfg.device, inherited, in_own_file, capability)
    spec, directory = DraftSpec.from_config(config, Flags.of(cfg)), _draft_weights(cfg)
    load_format = cfg.speculative_draft_load_format or cfg.load_format
    yield from weights_problems(path, directory, load_format)
    tensors = tensor_facts(directory)
    own = own_modules(directory, tensors)
    yield from draft_problems(spec, target, serving, tensors, own)
    yield from pool_problems(config)
    if load_format in SAFETENSORS_FORMATS:
        yield from presence_problems(spec, tensors)
    if cfg.speculative_token_map is not None:
        yield from token_map_problems(cfg.speculative_token_map, spec, target, own)


def _draft_weights(cfg: Any) -> Path:
    path, revision = cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision
    return weights_directory(path, revision, cfg.download_dir)


def _draft_config(cfg: Any, problems: list[Problem]) -> dict[str, Any]:
    """The draft's raw config.json. Raises StartupError with these problems, or DraftConfigError."""
    path = cfg.speculative_draft_model_path
    try:
        return draft_config(path, cfg.speculative_draft_model_revision)
    except DraftConfigError:
        raise
    except (OSError, ValueError) as error:
        what = "a DFlash draft's directory, or its repository on the hub, with a config.json"
        fix = f"Correct it: {error}"
        raise StartupError([*problems, Problem("--speculative-draft-model-path", path, what, fix)]) from error


def _check_sglang_reads(config: dict[str, Any], path: str, server_args: Any) -> None:
    """Raise StartupError where SGLang, or transformers beneath it, cannot read the draft's config.json (`config`),
    which they do after this."""
    error = _reading_fails(server_args, path)
    if error is None:
        return
    can_read = f"SGLang can read ({described(error)})"
    first = {"model_type": config.get("model_type")}
    for field, value in {**first, **config}.items():  # the one without which, or as Qwen3, it can be read
        with tempfile.TemporaryDirectory() as directory:
            others = {"model_type": "qwen3", **{name: other for name, other in config.items() if name != field}}
            Path(directory, "config.json").write_text(json.dumps(others))
            if _reading_fails(server_args, directory) is None:
                remedy = f"Add {field} to" if value is None else f"Remove {field}, or correct it in"
                fix = f"{remedy} the draft's config.json."
                problem = Problem(f"draft config {field}", value, f"a value that {can_read}", fix)
                raise StartupError([problem]) from error
    expected = f"a draft whose config.json {can_read}"
    raise StartupError([Problem("--speculative-draft-model-path", path, expected, "Correct it.")]) from error


def _reading_fails(server_args: Any, path: str) -> Exception | None:
    """What SGLang's reading of a draft's config.json raises, which is whatever its libraries do."""
    try:
        dtype = draft_model_config_of(server_args, path).dtype
    except Exception as error:
        return error
    return None if isinstance(dtype, torch.dtype) else TypeError(f"dtype {dtype!r} is no type of numbers")


def _refuse_what_no_worker_reads(cfg: Any, other: Foreign, server_args: Any) -> None:
    """The built-in worker cannot read a config.json of the speculators format, which has no model type. It passes
    over the fields that let the anchor's row propose, but for DSpark's default and Domino's own."""
    config = _draft_config(cfg, [])
    said, alone = anchor_field(config), None
    if is_speculators(config):
        alone, fix = "the speculators format", "Change it, or serve the draft in z-lab's format."
    elif said is not None and said[1] and family_of(config) in (PLAIN, DFLASH2, LAGUNA):
        alone, fix = f"draft config {said[0]}=True", "Change it, or serve another draft."
    if alone is not None:
        expected = f"a launch of dflash_sglang, which alone reads {alone} (not so: {other.reason})"
        raise StartupError([Problem(other.field, other.value, expected, fix)])
    _check_sglang_reads(config, cfg.speculative_draft_model_path, server_args)


def _recurrent(target_config: Any, attn_dp_size: int, device: str) -> Foreign | None:
    """A target with recurrent layers of a kind that is not served in this launch. Gated delta nets are served in
    all; lightning attention and Mamba beside attention in one layer in none."""
    if mambaish_config(target_config) is None or hybrid_gdn_config(target_config) is not None:
        return None
    kind = getattr(target_config.hf_config, "model_type", None)
    if kind not in (_RECURRENT_ON_CPU if device == "cpu" else _RECURRENT_ON_GPU):
        if kind == "glm5_next":
            reason = "KDA beside sparse attention that pools its index keys, which is not tested"
        elif kind in _KDA:
            reason = "KDA, for which SGLang has kernels on a GPU only"
        else:
            reason = "recurrent layers of a kind that is not served"
        return Foreign("target config architectures", target_config.hf_config.architectures, reason)
    if attn_dp_size != 1:
        reason = "data-parallel attention over recurrent layers other than gated delta nets"
        return Foreign("--attn-dp-size", attn_dp_size, reason)
    return None


def _generates(target_config: Any) -> bool:
    """Whether SGLang writes tokens with this target; heads for scores that lie beside it are used alone."""
    heads = (target_config.joint_head_config, target_config.pointer_head)
    return target_config.is_generation and heads == (None, None)


def _no_tokens(target_config: Any, server_args: Any) -> Iterator[Problem]:
    """Launches that answer with embeddings or scores: by the flag, or by what the target is."""
    if _generates(target_config):
        return
    if server_args.is_embedding:
        expected = "unset with DFLASH: SGLang answers with embeddings and generates no tokens"
        yield Problem("--is-embedding", True, expected, "Remove --is-embedding, or serve without speculation.")
    else:
        expected = "a target that generates tokens, and SGLang answers with embeddings or scores of this one"
        yield Problem("target config architectures", target_config.hf_config.architectures, expected, _WITHOUT)


def _target_problems(target_config: Any) -> Iterator[Problem]:
    """Targets that hand out no features, and those whose verify is not their plain decoding."""
    names, fix = target_config.hf_config.architectures, _WITHOUT
    model_impl = target_config.model_impl
    captures = hands_out_features(names or [], target_config.hf_text_config, model_impl)
    feeds = f"whose class in SGLang has {' or '.join(CAPTURE_METHODS)}, which feed the draft"
    if not captures and target_class(names or [], model_impl) is None:
        feeds += f" (SGLang takes {transformers_wrapper(target_config, names or [])})"
        fix = fix if target_class(names or [], "auto") is None else f"Remove --model-impl. {fix}"
    for unserved, expected in (
        (_generates(target_config) and not captures, feeds),
        (target_config.is_local_attention_model, _NO_CHUNKS),
        (target_config.use_ngram_embedding, _NO_NGRAMS),
    ):
        if unserved:
            yield Problem("target config architectures", names, f"a target {expected}", fix)


def _serving_facts(cfg: Any) -> ServingFacts:
    return ServingFacts(
        draft_path=cfg.speculative_draft_model_path,
        block_size=Flags.of(cfg).block_size,
        block_flag=BLOCK_FLAGS[cfg.speculative_dflash_block_size is None],
        draft_attention_backend=cfg.speculative_draft_attention_backend,
        supported_backends=("torch_native",) if cfg.device == "cpu" else GPU_DRAFT_BACKENDS,
        kv_dtype=cfg.kv_cache_dtype,
        draft_kv_dtype=cfg.speculative_draft_kv_cache_dtype,
        draft_reader=(
            cfg.speculative_draft_attention_backend or cfg.prefill_attention_backend or cfg.attention_backend
        ),
        draft_window=cfg.speculative_draft_window_size,
        draft_sinks=cfg.speculative_draft_sink_size,
        widest=PluginConfig.from_env().width.widest,
        draft_as_gguf=cfg.speculative_draft_load_format is None and _loads_gguf(cfg),
        draft_ranks=draft_ranks(cfg),
    )


def _loads_gguf(cfg: Any) -> bool:
    """As SGLang resolves --load-format once the speculative arguments are, for the target and for a draft that has
    none of its own."""
    return cfg.load_format == "gguf" or (cfg.load_format == "auto" and check_gguf_file(cfg.model_path))


def draft_ranks(cfg: Any) -> int:
    """Ranks over which one draft is split, of server arguments as `resolving_view` shows them."""
    return max(1, cfg.tp_size // (cfg.attn_dp_size * cfg.attn_cp_size))
