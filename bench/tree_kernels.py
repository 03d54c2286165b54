"""Time of the launches that a step with trees adds, beside those of a step with blocks.

python -m bench.tree_kernels [--out FILE] [--vocab 151936] [--requests 1 2 4 8] [--nodes 16 32 64]

Per number of requests one line of JSON: microseconds of one call. The calls are captured in a CUDA graph of many,
which is replayed in rounds; the figure is the median round.

    argmax       the head's best token of every row of the block, as a step with blocks has it
    best 1       the best token with its logprob, as a step with chains has it
    best 8       the 8 best tokens with their logprobs, as a tree needs them
    best 16      as drawn proposals and walks need them
    topk 16      torch's, of the logits alone
    grow N       a tree of N nodes from the 8 best tokens of each position
    accept       the accept of a block
    accept N     the accept of a tree of N nodes, with the moves of KV

Logits are bfloat16. As far as they fit they lie in the cache of the GPU, as after the GEMM of a head.
`--device cpu` runs the torch twins once and times nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.rejection import captured
from dflash_sglang.bench.script import script_parser
from dflash_sglang.kernels.block.accept import Outcomes, Paths, Relay, Verification, accept
from dflash_sglang.kernels.block.grow_tree import Candidates, Tree, grow_tree
from dflash_sglang.kernels.head.pack_shard import best_ids, merge_best, pack_best

BLOCK, COUNT = 16, 8
CALLS, REPLAYS, ROUNDS = 20, 50, 5
# Microseconds that a tree of 16 nodes may add to the step of one request, the merge of attention and moves aside.
BUDGET = 90


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for requests in arguments.requests:
        forms = calls(requests, arguments.vocab, arguments.nodes, arguments.device)
        if arguments.device == "cpu":
            for run in forms.values():
                run()
            figure = dict(requests=requests, ran=list(forms))
        else:
            figure = dict(requests=requests, us={name: microseconds(run) for name, run in forms.items()})
        figures.append(figure)
        print(json.dumps(figure), flush=True)
    return report.finish("bench.tree_kernels", arguments.out, claims(figures), figures=figures)


def claims(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what was timed: a tree of 16 nodes stays in its budget at one request."""
    found = []
    for figure in figures:
        us = figure.get("us", {})
        if figure["requests"] == 1 and "grow 16" in us:
            added = us["best 8"] - us["argmax"] + us["grow 16"] + us["accept 16"] - us["accept"]
            what = "us that best 8, growth and accept of 16 nodes add to a step of 1 request"
            found.append(report.at_most(what, round(added, 1), BUDGET))
    return found


def calls(requests: int, vocab: int, nodes: list[int], device: str) -> dict[str, Callable[[], Any]]:
    """{name: one call}. Targets answer the first child, as far as a tree has one: paths are long."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(requests * (BLOCK - 1), vocab, generator=generator).bfloat16().float()
    peaks = torch.randint(vocab, (len(logits), 3), generator=generator)
    logits.scatter_add_(1, peaks, torch.tensor([11.0, 9, 8]) + 2 * torch.rand(peaks.shape, generator=generator))
    logits = logits.bfloat16().to(device)

    def best(count: int) -> Any:
        return merge_best(pack_best(logits, 0, count), count)

    ids, logprobs = (values.view(requests, BLOCK - 1, COUNT) for values in best(COUNT))
    candidates, anchors = Candidates(ids, logprobs), torch.zeros(requests, dtype=torch.int64, device=device)
    rows = torch.arange(requests, device=device)
    outcomes = Outcomes(
        torch.empty((1, requests * BLOCK), dtype=torch.int64, device=device),
        torch.empty((1, requests), dtype=torch.int32, device=device),
        *(torch.empty((1, requests), dtype=torch.int64, device=device) for _ in range(2)),
    )
    relay = Relay(*(torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2)))
    step = torch.zeros(2, dtype=torch.int64, device=device)
    max_commit = torch.full((requests,), BLOCK, dtype=torch.int32, device=device)
    block = torch.cat([anchors[:, None], ids[..., 0]], dim=1)
    blocks = Verification(block, block.roll(-1, dims=1), rows, rows, step, max_commit)
    forms: dict[str, Callable[[], Any]] = {
        "argmax": lambda: best_ids(logits),
        **{f"best {count}": partial(best, count) for count in (1, COUNT, 2 * COUNT)},
        f"topk {2 * COUNT}": lambda: logits.topk(2 * COUNT),
        "accept": lambda: accept(blocks, outcomes, relay),
    }
    for count in nodes:
        tokens = torch.zeros((requests, count), dtype=torch.int64, device=device)
        parents, depths = (torch.zeros_like(tokens, dtype=torch.int32) for _ in range(2))
        tree = Tree(parents, depths, torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.float32))
        grow_tree(anchors, candidates, tokens, tree)
        first_child = ids[rows[:, None], tree.depths.long().clamp(max=BLOCK - 2), 0]
        verified = Verification(tokens, first_child, rows, rows, step, max_commit)
        slots = torch.arange(tokens.numel(), device=device).view_as(tokens)
        path = torch.zeros((requests, BLOCK), dtype=torch.int64, device=device)
        paths = Paths(tree, slots, path, path.flatten().clone(), path.flatten().clone())
        forms[f"grow {count}"] = partial(grow_tree, anchors, candidates, tokens, tree)
        forms[f"accept {count}"] = partial(accept, verified, outcomes, relay, paths=paths)
    return forms


def microseconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    graph = captured(lambda: [run() for _ in range(CALLS)])
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (CALLS * REPLAYS))
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    sys.exit(main())
