"""The demo's result: one comparison, as a table for people and as one JSON object for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_sglang.demo.measure import Run

MARK = ">>>"
HEADING = f"--- held-out Python source; from {MARK} on as the model of 4 million parameters continues it"
SHOWN_PROMPT = 160  # characters of a prompt's end, or fewer


def ending(prompt: str) -> str:
    """The last lines of a prompt. The first line is whole, the last one ends where the prompt does."""
    if len(prompt) <= SHOWN_PROMPT:
        return prompt.lstrip("\n")
    end = prompt[-SHOWN_PROMPT:]
    return end[end.find("\n") + 1 :]


@dataclass(frozen=True)
class Comparison:
    """The same prompts with (`dflash`) and without (`plain`) speculation."""

    worker: str  # as its own log line names it
    device: str  # cpu, cuda
    dtype: str
    max_new_tokens: int
    dflash: Run
    plain: Run

    @property
    def identical_prompts(self) -> int:
        return sum(a == b for a, b in zip(self.dflash.outputs, self.plain.outputs, strict=True))

    @property
    def identical(self) -> bool:
        return self.identical_prompts == len(self.plain.outputs)

    @property
    def speedup(self) -> float:
        return self.dflash.tokens_per_second / self.plain.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {
            "worker": self.worker,
            "device": self.device,
            "dtype": self.dtype,
            "prompts": len(self.plain.outputs),
            "max_new_tokens": self.max_new_tokens,
            "identical": self.identical,
            "identical_prompts": self.identical_prompts,
            "accept_length": round(self.dflash.accept_length, 3),
            "verify_steps": self.dflash.verify_steps,
            "tokens": self.dflash.tokens,
            "tokens_per_second": round(self.dflash.tokens_per_second, 1),
            "baseline_tokens_per_second": round(self.plain.tokens_per_second, 1),
            "speedup": round(self.speedup, 2),
        }

    def as_table(self) -> str:
        prompts = len(self.plain.outputs)
        plain_steps = self.plain.tokens - prompts  # the prefill gives each completion's first token
        identical = "yes" if self.identical else "no"
        rows = [
            ("", "plain", "DFLASH"),
            ("tokens/s", f"{self.plain.tokens_per_second:.1f}", f"{self.dflash.tokens_per_second:.1f}"),
            ("accept length", f"{self.plain.accept_length:.2f}", f"{self.dflash.accept_length:.2f}"),
            ("decode / verify steps", f"{plain_steps}", f"{self.dflash.verify_steps}"),
            ("speed-up", "", f"{self.speedup:.2f}x"),
            ("outputs identical", "", f"{identical} ({self.identical_prompts} of {prompts})"),
        ]
        lines = [f"{name:<22}{plain:>10}{dflash:>16}" for name, plain, dflash in rows]
        lines.append(f"worker: {self.worker} on {self.device}, {self.dtype}, greedy, one request at a time")
        if not self.identical and self.dtype != "float32":
            lines.append(
                f"{self.dtype} rounds differently in batches of 1 and of a block; ties may fall either way"
            )
        return "\n".join(lines)
