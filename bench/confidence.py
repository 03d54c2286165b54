"""What foretells how many proposals are accepted: the draft's own confidence, or the request's history.

python -m bench.confidence --out FILE [--new-tokens 256]

The reference loop decodes the held-out prompts with the trained pair, greedily, and notes the probability of each
proposal, the entropy of the distribution that it is the likeliest of, and how many were accepted. Then the prompts
are gone through as one batch, a step of each at a time. Predictors, each of the chance that a proposal is accepted
once those before it are:

history      the share of a position's proposals that came true, to the power of how hard the request was so far
as it is     the probability that the draft gives the proposal
probability  a logistic regression on the logit of that and on the proposal's position
entropy      the same on the logarithm of the entropy
both         on the probability, the position and the history

Regressions are fitted on one half of the prompts and judged by the other, and the other way round. Two judgements:
nats per decided proposal (those up to the first rejection), and tokens that a step commits where so many rows are
verified in all, those with the highest predicted chance that they and all before them are accepted; beside them
blocks of one width, and the outcome known beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench import report
from dflash_sglang.bench.script import script_parser
from dflash_sglang.pair import held_out_prompts
from training.evaluate import load_pair
from training.reference import ReferenceDraft, generate

ROWS = (2, 4, 6, 8, 12)  # of a request on average, verified
LEAST = 1e-6  # of a chance, and of one minus it


class Steps(NamedTuple):
    """Of every prompt in turn. [steps] arrays of one prompt, [steps, block - 1] the first two."""

    probability: list[np.ndarray]
    entropy: list[np.ndarray]
    accepted: list[np.ndarray]


class Noting(ReferenceDraft):
    """Notes how sure the draft is of each proposal."""

    def __init__(self, draft: ReferenceDraft) -> None:
        super().__init__(draft.model)
        self.noted: list[tuple[list[float], list[float]]] = []

    @torch.no_grad()
    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        logprobs = head(hidden[1:]).log_softmax(-1)
        best, tokens = logprobs.max(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        self.noted.append((best.exp().tolist(), entropy.tolist()))
        return tokens.tolist()


def decode(new_tokens: int) -> Steps:
    target, draft, tokenizer = load_pair()
    steps = Steps([], [], [])
    for text in held_out_prompts():
        noting = Noting(draft)
        result = generate(target, noting, tokenizer.encode(text), new_tokens, ignore_eos=True)
        probability, entropy = (np.array(values) for values in zip(*noting.noted, strict=True))
        steps.probability.append(probability)
        steps.entropy.append(entropy)
        steps.accepted.append(np.array(result.accept_lengths) - 1)
    return steps


def from_history(accepted: Sequence[np.ndarray], positions: int) -> list[np.ndarray]:
    """[steps, positions] of every prompt: what is expected before each step of the batch. The chance of a
    rejection is a hazard of the position times a level of the prompt: its rejections over the expected ones."""
    place = np.arange(positions)
    tried, failed = np.full(positions, 8.0), np.full(positions, 1.6)  # as if a fifth of eight were rejected
    expected_of, rejected_of = np.full(len(accepted), 2.0), np.full(len(accepted), 2.0)
    expected: list[list[np.ndarray]] = [[] for _ in accepted]
    for step in range(max(map(len, accepted))):
        hazard, level = failed / tried, rejected_of / expected_of
        for prompt, steps in enumerate(accepted):
            if step >= len(steps):
                continue
            expected[prompt].append(1.0 - np.minimum(hazard * level[prompt], 1.0))
            reached = place <= steps[step]
            tried += level[prompt] * reached
            failed += place == steps[step]
            expected_of[prompt] += hazard[reached].sum()
            rejected_of[prompt] += steps[step] < positions
    return [np.array(steps) for steps in expected]


def logit(chance: np.ndarray) -> np.ndarray:
    chance = chance.clip(LEAST, 1 - LEAST)
    return np.log(chance / (1 - chance))


def regression(features: Tensor, outcomes: Tensor) -> Tensor:
    """Weights [n + 1] of a logistic regression, the last one the constant. features [m, n], outcomes [m]."""
    design = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    weights = torch.zeros(design.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = nn.functional.binary_cross_entropy_with_logits(design @ weights, outcomes)
        value.backward()
        return value

    optimiser.step(loss)
    return weights.detach()


def decided(accepted: np.ndarray, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """[steps, positions] whether a proposal was reached, and whether it was accepted."""
    place = np.arange(positions)
    return place <= accepted[:, None], place < accepted[:, None]


def fitted(features: Sequence[np.ndarray], accepted: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[steps, positions] of every prompt: chances by regressions that were fitted on the other half of them.
    features: [steps, positions, n] of every prompt."""
    chances: list[np.ndarray] = [np.empty(0)] * len(features)
    for half in (0, 1):
        reached = [decided(steps, of.shape[1]) for steps, of in zip(accepted, features, strict=True)][
            1 - half :: 2
        ]
        inputs = np.concatenate(
            [of[known] for of, (known, _) in zip(features[1 - half :: 2], reached, strict=True)]
        )
        outcomes = np.concatenate([taken[known] for known, taken in reached])
        weights = regression(
            torch.tensor(inputs, dtype=torch.float32), torch.tensor(outcomes, dtype=torch.float32)
        )
        *slopes, constant = weights.tolist()
        for prompt in range(half, len(features), 2):
            chances[prompt] = 1 / (1 + np.exp(-(features[prompt] @ np.array(slopes) + constant)))
    return chances


