"""What the scheduler tells of requests and of itself under DFLASH."""

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


def add_logprob_return_values(
    original: Callable[..., int], processor: Any, i: int, req: Any, *args: Any, **kwargs: Any
) -> int:
    """AROUND SchedulerLogprobResultProcessor.add_logprob_return_values, of a prefill's results.

    A request for no new token gets no output logprob. Speculation samples a token all the same.
    """
    count = original(processor, i, req, *args, **kwargs)
    if req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()
    return count
