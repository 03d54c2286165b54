"""What the demo asks a server and what it keeps of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_sglang.demo.server import Server


@dataclass(frozen=True)
class Run:
    """Greedy completions of the prompts, one after the other."""

    outputs: list[list[int]]  # token ids of each completion
    seconds: float  # from the first request sent to the last answer read
    verify_steps: int  # 0 without speculation
    correct_drafts: int  # proposals that the target agreed with, over all verify steps

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, the bonus token included; 1 without speculation."""
        return 1 + self.correct_drafts / self.verify_steps if self.verify_steps else 1.0


def sampling_params(max_new_tokens: int) -> dict[str, Any]:
    """Greedy, and to the full length, so that both servers do the same work."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def run_prompts(
    server: Server, prompts: Sequence[str], max_new_tokens: int, on_done: Callable[[int], None]
) -> Run:
    """Completes the prompts one at a time, after one request that is not counted; on_done(number done)."""
    params = sampling_params(max_new_tokens)
    server.generate(text=prompts[0][:32], sampling_params=params)
    answers = []
    start = time.perf_counter()
    for prompt in prompts:
        answers.append(server.generate(text=prompt, sampling_params=params))
        on_done(len(answers))
    seconds = time.perf_counter() - start
    facts = [answer["meta_info"] for answer in answers]
    return Run(
        outputs=[answer["output_ids"] for answer in answers],
        seconds=seconds,
        verify_steps=sum(fact.get("spec_verify_ct", 0) for fact in facts),
        correct_drafts=sum(fact.get("spec_num_correct_drafts", 0) for fact in facts),
    )


def stream_text(server: Server, prompt: str, max_new_tokens: int, write: Callable[[str], None]) -> None:
    """Streams one completion, handing its lines to `write` as they are complete.

    The last line, which ends where the completion was cut off, is left out unless it is the only one.
    """
    shown, text = 0, ""
    for event in server.stream(text=prompt, sampling_params=sampling_params(max_new_tokens)):
        text = event["text"]
        complete = text.rfind("\n") + 1
        write(text[shown:complete])
        shown = complete
    if not shown:
        write(f"{text}\n")
