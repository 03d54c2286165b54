"""What of the draft's KV pool and of its window cannot be served: formats, their readers, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.startup.facts import Problem, ServingFacts

# Formats of draft KV that the context-KV write knows; "auto" is the model's dtype.
DRAFT_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# Attention backends that read fp8 keys and values for the draft's block; torch_native is the CPU platform's.
FP8_READERS = {
    "fp8_e4m3": ("fa3", "flashinfer", "triton", "trtllm_mha", "torch_native"),
    "fp8_e5m2": ("flashinfer", "triton", "torch_native"),
}
# Reads the model's dtype alone: SGLang gives its drafts such a pool where only the target's is quantised.
_FOLLOWS_THE_MODEL = "fa4"


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
        yield Problem(
            field,
            dtype,
            f"a format that the draft's attention backend {reader} reads; {dtype} is read by {readers}",
            "Change --speculative-draft-attention-backend, or set --speculative-draft-kv-cache-dtype bf16.",
        )


def pool_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """A raw config.json of a draft that would make SGLang give its sliding layers a pool of their own."""
    if config.get("is_hybrid_swa") or (config.get("text_config") or {}).get("is_hybrid_swa"):
        yield Problem(
            "draft config is_hybrid_swa",
            True,
            "false: context KV is written into one pool for all layers of the draft, at the target's slots",
            "Remove it from the draft's config.json; layer_types and sliding_window say which layers slide.",
        )


def window_problems(spec: DraftSpec, serving: ServingFacts) -> Iterator[Problem]:
    """Sizes of an imposed window that no draft step can honour."""
    field, sink_field = "--speculative-draft-window-size", "--speculative-draft-sink-size"
    window, sinks = serving.draft_window, serving.draft_sinks
    block = spec.block_size if serving.block_size is None else serving.block_size
    if window is not None and window < block:
        yield Problem(
            field, window, f"at least the block of {block}", f"Set {field} {block} or more, or remove it."
        )
    if not sinks:
        return
    widest = max((layer.window for layer in spec.layers if layer.window is not None), default=0)
    if sinks < 0 or window is None:
        yield Problem(
            sink_field, sinks, f"0 or more, and {field} beside it", f"Set {field} too, or remove {sink_field}."
        )
    elif window < widest:
        yield Problem(
            sink_field,
            sinks,
            f"a {field} of at least {widest} beside it: layers of the draft with that sliding_window see no sinks",
            f"Set {field} {widest} or more, or remove {sink_field}.",
        )
