"""What of a server cannot be: its flags for the draft, alone and with the draft that it is given."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.startup.facts import Problem, ServingFacts

# Those whose kernels take a sink per head in the draft's dtype.
SINK_BACKENDS = ("fa3", "fa4", "triton", "torch_native")
# Formats of draft KV that the context-KV write knows; "auto" is the model's dtype.
DRAFT_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# Attention backends that read fp8 keys and values for the draft's block; torch_native is the CPU platform's.
FP8_READERS = {
    "fp8_e4m3": ("fa3", "flashinfer", "triton", "trtllm_mha", "torch_native"),
    "fp8_e5m2": ("flashinfer", "triton", "torch_native"),
}
# Reads the model's dtype alone: SGLang gives its drafts such a pool where only the target's is quantised.
_FOLLOWS_THE_MODEL = "fa4"


def serving_problems(serving: ServingFacts) -> Iterator[Problem]:
    """What is wrong whatever the draft is."""
    if serving.draft_path is None:
        expected = "the DFlash draft's directory or repository"
        yield Problem("--speculative-draft-model-path", None, expected, "Add --speculative-draft-model-path.")
    if serving.draft_as_gguf:
        expected = "the draft's own format beside a .gguf target, as which SGLang would load it"
        fix = "Set --speculative-draft-load-format auto."
        yield Problem("--speculative-draft-load-format", None, expected, fix)
    yield from kv_problems(serving)


def kv_problems(serving: ServingFacts) -> Iterator[Problem]:
    """Formats of the draft's pool that cannot be written or read, whatever the draft is."""
    field, dtype = "--speculative-draft-kv-cache-dtype", serving.draft_kv_dtype
    fix = f"Set {field} bf16 or fp8_e4m3; the target's may stay as it is."
    # A backend that no draft runs on is replaced by SGLang.
    reader = serving.draft_reader if serving.draft_reader in serving.supported_backends else None
    if dtype is None:
        field, dtype = "--kv-cache-dtype", serving.kv_dtype
        if reader == _FOLLOWS_THE_MODEL and dtype in FP8_READERS:
            return
    if dtype not in DRAFT_KV_DTYPES:
        yield Problem(field, dtype, "for the draft one of " + ", ".join(DRAFT_KV_DTYPES), fix)
    elif dtype in FP8_READERS and reader not in (None, *FP8_READERS[dtype]):
        readers = ", ".join(FP8_READERS[dtype])
        expected = f"a format that the draft's attention backend {reader} reads; {dtype} is read by {readers}"
        fix = "Change --speculative-draft-attention-backend, or set --speculative-draft-kv-cache-dtype bf16."
        yield Problem(field, dtype, expected, fix)


def block_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    trained, flag = spec.block_size, serving.block_flag
    served = trained if serving.block_size is None else serving.block_size
    least = "at least 2: the last committed token and one proposal"
    if serving.block_size is not None and served < 2:
        yield Problem(flag, served, least, f"Set {flag} to 2 or more, up to the trained block.")
    elif trained < 2:
        yield Problem("draft config block_size", trained, least, "Correct it, or serve another draft.")
    elif served > trained:
        expected = f"at most the trained block of {trained}; beyond it proposals are noise"
        yield Problem(flag, served, expected, f"Set {flag} {trained}, or remove it.")
    elif serving.widest > served:
        expected = f"at most {served}, the block that is served; it may be served narrower, not wider"
        yield Problem("DFLASH_SGLANG_CONFIG width", serving.widest, expected, "Lower it, or leave it out.")


def backend_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    backend, field = serving.draft_attention_backend, "--speculative-draft-attention-backend"
    sliding = all(layer.kind == "sliding_attention" for layer in spec.layers)
    causal = all(layer.causal for layer in spec.layers)
    reader = backend or serving.draft_reader
    if backend is None and reader == "trtllm_mha" and not (sliding or causal):
        reader = None  # SGLang takes another
    if spec.attention_sinks and reader in serving.supported_backends and reader not in SINK_BACKENDS:
        with_sinks = [name for name in serving.supported_backends if name in SINK_BACKENDS]
        expected = "a backend for the draft's attention sinks (attention_sink_bias): " + ", ".join(with_sinks)
        fix = f"Set {field} to one of these."
        yield Problem("--attention-backend" if backend is None else field, reader, expected, fix)
    if backend is None:
        return
    if backend not in serving.supported_backends:
        expected = "one that attends non-causally from the block: " + ", ".join(serving.supported_backends)
        yield Problem(field, backend, expected, f"Set {field} to one of these, or remove it.")
    elif backend == "trtllm_mha" and not causal:  # full layers: SGLang takes another; sliding ones: a wrong window
        others = [name for name in serving.supported_backends if name != backend]
        expected = "a backend for the draft's layers that are not causal: " + ", ".join(others)
        yield Problem(field, backend, expected, f"Set {field} to one of these, or remove it.")


def window_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    """Sizes of an imposed window that no draft step can honour."""
    field, sink_field = "--speculative-draft-window-size", "--speculative-draft-sink-size"
    window, sinks = serving.draft_window, serving.draft_sinks
    block = spec.block_size if serving.block_size is None else serving.block_size
    if window is not None and window < block:
        fix = f"Set {field} {block} or more, or remove it."
        yield Problem(field, window, f"at least the block of {block}", fix)
    if not sinks:
        return
    widest = max((layer.window for layer in spec.layers if layer.window is not None), default=0)
    if sinks < 0 or window is None:
        fix = f"Set {field} too, or remove {sink_field}."
        yield Problem(sink_field, sinks, f"0 or more, and {field} beside it", fix)
    elif window < widest:
        why = "layers of the draft with that sliding_window see no sinks"
        expected = f"a {field} of at least {widest} beside it: {why}"
        yield Problem(sink_field, sinks, expected, f"Set {field} {widest} or more, or remove {sink_field}.")
