"""What the demo asks a server and what it keeps of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_sglang.demo.server import Server


@dataclass(frozen=True)
class Run:
    """Greedy completions of one or more prompts, one after the other."""

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


def joined(runs: Sequence[Run]) -> Run:
    """All of them as one run."""
    return Run(
        outputs=[ids for run in runs for ids in run.outputs],
        seconds=sum(run.seconds for run in runs),
        verify_steps=sum(run.verify_steps for run in runs),
        correct_drafts=sum(run.correct_drafts for run in runs),
    )


def stream_answer(server: Server, prompt: str, max_new_tokens: int, write: Callable[[str], None]) -> Run:
    """Streams one greedy completion up to its own end, handing its text to `write` as it comes."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens}
    shown, event, start = 0, None, time.perf_counter()
    for event in server.stream(text=prompt, sampling_params=params):
        text = event["text"].removesuffix("\ufffd")  # the first bytes of a character
        write(text[shown:])
        shown = max(shown, len(text))
    assert event is not None, "a stream that ended well has an event"
    facts = event["meta_info"]
    return Run(
        outputs=[event["output_ids"]],
        seconds=time.perf_counter() - start,
        verify_steps=facts.get("spec_verify_ct", 0),
        correct_drafts=facts.get("spec_num_correct_drafts", 0),
    )
