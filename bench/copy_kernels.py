"""Time of the two launches that copies add to a step.

python -m bench.copy_kernels [--out FILE] [--requests 1 8 64] [--contexts 4096 32768 131072] [--page-sizes 1 64]

Per number of requests, tokens of context, page size and kind of text one line of JSON: microseconds of a search,
and of a search with the write after it. The calls are captured in a CUDA graph of many, which is replayed in
rounds; the figure is the median round. Pages lie anywhere.

    random     every token is drawn: matches of one token or two
    copying    the second half repeats the first: one match of 32 tokens
    period     17 tokens again and again: every 17th position matches over 32 tokens
    one token  the same token everywhere: every position matches over 32 tokens

The claims are what decides whether copies are worth building (go or no-go), for random and copying texts.
`--device cpu` runs the torch twins once and times nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import report
from bench.tree_kernels import microseconds
from dflash_sglang.bench.script import script_parser
from dflash_sglang.kernels.block.find_copy import CopyRows, CopyTables, find_copies, write_copies

BLOCK, VOCAB, PERIOD = 16, 151936, 17
TEXTS = ("random", "copying", "period", "one token")
CLAIMED = TEXTS[:2]
BUDGETS = {(1, 131072): 20, (64, 32768): 60}  # us, by requests and tokens of context


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    shapes = itertools.product(arguments.requests, arguments.contexts, arguments.page_sizes, TEXTS)
    for requests, context, page_size, text in shapes:
        step = new_step(requests, context, page_size, text, arguments.device)
        figure: dict[str, Any] = dict(requests=requests, context=context, page_size=page_size, text=text)
        if arguments.device == "cpu":
            find_copies(*step, context)
            figure["match"] = sorted({key >> 32 for key in step.tables.matches.tolist()})
            write_copies(*step)
        else:
            figure["us"] = {name: microseconds(run) for name, run in calls(step, context).items()}
        figures.append(figure)
        print(json.dumps(figure), flush=True)
    return report.finish("bench.copy_kernels", arguments.out, claims(figures), figures=figures)


class Step(NamedTuple):
    rows: CopyRows
    tables: CopyTables


def calls(step: Step, context: int) -> dict[str, Callable[[], None]]:
    """{name: one call}. A search alone starts from the match that the search before has left, as from 0."""

    def both() -> None:
        find_copies(*step, context)
        write_copies(*step)

    return {"find": lambda: find_copies(*step, context), "find and write": both}


def new_step(requests: int, context: int, page_size: int, text: str, device: str) -> Step:
    """Requests with `context` tokens before the last one, in pages of a pool that has no others."""
    generator = torch.Generator().manual_seed(3)
    pages_each = -(-(context + BLOCK) // page_size)
    pages = torch.randperm(requests * pages_each, generator=generator).view(requests, pages_each)
    table = (pages[:, :, None] * page_size + torch.arange(page_size)).view(requests, -1).int()
    tables = CopyTables.allocate(requests * pages_each * page_size, table.to(device), BLOCK)
    tokens = torch.randint(VOCAB, (requests, context + 1), generator=generator, dtype=torch.int32)
    place = torch.arange(context + 1)
    if text == "copying":
        tokens = tokens[:, place % (context // 2)]
    elif text == "period":
        tokens = tokens[:, place % PERIOD]
    elif text == "one token":
        tokens = tokens[:, :1].expand(-1, context + 1)
    tables.history[tables.req_to_token[:, :context].long()] = tokens[:, :-1].to(device)
    blocks = torch.zeros((requests, BLOCK), dtype=torch.int64)
    blocks[:, 0] = tokens[:, -1]
    slots = table[:, context : context + BLOCK].long().contiguous()
    prefix_lens = torch.full((requests,), context)
    logprobs = torch.zeros((requests, BLOCK - 1), device=device)
    tensors = (of.to(device) for of in (blocks, slots, prefix_lens, torch.arange(requests)))
    return Step(CopyRows(*tensors, None, logprobs, None), tables)


def claims(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what was timed: search and write stay within the budgets."""
    found = []
    for figure in figures:
        requests, context = shape = figure["requests"], figure["context"]
        if "us" in figure and shape in BUDGETS and figure["text"] in CLAIMED:
            text = f"{figure['text']} text in pages of {figure['page_size']}"
            what = f"us of find and write, {requests} requests of {context} tokens, {text}"
            found.append(report.at_most(what, figure["us"]["find and write"], BUDGETS[shape]))
    return found


if __name__ == "__main__":
    sys.exit(main())
