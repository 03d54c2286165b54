"""What must fit between draft, target and server: facts in, problems out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.own_modules import OwnModules
from dflash_sglang.startup.facts import ParallelFacts, Problem, ServingFacts, TargetFacts
from dflash_sglang.startup.layer_checks import UNPACKED_DTYPES, layer_problems

# Those whose kernels take a sink per head in the draft's dtype.
SINK_BACKENDS = ("fa3", "fa4", "triton", "torch_native")


def serving_problems(serving: ServingFacts) -> Iterator[Problem]:
    """What is wrong whatever the draft is."""
    if serving.draft_path is None:
        yield Problem(
            "--speculative-draft-model-path",
            None,
            "the DFlash draft's directory or repository",
            "Add --speculative-draft-model-path.",
        )
    if serving.kv_pool_flag is not None:
        yield Problem(
            serving.kv_pool_flag,
            True,
            "a KV pool with one row per slot and layer, into which context KV is written",
            f"Remove {serving.kv_pool_flag}.",
        )
    if serving.draft_as_gguf:
        yield Problem(
            "--speculative-draft-load-format",
            None,
            "the draft's own format beside a .gguf target, as which SGLang would load it",
            "Set --speculative-draft-load-format auto.",
        )


def draft_problems(
    spec: DraftSpec,
    target: TargetFacts,
    parallel: ParallelFacts,
    serving: ServingFacts,
    tensors: Mapping[str, TensorFacts] | None = None,
    own: OwnModules | None = None,
) -> list[Problem]:
    """What does not fit between a draft and the target and server it is to run with.

    ``tensors``: the checkpoint's, where they can be read; the loader checks the shapes once more.
    ``own``: what the draft has in place of the target's.
    """
    own_embedding = own is not None and own.embedding is not None
    problems = [
        *_block_problems(spec, serving),
        *_mask_problems(spec, spec.vocab_size if own_embedding else target.vocab_size, own_embedding),
        *_shape_problems(spec, target, parallel, own_embedding),
        *_backend_problems(spec, serving),
        *layer_problems(spec, tensors or {}),
    ]
    try:
        ids = spec.feature_layer_ids(target.num_layers)
    except DraftConfigError as error:
        return [*problems, config_problem(error)]
    return [*problems, *_layer_id_problems(spec, ids, target), *_fc_problems(spec, ids, tensors or {})]


def config_problem(error: DraftConfigError) -> Problem:
    """A field that DraftSpec refused, as a problem."""
    return Problem(f"draft config {error.field}", error.value, error.expected, error.fix)


def _block_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    trained, flag = spec.block_size, serving.block_flag
    served = trained if serving.block_size is None else serving.block_size
    least = "at least 2: the last committed token and one proposal"
    if trained < 2:
        yield Problem("draft config block_size", trained, least, "Correct it, or serve another draft.")
    elif served < 2:
        yield Problem(flag, served, least, f"Set {flag} between 2 and {trained}, or remove it.")
    elif served > trained:
        yield Problem(
            flag,
            served,
            f"at most the trained block of {trained}; beyond it proposals are noise",
            f"Set {flag} {trained}, or remove it.",
        )
    elif serving.widest > served:
        yield Problem(
            "DFLASH_SGLANG_CONFIG width",
            serving.widest,
            f"at most {served}, the block that is served",
            "Lower it, or leave it out.",
        )


def _mask_problems(spec: DraftSpec, rows: int, own_embedding: bool) -> Iterator[Problem]:
    """rows: of the embedding that the block is embedded with."""
    whose = "draft's own" if own_embedding else "target's"
    field = "mask_token_id" if spec.speculators else "dflash_config.mask_token_id"
    if spec.mask_token_id is None:
        yield Problem(
            "draft config mask_token_id",
            None,
            f"the id in the {whose} vocabulary that stands for a position to be proposed",
            f"Add {field} (the one it was trained with) to the draft's config.json.",
        )
    elif spec.mask_token_id >= rows:
        yield Problem(
            "draft config mask_token_id",
            spec.mask_token_id,
            f"an id below the {whose} vocab_size of {rows}",
            f"Correct {field}, or serve the target that the draft was trained for.",
        )


def _shape_problems(
    spec: DraftSpec, target: TargetFacts, parallel: ParallelFacts, own_embedding: bool
) -> Iterator[Problem]:
    other_target = "Serve the target that the draft was trained for."
    if spec.hidden_size != target.hidden_size:
        yield Problem(
            "draft config hidden_size",
            spec.hidden_size,
            f"the target's hidden_size of {target.hidden_size} (embedding and head are the target's)",
            other_target,
        )
    if own_embedding and spec.vocab_size < target.vocab_size:
        yield Problem(
            "draft config vocab_size",
            spec.vocab_size,
            f"at least the target's vocab_size of {target.vocab_size} (any of its tokens is embedded)",
            other_target,
        )
    elif spec.dflash2 is not None and spec.vocab_size < target.vocab_size:
        yield Problem(
            "draft config vocab_size",
            spec.vocab_size,
            f"at least the target's vocab_size of {target.vocab_size} (the selector has a row for each candidate)",
            other_target,
        )
    if spec.num_target_layers is not None and spec.num_target_layers != target.num_layers:
        yield Problem(
            "draft config num_target_layers",
            spec.num_target_layers,
            f"the target's {target.num_layers} layers",
            other_target,
        )
    tp = parallel.draft_tp_size
    divisible = f"divisible by the draft's tensor parallel size of {tp}"
    if spec.num_heads % tp:
        yield Problem(
            "draft config num_attention_heads",
            spec.num_heads,
            divisible,
            "Change --tp-size or --attn-dp-size.",
        )
    if spec.intermediate_size % tp:
        yield Problem(
            "draft config intermediate_size",
            spec.intermediate_size,
            divisible,
            "Change --tp-size or --attn-dp-size.",
        )
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        yield Problem(
            "draft config num_key_value_heads",
            spec.num_kv_heads,
            f"{divisible}, or a divisor of it",
            "Change --tp-size or --attn-dp-size.",
        )


def _backend_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    backend, field = serving.draft_attention_backend, "--speculative-draft-attention-backend"
    sliding = all(layer.kind == "sliding_attention" for layer in spec.layers)
    causal = all(layer.causal for layer in spec.layers)
    reader = backend or serving.draft_reader
    if backend is None and reader == "trtllm_mha" and not (sliding or causal):
        reader = None  # SGLang takes another
    if spec.attention_sinks and reader in serving.supported_backends and reader not in SINK_BACKENDS:
        with_sinks = [name for name in serving.supported_backends if name in SINK_BACKENDS]
        yield Problem(
            "--attention-backend" if backend is None else field,
            reader,
            "a backend for the draft's attention sinks (attention_sink_bias): " + ", ".join(with_sinks),
            f"Set {field} to one of these.",
        )
    if backend is None:
        return
    if backend not in serving.supported_backends:
        yield Problem(
            field,
            backend,
            "one that attends non-causally from the block: " + ", ".join(serving.supported_backends),
            f"Set {field} to one of these, or remove it.",
        )
    elif backend == "trtllm_mha" and not causal:  # full layers: SGLang takes another; sliding ones: a wrong window
        others = [name for name in serving.supported_backends if name != backend]
        yield Problem(
            field,
            backend,
            "a backend for the draft's layers that are not causal: " + ", ".join(others),
            f"Set {field} to one of these, or remove it.",
        )


def _layer_id_problems(spec: DraftSpec, ids: tuple[int, ...], target: TargetFacts) -> Iterator[Problem]:
    name, value = spec.named_layer_ids(ids)
    first = value[0] - ids[0]  # the format's number of the target's first layer
    field = f"draft config {name}"
    fix = f"Correct {name if first else 'dflash_config.' + name}, or serve its target."
    if any(i < 0 or i >= target.num_layers for i in ids):
        last = target.num_layers - 1 + first
        yield Problem(field, value, f"layers of the target, {first} to {last} (its last layer)", fix)
    if len(set(ids)) != len(ids):
        yield Problem(field, value, "each layer once", fix)


def _fc_problems(spec: DraftSpec, ids: tuple[int, ...], tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    fc = tensors.get("fc.weight") or tensors.get("model.fc.weight")
    if fc is None or fc.dtype not in UNPACKED_DTYPES:
        return  # absent or packed: the loader knows the quantisation's layout and checks it
    expected = (spec.hidden_size, len(ids) * spec.hidden_size)
    if fc.shape != expected:
        yield Problem(
            "draft tensor fc.weight",
            list(fc.shape),
            f"{list(expected)}: [hidden_size, {len(ids)} target layers x hidden_size]",
            f"Make {spec.named_layer_ids(ids)[0]} name the layers the checkpoint was trained on.",
        )
