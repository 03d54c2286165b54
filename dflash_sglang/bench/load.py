"""One load on one server, by SGLang's own generator, `python -m sglang.benchmark.serving`, inside this process.

Inside, because its import takes ten seconds and a comparison runs it dozens of times; with the arguments of its
command line, so that anyone can repeat a load by hand (one of prompts with `--backend sglang-oai-chat`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash_sglang.bench.prompts import Ids
from dflash_sglang.demo.server import Server

FLAGS = ("--backend=sglang", "--flush-cache", "--cache-report", "--disable-tqdm", "--output-details", "--seed=1")


One = TypeVar("One")


class LoadFailed(RuntimeError):
    """The load generator gave no result, or requests of it failed; the message holds what it said."""


@dataclass(frozen=True)
class Outcome:
    """What a load measured. Times per token leave the first one out; medians are over requests.

    ``user_tokens_per_second``: what one user sees, the inverse of the median time per output token.
    ``accept_length``: tokens after the first per verify step, 1 without speculation. ``cached_share``: of the
    prompts' tokens, those that the prefix cache held. ``requests``: of a conversation, one for each turn.
    """

    output_tokens_per_second: float
    user_tokens_per_second: float
    ttft_ms: float  # to the first token
    ttft_p99_ms: float
    tpot_ms: float  # per output token, of a request
    tpot_p99_ms: float
    accept_length: float
    cached_share: float
    requests: int
    output_tokens: int
    seconds: float


def generator() -> Any:
    """SGLang's module; the import, the only one of it, takes seconds and warns of quantisations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.benchmark import serving
    return serving


def run(
    server: Server, arguments: Sequence[str], speculative: bool, ids: Ids | None,
    on_done: Callable[[int], None] = lambda done: None,
) -> Outcome:  # fmt: skip
    """Drives the server with the generator's `arguments` beside FLAGS; on_done(requests answered).

    ids: of prompts that are messages. Raises LoadFailed.
    """
    serving = generator()
    with tempfile.TemporaryDirectory() as directory:
        result, log = Path(directory) / "result.jsonl", Path(directory) / "serving.log"
        argv = [*FLAGS, "--base-url", server.url, "--output-file", str(result), *arguments]
        with (
            log.open("w") as out,
            contextlib.redirect_stdout(out),
            _recorded(serving, ids, on_done) as answers,
        ):
            try:
                with _command_line(argv):
                    serving.cli_main()
            except SystemExit as error:
                if error.code not in (1, 2):  # a signal
                    raise
                out.flush()
                raise LoadFailed(f"sglang.benchmark.serving {' '.join(argv)}\n{log.read_text()[-2000:]}") from None
            except ValueError as error:  # the warm-up failed, or an argument is not accepted
                raise LoadFailed(f"sglang.benchmark.serving {' '.join(argv)}\n{error}") from error
        return outcome(json.loads(result.read_text()), answers, speculative)


def outcome(result: dict[str, Any], answers: Sequence[Any], speculative: bool) -> Outcome:
    """`result`: the generator's record; `answers`: of the warm-up and the load, in order of arrival."""
    failed = [error for error in result["errors"] if error]
    if failed or not result["completed"]:
        raise LoadFailed(f"{len(failed)} of {len(result['errors'])} requests failed; the first: {failed[:1]}")
    answers = answers[-result["completed"] :]
    tokens = sum(answer.output_len for answer in answers)
    if tokens == len(answers):
        raise LoadFailed(f"each of {tokens} answers ended at its first token; expected prompts with longer ones")
    accept_length = 1.0
    if speculative:
        # Each answer states its tokens per verify step, the first token among them.
        steps = sum(answer.output_len / answer.spec_accept_length for answer in answers if answer.output_len > 1)
        accept_length = (tokens - len(answers)) / steps
    return Outcome(
        output_tokens_per_second=result["output_throughput"],
        user_tokens_per_second=1000 / result["median_tpot_ms"],
        ttft_ms=result["median_ttft_ms"],
        ttft_p99_ms=result["p99_ttft_ms"],
        tpot_ms=result["median_tpot_ms"],
        tpot_p99_ms=result["p99_tpot_ms"],
        accept_length=accept_length,
        cached_share=sum(answer.cached_tokens for answer in answers)
        / sum(answer.prompt_len for answer in answers),
        requests=result["completed"],
        output_tokens=tokens,
        seconds=result["duration"],
    )


@contextlib.contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """This process as the generator's command finds it; straight to the server, whatever proxy is set."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = ["sglang.benchmark.serving", *arguments]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _recorded(serving: Any, ids: Ids | None, on_done: Callable[[int], None]) -> Iterator[list[Any]]:
    """Every answer as the generator's own client reads it: its record leaves the accept lengths out.

    Messages become token ids here. The generator would send them to the chat endpoint, whose stream has no accept
    lengths; so its turns, which it asks of that endpoint only, go to /generate too.
    """
    client, answers = serving.ASYNC_REQUEST_FUNCS["sglang"], []
    turns = serving.MULTI_TURN_BACKENDS

    async def recording(request_func_input: Any, pbar: Any = None) -> Any:
        if ids is not None:
            prompt = ids(request_func_input.prompt)
            request_func_input = dataclasses.replace(request_func_input, prompt=prompt, extra_request_body={})
        answer = await client(request_func_input, pbar=pbar)
        if answer.success and not answer.generated_text:  # it ended at once, and is taken for one of full length
            answer.output_len, answer.ttft = 1, answer.latency
        answers.append(answer)
        on_done(len(answers))
        return answers[-1]

    serving.ASYNC_REQUEST_FUNCS["sglang"] = recording
    serving.MULTI_TURN_BACKENDS = {*turns, "sglang"}
    try:
        yield answers
    finally:
        serving.ASYNC_REQUEST_FUNCS["sglang"] = client
        serving.MULTI_TURN_BACKENDS = turns


def rotated(items: Sequence[One], by: int) -> list[One]:
    """The order of a turn: each begins with the next one."""
    by %= len(items)
    return [*items[by:], *items[:by]]
