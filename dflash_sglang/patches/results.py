"""What scheduler and launcher tell of requests, and the scheduler of itself, under DFLASH."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang import __version__


def get_internal_state(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    """AROUND SchedulerInternalStateController.get_internal_state, for /server_info's `internal_states`.

    Adds that this package's worker runs (`dflash_worker`), and what the worker tells (`dflash_width`,
    `dflash_acceptance`).
    """
    output = original(controller, request)
    state = getattr(controller.scheduler.draft_worker, "dflash_state", None)  # of this package's worker only
    if state is not None:
        output.internal_state.update(state(), dflash_worker=f"dflash_sglang {__version__}")
    return output


def report_decode_stats(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND SchedulerMetricsReporter.report_decode_stats, called after each decode step: lets this package's
    worker report in the steps in which SGLang does."""
    original(reporter, *args, **kwargs)
    if reporter.forward_ct_decode % reporter.decode_log_interval == 0:
        report = getattr(reporter.scheduler.draft_worker, "report_decode", None)  # of this package's worker only
        if report is not None:
            report(reporter)


def of_an_answer(
    original: Callable[..., None], manager: Any, meta_info: dict[str, Any], answers: Any, i: int
) -> None:
    """AROUND TokenizerManager._calculate_spec_decoding_metrics, of `meta_info`.

    SGLang counts the proposals of a whole block in every step. The scheduler's worker counts how many more were
    verified, or fewer, in a field of SGLang's that DFLASH leaves alone (`width.controller`).
    """
    original(manager, meta_info, answers, i)
    if "spec_num_proposed_drafts" not in meta_info:
        return
    meta_info.pop("spec_cap_length", None)  # what SGLang makes of the field
    meta_info["spec_num_proposed_drafts"] += answers.spec_num_cap_tokens[i]
    if proposed := meta_info["spec_num_proposed_drafts"]:
        meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed
    else:
        meta_info.pop("spec_accept_rate", None)
