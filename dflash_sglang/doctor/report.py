"""The findings of `dflash-sglang doctor`, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_sglang import __version__
from dflash_sglang.doctor.launch import BUILT_IN, Verdict
from dflash_sglang.doctor.sizes import BreakEven
from dflash_sglang.doctor.tokens import Vocabularies

GB = 1 << 30
ASSUMES = "a step takes as long as reading its weights; experts are read by the tokens that choose them"


@dataclass(frozen=True)
class Draft:
    """What was read of the draft, in words where the start-up line has words."""

    architecture: str
    layers: str
    rope: str
    heads: str
    target_layers: list[int] | None
    mask_token_id: int | None
    own_modules: str
    quantization: str
    block: int


@dataclass(frozen=True)
class Serving:
    """How the launch would serve it."""

    block: int
    widths: list[int]
    ragged: bool
    draft_attention: str
    head: str
    context_kv: str
    draft_weights: str
    ranks: int


@dataclass(frozen=True)
class Memory:
    """Of a rank."""

    weight_bytes: int
    kv_bytes_per_token: int
    max_total_tokens: int | None
    kv_bytes: int | None  # of --max-total-tokens, None without the flag; or of the rings
    rings: int | None = None  # for the requests that may run at most, where the draft's pool has rings
    ring_tokens: int | None = None


@dataclass(frozen=True)
class Report:
    """Parts are None where a refusal came before they could be read."""

    target: str
    draft: str
    device: str
    verdict: Verdict
    suspicious: Sequence[str]
    versions: Mapping[str, str]
    patches: Mapping[str, str]
    model: Draft | None = None
    serving: Serving | None = None
    memory: Memory | None = None
    vocabulary: Vocabularies | None = None
    break_even: BreakEven | None = None

    @property
    def exit_code(self) -> int:
        return 1 if self.verdict.refused else 0

    def as_json(self) -> dict[str, Any]:
        """Keys are those of docs/reference/doctor.md."""
        return {
            "target": self.target,
            "draft": self.draft,
            "device": self.device,
            "worker": self.verdict.worker,
            "why_built_in": self.verdict.reason,
            "refused": [asdict(refusal) for refusal in self.verdict.refused],
            "suspicious": list(self.suspicious),
            "model": _dict(self.model),
            "serving": _dict(self.serving),
            "memory_per_rank": _dict(self.memory),
            "vocabulary": _dict(self.vocabulary),
            "break_even": None if self.break_even is None else {**asdict(self.break_even), "assumes": ASSUMES},
            "versions": dict(self.versions),
            "patches": dict(self.patches),
        }

    def as_page(self) -> str:
        """Lines of at most one fact, refusals and suspicions first."""
        lines = [f"dflash_sglang {__version__} doctor: {self._outcome()}", ""]
        for title, entries in (
            ("refused", [refusal.text for refusal in self.verdict.refused]),
            ("suspicious", self.suspicious),
        ):
            if entries:
                lines += [f"{title}:", *(f"  - {entry}" for entry in entries), ""]
        rows = [("target", self.target), ("draft", self.draft), ("device", self.device), *self._facts()]
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join([*lines, *(f"{name:{width}}{value}" for name, value in rows)])

    def _outcome(self) -> str:
        if self.verdict.refused:
            count = len(self.verdict.refused)
            return f"refused, {count} problem{'s' if count > 1 else ''}"
        if self.verdict.worker == BUILT_IN:
            return f"SGLang's built-in worker would run: {self.verdict.reason}"
        return "fine" if not self.suspicious else "starts, but look at what is suspicious"

    def _facts(self) -> list[tuple[str, object]]:
        rows: list[tuple[str, object]] = []
        if (model := self.model) is not None:
            rows += [
                ("architecture", model.architecture),
                ("layers", model.layers),
                ("rope", model.rope),
                ("heads", model.heads),
                ("target layers", model.target_layers),
                ("mask token", f"{model.mask_token_id}{self._mask_name()}"),
                ("own modules", model.own_modules),
                ("quantization", model.quantization),
            ]
        if (serving := self.serving) is not None and model is not None:
            widths = f"{serving.widths}{', ragged where attention can' if serving.ragged else ''}"
            rows += [
                ("block", f"{serving.block} (trained {model.block})"),
                ("widths", f"{widths}; fewer where memory is short"),
                ("draft attention", serving.draft_attention),
                ("draft weights", serving.draft_weights),
                ("context KV", serving.context_kv),
                ("head", serving.head),
            ]
        if (memory := self.memory) is not None and serving is not None:
            kv = f"{memory.kv_bytes_per_token} bytes a token"
            if memory.kv_bytes is not None:
                kept = f"{memory.max_total_tokens} tokens"
                if memory.rings is not None:
                    kept = f"{memory.rings} rings of {memory.ring_tokens} tokens"
                kv = f"{memory.kv_bytes / GB:.3f} GB for {kept}, {kv}"
            weights = f"draft weights {memory.weight_bytes / GB:.3f} GB"
            rows += [("ranks", serving.ranks), ("memory of a rank", f"{weights}, draft KV {kv}")]
        if self.vocabulary is not None:
            rows.append(("tokenizers", self._tokenizers(self.vocabulary)))
        if self.break_even is not None:
            least = f"needs an accept length above {self.break_even.accept_length:.2f} at one request"
            rows.append(("break-even", f"{least} (estimate: {ASSUMES})"))
        differing = [name for name, state in self.patches.items() if state != "matches"]
        fit = "all fit" if not differing else f"do not fit: {', '.join(differing)}"
        rows.append(("patches", f"{len(self.patches)}, {fit}"))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())))
        return rows

    def _mask_name(self) -> str:
        name = None if self.vocabulary is None else self.vocabulary.mask_token
        return "" if name is None else f" {name!r}"

    @staticmethod
    def _tokenizers(found: Vocabularies) -> str:
        if found.differing is None:
            return f"not compared: {found.why_not}"
        if not found.differing:
            return "the same tokens"
        return f"{found.differing} ids differ: {'; '.join(found.first)}"


def _dict(part: Any) -> dict[str, Any] | None:
    return None if part is None else asdict(part)
