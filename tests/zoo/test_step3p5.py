"""Step-3.5's reference: equal to transformers, and what a draft of its MTP layers has to recompute."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.zoo import step3p5
from tests.zoo.step3p5 import LAYERS, MTP_LAYERS, Reference

VOCABULARY = step3p5.TEXT["vocab_size"]


@functools.cache
def reference(window: int = step3p5.SERVED_WINDOW) -> Reference:
    with tempfile.TemporaryDirectory() as directory:
        return Reference(step3p5.write(Path(directory)), window)


def text(length: int, seed: int = 7) -> Tensor:
    return torch.randint(4, 250, (length,), generator=torch.Generator().manual_seed(seed))


def test_the_reference_is_the_model_of_transformers() -> None:
    """With transformers' own masks and rotary embeddings; the text is four windows long."""
    from transformers import Step3p7TextConfig, Step3p7TextModel

    config = Step3p7TextConfig(**step3p5.hub_config())
    config._attn_implementation = "eager"
    model, ids, own = Step3p7TextModel(config).eval(), text(100), reference(step3p5.WINDOW)
    for i, layer in enumerate(model.layers):
        layer.load_state_dict(own.layers[i].state_dict())
    model.norm.load_state_dict(own.norm.state_dict())
    model.embed_tokens.weight.data.copy_(own.embedding)
    assert len(model.layers) == LAYERS
    with torch.no_grad():
        expected = model(ids[None]).last_hidden_state[0] @ own.head.T
    torch.testing.assert_close(own.logits(ids), expected, rtol=1e-4, atol=1e-4)


class Step(NamedTuple):
    text: Tensor  # ids [n + 1]; the target has not read the last one
    tokens: Tensor  # proposals [MTP_LAYERS]
    logits: Tensor  # [MTP_LAYERS, vocab]


def draft_with_windows(width: int, rows: int, steps: int = 12) -> list[Step]:
    """Steps that run each MTP layer over the last `rows` committed positions only, after a prefill over all.

    Other positions keep the keys and values of the step that last ran over them, if any did. A step commits 1 to
    `width` tokens: accepted proposals, and one that no layer proposed.
    """
    own, generator, ids = reference(), torch.Generator().manual_seed(3), text(60)
    kept = torch.zeros(MTP_LAYERS, 60 + steps * width, step3p5.TEXT["hidden_size"])  # inputs of each position
    taken: list[Step] = []
    for _ in range(steps):
        n = len(ids) - 1
        start = max(n - rows, 0) if taken else 0
        hidden, tokens, logits = own.hidden(ids[:-1])[start:], ids[start + 1 :], []
        for i in range(MTP_LAYERS):
            kept[i, start:n] = own.mtp_inputs(i, hidden, tokens)
            hidden = own.mtp_rows(i, kept[i, :n])[start:]
            logits.append(own.mtp_logits(i, hidden[-1]))
            tokens = torch.cat([tokens[1:], logits[-1].argmax(-1, keepdim=True)])
        proposals = torch.stack(logits).argmax(-1)
        taken.append(Step(ids, proposals, torch.stack(logits)))
        accepted = int(torch.randint(0, width, (1,), generator=generator))
        other = torch.randint(4, 250, (1,), generator=generator)
        if accepted < MTP_LAYERS and other == proposals[accepted]:
            other = (other + 1) % VOCABULARY
        ids = torch.cat([ids, proposals[:accepted], other])
    return taken


def error(steps: list[Step]) -> float:
    """Largest difference of the proposals' logits from the reference's, which reads the whole text."""
    return max(float((step.logits - reference().propose(step.text)[1]).abs().max()) for step in steps)


@pytest.mark.parametrize("width", range(1, MTP_LAYERS + 2))
def test_the_last_rows_are_enough_and_one_row_fewer_is_not(width: int) -> None:
    """max(width, layers) rows: the exact chain's proposals. Every row counts, whatever the width."""
    rows = max(width, MTP_LAYERS)
    steps = draft_with_windows(width, rows)
    for step in steps:
        assert step.tokens.tolist() == reference().propose(step.text)[0].tolist()
    assert error(steps) < 1e-4
    assert error(draft_with_windows(width, rows - 1)) > 0.1