def predictors(steps: Steps) -> dict[str, list[np.ndarray]]:
    """{name: [steps, positions] of every prompt}"""
    positions = steps.probability[0].shape[1]
    history = from_history(steps.accepted, positions)
    place = np.log(np.arange(1.0, positions + 1))

    def of(*values: Sequence[np.ndarray]) -> list[np.ndarray]:
        together = [
            np.stack([*each, np.broadcast_to(place, each[0].shape)], -1) for each in zip(*values, strict=True)
        ]
        return fitted(together, steps.accepted)

    probability = [logit(values) for values in steps.probability]
    return {
        "history": history,
        "as it is": steps.probability,
        "probability": of(probability),
        "entropy": of([np.log(values.clip(LEAST)) for values in steps.entropy]),
        "both": of(probability, [logit(values) for values in history]),
    }


def nats(chances: Sequence[np.ndarray], accepted: Sequence[np.ndarray]) -> float:
    """Mean loss of the decided proposals."""
    losses = []
    for chance, of in zip(chances, accepted, strict=True):
        known, taken = decided(of, chance.shape[1])
        chance = chance.clip(LEAST, 1 - LEAST)
        losses.append(-np.log(np.where(taken, chance, 1 - chance))[known])
    return float(np.concatenate(losses).mean())


def committed(survival: Sequence[np.ndarray], accepted: Sequence[np.ndarray], rows: float) -> float:
    """Tokens of a step of one request, where `rows` of each on average are verified: the likeliest of the batch.
    survival: [steps, positions] of every prompt, chances that a proposal and all before it are accepted."""
    tokens = count = 0
    for step in range(max(map(len, accepted))):
        live = [prompt for prompt, of in enumerate(accepted) if step < len(of)]
        chances = np.stack([survival[prompt][step] for prompt in live])
        wanted = round(len(live) * (rows - 1))
        # They never rise along a block, so that those of a request are its first ones.
        chosen = np.zeros(chances.size, bool)
        chosen[np.argsort(-chances, axis=None, kind="stable")[:wanted]] = True
        lens = chosen.reshape(chances.shape).sum(axis=1)
        tokens += sum(1 + min(int(n), int(accepted[prompt][step])) for n, prompt in zip(lens, live, strict=True))
        count += len(live)
    return tokens / count


def judged(steps: Steps) -> dict[str, Any]:
    """{name: {"nats": of a proposal, "committed": {rows: tokens of a step}}}"""
    chances = predictors(steps)
    survival = {name: [of.cumprod(axis=1) for of in by_prompt] for name, by_prompt in chances.items()}
    survival["one width"] = [np.broadcast_to(-np.arange(of.shape[1]), of.shape) for of in steps.probability]
    survival["known beforehand"] = [
        decided(accepted, of.shape[1])[1].astype(float)
        for accepted, of in zip(steps.accepted, steps.probability, strict=True)
    ]
    found: dict[str, Any] = {}
    for name, of in survival.items():
        found[name] = {"nats": round(nats(chances[name], steps.accepted), 4)} if name in chances else {}
        found[name]["committed"] = {rows: round(committed(of, steps.accepted, rows), 4) for rows in ROWS}
    return found


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the draft's confidence adds to the history."""
    history, both = figures["history"], figures["both"]
    out = [
        report.at_most(
            "nats of a proposal by both over those by history", round(both["nats"] / history["nats"], 4), 1.0
        )
    ]
    for rows in ROWS:
        gain = both["committed"][rows] / history["committed"][rows]
        out.append(
            report.at_least(f"tokens of a step of {rows} rows a request, both over history", round(gain, 4), 1.0)
        )
    return out


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--new-tokens", type=int, default=256, help="of each prompt")
    arguments = parser.parse_args()
    steps = decode(arguments.new_tokens)
    figures = judged(steps)
    count, accepted = sum(map(len, steps.accepted)), np.concatenate(steps.accepted)
    return report.finish(
        "bench.confidence",
        arguments.out,
        claims(figures),
        figures=figures,
        steps=count,
        accept_length=round(float(accepted.mean()) + 1, 4),
    )


if __name__ == "__main__":
    sys.exit(main())
