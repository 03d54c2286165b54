"""What the worker tells operators: one line at start-up with every decision it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_sglang import __version__

if TYPE_CHECKING:
    from dflash_sglang.worker import DFlashWorker


def startup_line(worker: DFlashWorker, draft_backend: str) -> str:
    """`dflash_sglang <version> worker active: ...`, as one line of key=value pairs."""
    spec = worker.draft_spec
    layers = ", ".join(
        f"{layer.kind.removesuffix('_attention')}{f'({layer.window})' if layer.window else ''}"
        f"{' causal' if layer.causal else ''}"
        for layer in spec.layers
    )
    decisions = {
        "draft": f"{spec.architecture} ({spec.num_layers} layers: {layers})",
        "block": f"{worker.block_size} (trained {spec.block_size})",
        "target_layers": list(worker.feature_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "draft_attention": draft_backend,
        "draft_quantization": spec.quantization or "none",
        "context_kv": worker.context_kv_decision,
    }
    if spec.dflash2 is not None:
        conv, selector = spec.dflash2.convolution, spec.dflash2
        decisions["convolution"] = f"{conv.taps} taps, groups of {conv.group_size}" if conv else "none"
        decisions["selector"] = f"rank {selector.selector_rank} over {selector.selector_top_k} candidates"
        decisions["proposals"] = "drawn" if worker.draws_proposals else "argmax"
    return f"dflash_sglang {__version__} worker active: " + " ".join(
        f"{key}={value};" for key, value in decisions.items()
    )
