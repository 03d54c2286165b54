"""Time of the sampled accept of a step: this package's launches, plain torch, and SGLang's built-in worker's.

python -m bench.rejection [--out FILE] [--vocab 151936] [--block 16] [--requests 1 8 32 128]

Per number of requests, kind of rows and filters one line of JSON: the launches of one step and its
microseconds, the median of rounds of steps that the host issues one after the other. `captured` is a replay of
this package's launches as a CUDA graph. "peaked" rows have a likely token, "flat" ones are like those of a
model with random weights. "torch" materialises the filtered distributions of all rows; "built-in" is the
function that SGLang's DFLASH worker calls. What is proposed is the argmax of every row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.launches import launches
from dflash_sglang.bench.script import script_parser
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.verify.rejection import RejectionSampler, rejection_sample

FILTERS: dict[str, dict[str, float]] = {
    "temperature": dict(),
    "top-p": dict(top_p=0.95),
    "top-k": dict(top_k=20),
    "all": dict(top_k=50, top_p=0.95, min_p=0.02),
}
TEMPERATURE = 0.7
ALL = 1 << 30
STEPS, ROUNDS = 20, 5
TORCH_ROWS = 512  # of more, the matrices of the torch form do not fit


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for requests in arguments.requests:
        for kind in ("peaked", "flat"):
            logits = rows(kind, requests * arguments.block, arguments.vocab)
            sampler = RejectionSampler(requests, arguments.block, arguments.vocab, "cuda")
            for name in FILTERS:
                figure = dict(requests=requests, rows=kind, filters=name)
                figure.update(measure(logits, requests, arguments.block, FILTERS[name], sampler))
                figures.append(figure)
                print(json.dumps(figure), flush=True)
            del logits
    claims = []
    for figure in figures:
        if figure["requests"] == 32 and figure["filters"] != "all":
            what = f"sampled accept over the built-in one, 32 requests, {figure['rows']} rows, {figure['filters']}"
            ratio = round(figure["captured"]["us"] / figure["built-in"]["us"], 3)
            claims.append(report.at_most(what, ratio, 0.5))
    return report.finish("bench.rejection", arguments.out, claims, figures=figures)


def rows(kind: str, count: int, vocab: int) -> Tensor:
    """[count, vocab] float32 with the granularity of bfloat16, as a head in bfloat16 leaves them."""
    generator = torch.Generator("cuda").manual_seed(5)
    logits = torch.randn(count, vocab, generator=generator, device="cuda")
    if kind == "peaked":
        likeliest = torch.randint(vocab, (count, 3), generator=generator, device="cuda")
        heights = torch.rand(count, 3, generator=generator, device="cuda") * torch.tensor(
            [2.0, 3, 3], device="cuda"
        )
        logits.scatter_add_(1, likeliest, heights + torch.tensor([11.0, 7, 6], device="cuda"))
    return logits.bfloat16().float()


def measure(
    logits: Tensor, requests: int, block: int, filters: dict[str, float], sampler: RejectionSampler
) -> dict[str, Any]:
    """{form: {launches, us}} of one step, and the mean number of committed tokens."""
    info = sampling_info(requests, **filters)
    tokens = torch.zeros((requests, block), dtype=torch.int64, device="cuda")
    tokens[:, 1:] = logits.argmax(dim=-1).view(requests, block)[:, :-1]
    proposals = Proposals.certain(tokens, torch.ones((requests, block - 1, 1), device="cuda"))
    out = torch.zeros(tokens.numel(), dtype=torch.int64, device="cuda")

    def ours() -> Tensor:
        return sampler.target_tokens(logits, info, proposals, True, out=out)

    forms: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "captured": captured(ours).replay,
        "built-in": built_in(logits, info, tokens),
    }
    if requests * block <= TORCH_ROWS:
        forms["torch"] = lambda: rejection_sample(logits, info, proposals, True)
    result: dict[str, Any] = {
        name: dict(launches=len(launches(run)), us=microseconds(run)) for name, run in forms.items()
    }
    agrees = (tokens[:, 1:] == ours().view_as(tokens)[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    result["accept_length"] = round(float(agrees.double().mean()) + 1, 2)
    return result


def sampling_info(requests: int, top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """What the forms read of SGLang's SamplingBatchInfo."""
    return SimpleNamespace(
        temperatures=torch.full((requests, 1), TEMPERATURE, device="cuda"),
        top_ks=torch.full((requests,), top_k, dtype=torch.int32, device="cuda"),
        top_ps=torch.full((requests,), top_p, device="cuda"),
        min_ps=torch.full((requests,), min_p, device="cuda"),
        need_top_k_sampling=top_k != ALL,
        need_top_p_sampling=top_p != 1.0,
        need_min_p_sampling=min_p > 0,
        max_top_k=top_k,
    )


def built_in(logits: Tensor, info: Any, tokens: Tensor) -> Callable[[], Any]:
    """SGLang's sampled accept; it takes no min-p."""
    from sglang.srt.speculative.dflash_utils import compute_dflash_sampling_correct_drafts_and_bonus

    def run() -> Any:
        return compute_dflash_sampling_correct_drafts_and_bonus(
            candidates=tokens,
            next_token_logits=logits,
            sampling_info=info,
            max_top_k=info.max_top_k,
            uniform_top_k_value=info.max_top_k,
            threshold_single=1.0,
            threshold_acc=1.0,
        )

    return run


def microseconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()
        begin.record()
        for _ in range(STEPS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / STEPS)
    return round(statistics.median(times), 1)


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


if __name__ == "__main__":
    sys.exit(main())
