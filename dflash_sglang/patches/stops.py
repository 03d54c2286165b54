"""The first stop inside an accepted run ends a request, as if its tokens had come one by one: `output_ids` keeps
the run, and nothing after the stop counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """AROUND Req.update_finish_state: runs for every request in every step."""
    sampling = req.sampling_params
    if new_accepted_len > 1 and (sampling.stop_strs or sampling.stop_regex_strs):
        _first_stop(original, req, new_accepted_len)
    else:
        original(req, new_accepted_len)
    if req.finished_len is not None:  # counted with the whole run; what is thought comes first
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)


def _first_stop(original: Callable[..., None], req: Any, new_accepted_len: int) -> None:
    """SGLang takes a stop string of the run before a stop token, and of strings the one that is listed first,
    wherever they are. Where that has ended a request, its tokens are looked at again, one by one."""
    undecided = not req.finished() and not req.to_finish
    original(req, new_accepted_len)
    if not undecided or not req.finished():
        return
    whole, outcome, grammar = req.output_ids, (req.finished_reason, req.finished_len), req.grammar
    req.finished_reason = req.finished_len = req.grammar = None  # the grammar has taken the whole run
    for length in range(len(whole) - new_accepted_len + 1, len(whole) + 1):
        req.output_ids = whole[:length]
        original(req, 1)
        if req.finished():
            break
    else:
        req.finished_reason, req.finished_len = outcome
    req.output_ids, req.grammar = whole, grammar
