"""Which draft checkpoints this package's worker serves, and why the built-in worker serves the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang.config.dflash2 import is_dflash2

PLAIN_ARCHITECTURE = "DFlashDraftModel"
BUILT_IN_WORKER = "SGLang's built-in DFlashWorkerV2"

# Architectures that are served under the DFLASH name and are neither plain DFlash nor DFlash2 drafts.
FOREIGN_ARCHITECTURES = {
    "LiLiCorrDraftModel": "LiLiCorr: a candidate scorer beside the draft",
    "DFlashLagunaForCausalLM": "Laguna: per-feature norms and an output gate",
    "MuseGlimmerAssistantModel": "Muse: another numbering of the target's layers",
    "Qwen3DSparkModel": "DSpark: a Markov head and a confidence head",
    "LingDSparkModel": "DSpark: a Markov head and a confidence head",
    "DSparkDraftModel": "DSpark: a Markov head and a confidence head",
}


@dataclass(frozen=True)
class Foreign:
    """A launch that the built-in worker serves: the field that tells, its value, and what it means."""

    field: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.reason}. {BUILT_IN_WORKER} serves it, not dflash_sglang."


@dataclass(frozen=True)
class _Row:
    field: str
    is_foreign: Callable[[Any], bool]
    reason: str
    nested_only: bool = False
    part_of_dflash2: bool = False


def _is_set(value: Any) -> bool:
    return bool(value)


# Looked up in dflash_config and then at the top level, in this order; the first match is reported.
_ROWS = (
    _Row("speculators_model_type", _is_set, "the speculators format"),
    _Row("speculators_config", _is_set, "the speculators format"),
    _Row("projector_type", _is_set, "a head that corrects the proposals, such as Domino"),
    _Row("conv_kernel_size", _is_set, "DFlash2's grouped convolutions", part_of_dflash2=True),
    _Row("selector_rank", _is_set, "DFlash2's candidate selector", part_of_dflash2=True),
    _Row("lilicorr_num_layers", _is_set, "LiLiCorr's candidate scorer"),
    _Row("sample_from_anchor", _is_set, "DSpark's layout, a proposal in every row of the block"),
    _Row("has_embed_tokens", _is_set, "an embedding of its own, such as Nemotron 3.5"),
    _Row("has_lm_head", _is_set, "an lm_head of its own"),
    _Row("draft_vocab_size", _is_set, "a vocabulary of its own"),
    _Row("attention_sink_bias", _is_set, "attention sinks, such as MiMo"),
    _Row("use_gemma_norm", _is_set, "Gemma's norms"),
    _Row("hidden_act", lambda value: value == "swigluoai", "gpt-oss's clamped activation"),
    _Row(
        "output_multiplier",
        lambda value: value not in (None, 1, 1.0),
        "scaled logits",
        nested_only=True,
        part_of_dflash2=True,
    ),
    _Row("final_logit_softcapping", _is_set, "soft-capped logits", nested_only=True, part_of_dflash2=True),
)


def foreign(config: Mapping[str, Any], directory: Path | None = None) -> Foreign | None:
    """Why the built-in worker serves this draft, or None for a plain DFlash or a DFlash2 draft.

    ``config``: the raw config.json; ``directory``: the checkpoint's, where it is on this machine.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in FOREIGN_ARCHITECTURES:
            return Foreign("draft config architectures", name, FOREIGN_ARCHITECTURES[name])
    if names and not is_dflash2(config) and PLAIN_ARCHITECTURE not in names:
        return Foreign("draft config architectures", names[0], "neither a plain DFlash draft nor a DFlash2 draft")
    nested = config.get("dflash_config") or {}
    for row in _ROWS:
        if row.part_of_dflash2 and is_dflash2(config):
            continue
        value = nested.get(row.field)
        path = f"dflash_config.{row.field}"
        if value is None and not row.nested_only:
            path, value = row.field, config.get(row.field)
        if row.is_foreign(value):
            return Foreign(f"draft config {path}", value, row.reason)
    if directory is not None and (directory / "mask_embedding.pt").is_file():
        return Foreign("draft file", "mask_embedding.pt", "a mask embedding outside the target's table")
    return None
