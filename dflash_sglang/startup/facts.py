"""What is known of a launch before anything is loaded, and the form of what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import one_line, shown
from dflash_sglang.checkpoint.left_out import BLOCK_FLAG

GPU_DRAFT_BACKENDS = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha")


@dataclass(frozen=True)
class Problem:
    """One reason why start-up ends: the field, its value, what was expected, and what to change."""

    field: str
    value: object
    expected: str
    fix: str

    def __str__(self) -> str:
        return one_line(f"{self.field}={shown(self.value)}: expected {self.expected}. {self.fix}", 2000)


class StartupError(ValueError):
    """DFLASH cannot start with this draft, target and server; the message lists every problem."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("DFLASH cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))


class LoadError(ValueError):
    """DFLASH cannot serve what was loaded: the draft's weights, or modules of the target; the message says why."""


@dataclass(frozen=True)
class TargetFacts:
    """The target's text model."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Any) -> TargetFacts:
        """From a transformers config of the text model, or a config.json (its `text_config` if nested)."""
        if isinstance(config, Mapping):
            config = {**config, **(config.get("text_config") or {})}
            return cls(config["num_hidden_layers"], config["hidden_size"], config["vocab_size"])
        # A looped target numbers its layers through all loops.
        layers = config.num_hidden_layers * getattr(config, "num_loops", 1)
        return cls(layers, config.hidden_size, config.vocab_size)


@dataclass(frozen=True)
class ServingFacts:
    """The operator's side; None: a flag that is unset."""

    draft_path: str | None
    block_size: int | None = None  # that `block_flag` asks for
    block_flag: str = BLOCK_FLAG
    draft_attention_backend: str | None = None  # None: the target's
    supported_backends: tuple[str, ...] = GPU_DRAFT_BACKENDS  # those that run the draft on this platform
    kv_dtype: str = "auto"  # --kv-cache-dtype
    draft_kv_dtype: str | None = None  # None: as `kv_dtype`
    draft_reader: str | None = None  # attention backend that will read the draft's KV, None where SGLang chooses
    draft_window: int | None = None
    draft_sinks: int | None = None
    widest: int = 1  # block that DFLASH_SGLANG_CONFIG asks for by number
    draft_as_gguf: bool = False  # whether SGLang would load the draft as the .gguf file that the target is
    draft_ranks: int = 1  # over which one draft is split (the attention TP group)
