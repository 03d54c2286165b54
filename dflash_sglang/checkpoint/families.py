"""Which family a draft belongs to, and which worker serves it: this package's, SGLang's built-in one, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint import speculators
from dflash_sglang.checkpoint.family_specs import KINDS
from dflash_sglang.checkpoint.fields import DraftConfigError, first_architecture, shown
from dflash_sglang.checkpoint.mtp import holds_mtp
from dflash_sglang.checkpoint.speculators import ALGORITHM, is_speculators


@dataclass(frozen=True)
class Family:
    """Drafts that are one and the same model."""

    architectures: tuple[str, ...]  # under which checkpoints declare it
    algorithm: str | None = None  # in the speculators format, None where that has no such draft
    exported: tuple[str, ...] = ()  # what the format's exporters call it besides
    needs: tuple[str, ...] = ()  # fields that its config.json has beside a plain draft's


PLAIN = Family(("DFlashDraftModel",), speculators.DFLASH, exported=("DFlashSpeculator",))
DOMINO = Family(  # told from a plain draft by its projector
    PLAIN.architectures, needs=("pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "shift_label")
)
DFLASH2 = Family(
    ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"),
    speculators.DFLASH2,
    needs=("selector_rank", "selector_top_k"),
)
DSPARK = Family(
    ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel"),
    speculators.DSPARK,
    exported=("DSparkSpeculator",),
    needs=("markov_rank",),  # 0 without a head
)
GEMMA4 = Family(("Gemma4DSparkModel",), needs=DSPARK.needs)  # DSpark on Gemma 4's layers
LAGUNA = Family(("DFlashLagunaForCausalLM",))
FAMILIES = (PLAIN, DFLASH2, DSPARK, GEMMA4, LAGUNA)

BUILT_IN_WORKER = "SGLang's built-in DFlashWorkerV2"

# Architectures that are served under the DFLASH name and are of no family above.
FOREIGN_ARCHITECTURES = {
    "MuseGlimmerAssistantModel": "Muse: tensors of other names, and no vocabulary in the config",
    "DSparkMiniMaxDraftModel": "DSpark on MiniMax layers: Gemma's norms and a Markov head",
    "Lfm2DSparkDraftModel": "DSpark: a Markov head and a confidence head",
    "LiLiCorrDraftModel": "LiLiCorr: a transformer over the candidates of a whole block",
}
# Values of `attention_mode` that some worker has layers for; unset means the same.
_ATTENTION_MODES = ("mha", "gqa", "mqa")


@dataclass(frozen=True)
class Foreign:
    """A launch that the built-in worker serves: the field that tells, its value, and what it means."""

    field: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.field}={shown(self.value)}: {self.reason}. {BUILT_IN_WORKER} serves it, not dflash_sglang."


@dataclass(frozen=True)
class _Row:
    field: str
    is_foreign: Callable[[Any], bool]  # of the field's value
    reason: str
    part_of: tuple[Family, ...] = ()  # drafts of ours that have the field


_ALGORITHMS = [family.algorithm for family in FAMILIES]
_PLAIN = (None, "", "dflash")
# Looked up in dflash_config and then at the top level, in this order; the first match is reported.
_ROWS = (
    _Row(ALGORITHM, lambda value: value not in _ALGORITHMS, "another algorithm in the speculators format"),
    _Row("projector_type", lambda value: value not in _PLAIN, "a head that corrects the proposals", (DOMINO,)),
    _Row("conv_kernel_size", bool, "DFlash2's grouped convolutions", (DFLASH2,)),
    _Row("selector_rank", bool, "DFlash2's candidate selector", (DFLASH2,)),
    _Row("lilicorr_num_layers", bool, "LiLiCorr's candidate scorer"),
    _Row("markov_head_type", lambda value: value not in (None, *KINDS), "a Markov head of another kind"),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Of a draft by its raw config.json: by its algorithm in the speculators format, else by its first
    architecture and its projector. PLAIN where these name no other family."""
    if is_speculators(config):
        algorithm = config.get(ALGORITHM) or PLAIN.algorithm
        return next((family for family in FAMILIES if family.algorithm == algorithm), PLAIN)
    name = first_architecture(config)
    if name in DOMINO.architectures and _nested_or_top(config, "projector_type")[1] == "domino":
        return DOMINO
    return next((family for family in FAMILIES if name in family.architectures), PLAIN)


