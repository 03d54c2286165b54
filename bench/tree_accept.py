"""How many tokens a step commits when it verifies a chain, ragged chains, or best-first trees.

python -m bench.tree_accept --out FILE

The target continues the shortest held-out prompts, greedily and sampled with seeds. Target and draft then run once
over these texts. That gives the draft's marginals and the target's tokens for every place where a step can start.
Every shape is then counted without running a model again. `training.shapes.decode` decodes some prompts step
by step, and has to give the same accept lengths.

chain        the first rows of the block, equally many for all
ragged       the likeliest rows of the batch
tree         the best-first tree of each request, equally many nodes for all
shared tree  the likeliest nodes of the batch

All prompts are one batch. Accept length is the tokens per request and step, the last step uncut. Columns are rows
per request, the root included; a mean for ragged and shared trees. A request verifies 64 rows at most, as a chain
the 16 of the block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench import report
from dflash_sglang.bench.script import script_parser
from dflash_sglang.pair import held_out_prompts
from training.draft import biases_for, block_logits
from training.evaluate import load_pair
from training.reference import ReferenceDraft
from training.shapes import (
    Draw,
    Marginals,
    PairRequest,
    Shape,
    Tree,
    decode,
    greedy,
    grow,
    gumbel,
    likeliest,
    seeded,
    share,
    tokens_of,
    walk,
)
from training.target import residuals

PROMPTS, NEW_TOKENS, SEEDS = 40, 128, 4
ROWS = (4, 6, 8, 12, 16, 32)
CANDIDATES = (8, 16)
NODES = 64  # of one request at most
ANCHORS = 32  # blocks of one draft forward
CHECKED = 4  # prompts decoded step by step
# The table by which trees were planned: the same prompts, 16 candidates, greedy.
PLANNED = {
    "chain": (3.32, 4.33, 5.06, 5.62, 5.84, 5.84),
    "ragged": (3.83, 5.06, 5.64, 5.84, 5.84, 5.84),
    "tree": (3.33, 4.42, 5.25, 6.05, 6.57, 7.08),
    "shared tree": (3.83, 5.07, 5.70, 6.34, 6.53, 7.04),
}
PLANNED_TOLERANCE = 0.02
LEAST_GAIN_SAMPLED = 1.08  # tree of 16 nodes over chain of 16 rows at temperature 1


class Way(NamedTuple):
    """How a text is made, and at which temperature the draft's candidates are ranked."""

    name: str
    temperature: float  # 0: greedy
    ranked_at: float = 1.0


WAYS = (Way("greedy", 0), Way("0.7", 0.7), Way("0.7, ranked at 0.7", 0.7, 0.7), Way("1.0", 1.0))


class Text(NamedTuple):
    """One continuation: its tokens [tokens + block], and the draft's marginals [tokens, block - 1]."""

    ids: np.ndarray
    marginals: Marginals


class Start(NamedTuple):
    """A step that starts at some token: its largest tree, and the nodes on the target's path, root first."""

    tree: Tree
    path: np.ndarray


def draw_of(way: Way, prompt: int, seed: int, positions: int, vocab: int) -> Draw:
    """Seeded by prompt and seed, so that ways of one temperature have the same texts."""
    return seeded(way.temperature, gumbel(positions, vocab, 1000 * seed + prompt)) if way.temperature else greedy


@torch.no_grad()
def continued(target: Any, prompt: Sequence[int], draws: Sequence[Draw], tokens: int) -> Tensor:
    """[draws, prompt + tokens]: plain decoding of a prompt, once for each draw."""
    ids, cache = torch.tensor([list(prompt)]).repeat(len(draws), 1), None
    step = ids
    for position in range(len(prompt), len(prompt) + tokens):
        out = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        step = torch.tensor([draw(row, [position]) for draw, row in zip(draws, out.logits, strict=True)])
        ids = torch.cat((ids, step), dim=1)
    return ids


@torch.no_grad()
def marginal_logits(target: Any, draft: ReferenceDraft, ids: Tensor, prompt: int, tokens: int) -> Tensor:
    """[N, tokens, block - 1, vocab] of blocks that start at each of the first tokens after the prompt."""
    layers = residuals(target, ids)
    features = torch.cat([layers[i] for i in draft.shape.target_layer_ids], dim=-1)
    logits = []
    for anchors in torch.arange(prompt, prompt + tokens).split(ANCHORS):
        biases = biases_for(draft.model, ids.shape[1], anchors, torch.float32)
        logits.append(block_logits(draft.model, target, features, ids, anchors, biases))
    return torch.cat(logits, dim=1)


