"""The demo's result: one comparison, as a table for people and as one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_sglang.demo.measure import Run, joined


@dataclass(frozen=True)
class Compared:
    """One prompt's answers: with (`dflash`) and without (`plain`) speculation."""

    topic: str
    plain: Run
    dflash: Run

    @property
    def identical(self) -> bool:
        return self.plain.outputs == self.dflash.outputs

    @property
    def speedup(self) -> float:
        """Tokens per second over plain decoding's."""
        return self.dflash.tokens_per_second / self.plain.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "tokens": self.dflash.tokens,
            "verify_steps": self.dflash.verify_steps,
            "accept_length": round(self.dflash.accept_length, 3),
            "tokens_per_second": round(self.dflash.tokens_per_second, 1),
            "baseline_tokens_per_second": round(self.plain.tokens_per_second, 1),
            "speedup": round(self.speedup, 2),
            "identical": self.identical,
        }

    def as_row(self) -> str:
        return (
            f"{self.topic:<12}{self.plain.tokens_per_second:>10.1f}{self.dflash.tokens_per_second:>10.1f}"
            f"{self.speedup:>9.2f}x{self.dflash.accept_length:>14.2f}{'yes' if self.identical else 'no':>11}"
        )


@dataclass(frozen=True)
class Comparison:
    """All prompts of a demo."""

    worker: str  # as its own log line names it
    device: str  # cpu, cuda
    dtype: str
    max_new_tokens: int
    prompts: Sequence[Compared]

    @property
    def all(self) -> Compared:
        """The prompts as one."""
        plain, dflash = (joined([getattr(one, kind) for one in self.prompts]) for kind in ("plain", "dflash"))
        return Compared("all", plain, dflash)

    def as_json(self) -> dict[str, Any]:
        of_all = self.all.as_json()
        del of_all["topic"]
        return {
            "worker": self.worker,
            "device": self.device,
            "dtype": self.dtype,
            "max_new_tokens": self.max_new_tokens,
            **of_all,
            "identical_prompts": sum(one.identical for one in self.prompts),
            "prompts": [one.as_json() for one in self.prompts],
        }

    def as_table(self) -> str:
        lines = [f"{'tokens/s':<12}{'plain':>10}{'DFLASH':>10}{'':>10}{'accept length':>14}{'same text':>11}"]
        lines += [one.as_row() for one in (*self.prompts, self.all)]
        lines.append(f"worker: {self.worker} on {self.device}, {self.dtype}, greedy, one request at a time")
        if not self.all.identical and self.dtype != "float32":
            lines.append(
                f"{self.dtype} rounds differently in batches of 1 and of a block; ties may fall either way"
            )
        return "\n".join(lines)