def check_family(config: Mapping[str, Any]) -> None:
    """Raise DraftConfigError for a draft that no worker of SGLang serves: another architecture, or MLA layers.

    ``config``: the raw config.json. The built-in worker does not check: it ends after the target is loaded where
    SGLang has no such model, and it builds GQA layers for an MLA draft, whose tensors it skips.
    """
    if not _is_draft(config):
        expected = f"a DFLASH draft: {', '.join(sorted(_known(config)))}"
        fix = "Give --speculative-draft-model-path a draft of one of these architectures."
        raise DraftConfigError("architectures", config.get("architectures"), expected, fix)
    nested = config.get("dflash_config")
    for path, fields in (("dflash_config.", nested), ("", config)):
        mode = fields.get("attention_mode") if isinstance(fields, Mapping) else None
        if mode is not None and mode not in _ATTENTION_MODES:
            expected = f"none, or one of {', '.join(_ATTENTION_MODES)}: no worker has other attention for drafts"
            fix = "Serve a draft trained with grouped-query attention."
            raise DraftConfigError(f"{path}attention_mode", mode, expected, fix)


@dataclass(frozen=True)
class MixedUp:
    """Why two checkpoints are not a target and its draft: what the target should be, and what to change."""

    expected: str
    fix: str

    def __str__(self) -> str:
        return f"expected {self.expected}. {self.fix}"


def mixed_up(target: Mapping[str, Any], draft: Mapping[str, Any], same: bool) -> MixedUp | None:
    """A draft as target, or one checkpoint twice (`same`), by raw configs. None where they may be a pair.

    ``target`` may have its architectures only where its multi-token-prediction layers are known not to draft.
    """
    if same and holds_mtp(target):
        return MixedUp(
            "a draft of its own, and this is the target's multi-token-prediction layers, which this command does "
            "not read",
            "A server serves them, and its start-up checks the launch.",
        )
    if same:
        return MixedUp("another checkpoint than the draft, and both are the same", "Correct one of them.")
    if not _is_draft(target):
        return None
    fix = "Give a target." if _is_draft(draft) else "Target and draft are swapped: exchange them."
    return MixedUp("a target, and it is a DFLASH draft", fix)


def _known(config: Mapping[str, Any]) -> set[str]:
    """Architectures of the drafts that some worker serves, in the format of this config."""
    known = FOREIGN_ARCHITECTURES.keys() | {name for family in FAMILIES for name in family.architectures}
    return known | {name for family in FAMILIES for name in family.exported if is_speculators(config)}


def _is_draft(config: Mapping[str, Any]) -> bool:
    return first_architecture(config) in _known(config)


def foreign(config: Mapping[str, Any]) -> Foreign | None:
    """Why the built-in worker serves this draft, or None for one of a family and in a format of ours.

    ``config``: the raw config.json of a draft that `check_family` lets pass.
    """
    names = config.get("architectures")
    if not isinstance(names, list):
        names = []  # which `check_family` refuses
    for name in names:
        if name in FOREIGN_ARCHITECTURES:
            return Foreign("draft config architectures", name, FOREIGN_ARCHITECTURES[name])
    family = family_of(config)
    expected = (*family.architectures, *(family.exported if is_speculators(config) else ()))
    if names and not set(expected) & set(names):
        return Foreign("draft config architectures", names[0], "no draft of a family of ours")
    for row in _ROWS:
        if family in row.part_of:
            continue
        path, value = _nested_or_top(config, row.field)
        if row.is_foreign(value):
            return Foreign(f"draft config {path}", value, row.reason)
    return _converted_speculators(config)


def _nested_or_top(config: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """(path, value) of a field. A malformed dflash_config counts as none: DraftSpec refuses it."""
    nested = config.get("dflash_config")
    value = nested.get(name) if isinstance(nested, Mapping) else None
    return (name, config.get(name)) if value is None else (f"dflash_config.{name}", value)


def _converted_speculators(config: Mapping[str, Any]) -> Foreign | None:
    """A speculators config that was rewritten for another server, by rules that its fields do not tell."""
    for field in ("speculators_model_type", "speculators_config"):
        if config.get(field) and not is_speculators(config):
            return Foreign(f"draft config {field}", config[field], "the speculators format without its decoder")
    return None