def read(target: Any, draft: ReferenceDraft, prompts: Sequence[Sequence[int]]) -> dict[str, list[list[Text]]]:
    """{name of a way: of every seed: of every prompt}"""
    texts: dict[str, list[list[Text]]] = {way.name: [[] for _ in seeds(way)] for way in WAYS}
    vocab, block = target.config.vocab_size, draft.shape.block_size
    for number, prompt in enumerate(prompts):
        size = len(prompt) + NEW_TOKENS + block
        rows = {(way.temperature, seed): way for way in WAYS for seed in seeds(way)}
        draws = [draw_of(way, number, seed, size, vocab) for (_, seed), way in rows.items()]
        ids = continued(target, prompt, draws, NEW_TOKENS + block)
        logits = marginal_logits(target, draft, ids, len(prompt), NEW_TOKENS)
        for way in WAYS:
            for seed in seeds(way):
                row = list(rows).index((way.temperature, seed))
                marginals = likeliest(logits[row] / way.ranked_at, max(CANDIDATES))
                texts[way.name][seed].append(Text(ids[row, len(prompt) :].numpy(), marginals))
        print(f"prompt {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return texts


def seeds(way: Way) -> range:
    return range(SEEDS if way.temperature else 1)


def starts_of(text: Text, candidates: int) -> list[Start]:
    """A step at every token of the text but the last."""
    starts = []
    for at in range(len(text.marginals.logp) - 1):
        tree = grow(text.marginals.logp[at][:, :candidates], NODES)
        tokens = tokens_of(tree, text.ids[at], text.marginals.tokens[at])
        drawn = text.ids[at + 1 :][tree.depths].tolist()
        starts.append(Start(tree, np.array(walk(tree.parents, tokens, drawn))))
    return starts


def steps(batch: Sequence[Sequence[Start]], rows: int, shared: bool) -> Iterator[tuple[int, Start, np.ndarray]]:
    """Decodes a batch of texts, given as their starts: (index of the text, start, accepted nodes) of each step."""
    at = [0] * len(batch)
    while live := [text for text, place in enumerate(at) if place < len(batch[text])]:
        now = [batch[text][at[text]] for text in live]
        counts = [rows] * len(live)
        if shared:
            masses = [start.tree.masses for start in now]
            counts = share(masses, min(rows * len(live), sum(map(len, masses))))
        for text, start, count in zip(live, now, counts, strict=True):
            path = start.path[start.path < count]
            at[text] += len(path)
            yield text, start, path


def accept_lengths(batch: Sequence[Sequence[Start]], rows: int, shared: bool) -> list[list[int]]:
    """Of every step of every text."""
    lengths: list[list[int]] = [[] for _ in batch]
    for text, _, path in steps(batch, rows, shared):
        lengths[text].append(len(path))
    return lengths


Started = Mapping[int, Sequence[Sequence[Sequence[Start]]]]
"""{candidates: of every seed: of every prompt: its starts}; 1 candidate gives chains."""


def mean(batches: Sequence[Sequence[Sequence[Start]]], rows: int, shared: bool) -> float:
    of_all = [length for batch in batches for text in accept_lengths(batch, rows, shared) for length in text]
    return round(sum(of_all) / len(of_all), 4)


def table(started: Started) -> dict[str, Any]:
    """{shape: {rows: accept length}}, trees by their candidates."""
    shapes = [("chain", 1, False), ("ragged", 1, True)]
    shapes += [(f"{name}, K = {k}", k, name != "tree") for k in CANDIDATES for name in ("tree", "shared tree")]
    return {name: {rows: mean(started[k], rows, shared) for rows in ROWS} for name, k, shared in shapes}


def gain(started: Started, candidates: int, rows: int) -> dict[str, float]:
    """Accept length of trees of so many nodes over that of the block as a chain, with the standard error of the
    ratio over prompts (1000 resamples)."""
    sums = []
    for k, of in ((candidates, rows), (1, 16)):
        by_seed = [accept_lengths(batch, of, False) for batch in started[k]]
        by_prompt = [np.concatenate(of_prompt) for of_prompt in zip(*by_seed, strict=True)]
        sums.append(np.array([(lengths.sum(), len(lengths)) for lengths in by_prompt]))
    drawn = np.random.default_rng(0).integers(len(sums[0]), size=(1000, len(sums[0])))
    tree, chain = (of[drawn].sum(axis=1) for of in sums)
    ratios = (tree[:, 0] / tree[:, 1]) / (chain[:, 0] / chain[:, 1])
    (tokens, count), (chain_tokens, chain_count) = (of.sum(axis=0) for of in sums)
    return {
        "ratio": round(float((tokens / count) / (chain_tokens / chain_count)), 4),
        "standard_error": round(float(ratios.std()), 4),
    }


def continuations(started: Started, texts: Sequence[Sequence[Text]], candidates: int, rows: int) -> dict[str, Any]:
    """What follows an accepted node of a tree of `rows` nodes: how often the tree has the target's next token, and
    how often that token is the draft's likeliest.

    likeliest: after nodes of rank 0 whose ancestors are all of rank 0. sibling: after nodes of another rank.
    below a sibling: after nodes of rank 0 with such a node above. The last position of a block has no next one.
    """
    found: dict[str, list[tuple[bool, bool]]] = {"likeliest": [], "sibling": [], "below a sibling": []}
    for batch, of_seed in zip(started[candidates], texts, strict=True):
        at = [0] * len(batch)
        for text, start, path in steps(batch, rows, False):
            marginals, astray = of_seed[text].marginals, False
            for depth, node in enumerate(path[1:].tolist(), 1):
                rank = start.tree.ranks[node]
                astray |= rank > 0
                if depth < marginals.tokens.shape[1]:
                    kind = "sibling" if rank else "below a sibling" if astray else "likeliest"
                    right = of_seed[text].ids[at[text] + depth + 1] == marginals.tokens[at[text], depth, 0]
                    found[kind].append((depth + 1 < len(path), bool(right)))
            at[text] += len(path)
    return {
        kind: {
            "nodes": len(of),
            "next_in_tree": round(float(np.mean([there for there, _ in of])), 4),
            "next_is_draft_likeliest": round(float(np.mean([right for _, right in of])), 4),
        }
        for kind, of in found.items()
        if of
    }


def equal_step_by_step(
    target: Any, draft: ReferenceDraft, prompts: Sequence[Sequence[int]], way: Way, started: Started
) -> list[bool]:
    """Of every shape and prompt: whether the loop of `training.shapes` has the accept lengths counted here."""
    vocab, longest = target.config.vocab_size, max(map(len, prompts)) + 2 * NEW_TOKENS
    draws = [draw_of(way, number, 0, longest, vocab) for number in range(len(prompts))]
    equal = []
    for shape in (Shape(16), Shape(6, 1, True), Shape(16, 8), Shape(32, 16), Shape(8, 16, True)):
        requests = [PairRequest(target, draft, prompt) for prompt in prompts]
        decoded = decode(requests, shape, NEW_TOKENS, draws)
        counted = accept_lengths(started[shape.candidates][0][: len(prompts)], shape.rows, shape.shared)
        equal += [a.accept_lengths == b for a, b in zip(decoded, counted, strict=True)]
    return equal


def claims(figures: Mapping[str, Any], equal: Sequence[bool]) -> list[dict[str, Any]]:
    greedy_table, sampled = figures["greedy"]["accept_length"], figures["1.0"]
    most = max(CANDIDATES)
    ratios = [
        greedy_table[name if name in greedy_table else f"{name}, K = {most}"][rows] / planned
        for name, row in PLANNED.items()
        for rows, planned in zip(ROWS, row, strict=True)
    ]
    off = max(abs(ratio - 1) for ratio in ratios)
    fewer = min(
        of["accept_length"][f"{name}, K = 8"][rows] / of["accept_length"][f"{name}, K = 16"][rows]
        for of in figures.values()
        for name in ("tree", "shared tree")
        for rows in ROWS
    )
    return [
        report.at_most(
            "largest deviation from the table that trees were planned by", round(off, 4), PLANNED_TOLERANCE
        ),
        report.at_least(
            "tree of 16 nodes over chain of 16 rows, temperature 1, 8 candidates",
            sampled["over_chain_16"]["tree of 16, K = 8"]["ratio"],
            LEAST_GAIN_SAMPLED,
        ),
        report.at_least("8 candidates over 16, trees, worst of all rows and temperatures", round(fewer, 4), 0.99),
        report.claim(
            "runs of a prompt with the accept lengths of the step by step loop",
            sum(equal),
            f"= {len(equal)}",
            all(equal),
        ),
    ]


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    target, draft, tokenizer = load_pair()
    prompts = [tokenizer.encode(text) for text in held_out_prompts()[:PROMPTS]]
    texts = read(target, draft, prompts)
    figures: dict[str, Any] = {}
    equal: list[bool] = []
    for way in WAYS:
        by_seed = texts[way.name]
        started = {k: [[starts_of(text, k) for text in of] for of in by_seed] for k in (1, *CANDIDATES)}
        trees = [(k, rows) for k in CANDIDATES for rows in (16, 32)]
        figures[way.name] = {
            "accept_length": table(started),
            "over_chain_16": {f"tree of {rows}, K = {k}": gain(started, k, rows) for k, rows in trees},
            "after_an_accepted_node": {
                f"tree of {rows}, K = {k}": continuations(started, by_seed, k, rows) for k, rows in trees
            },
        }
        if way.ranked_at == 1.0:
            equal += equal_step_by_step(target, draft, prompts[:CHECKED], way, started)
    return report.finish(
        "bench.tree_accept",
        arguments.out,
        claims(figures, equal),
        figures=figures,
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        texts_of_a_prompt={way.name: len(seeds(way)) for way in WAYS},
    )


if __name__ == "__main__":
    sys.exit(main())
