"""Holds the served model of a draft with a walk to its reference in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import sglang_layers as layers

PREFIXES = (37, 5)  # committed tokens before the first step; the first is longer than a window of 16
TEMPERATURE = 0.7


def assert_equals_the_reference(
    model: Any, reference: Any, head: nn.Module, block: int, proposing: Callable[[Tensor], Tensor]
) -> None:
    """Rows, proposals, logprobs and q over three steps of different accept lengths, of two requests.

    proposing: [rows, hidden] of a block -> those that propose. `reference.scores(rows, head, before)` gives
    {token: score} of the step whose row is the last, given the token before each.
    """
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.models.context_kv.projection import ContextKV

    rows, steps = model.spec.draft_rows(block), block - 1
    reader = RowReader(model.head, model.edges, 2, steps, drawn=True, device="cpu")
    pool, context = layers.make_pool(model), ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    columns = len(model.spec.target_layer_ids) * model.spec.hidden_size
    features = torch.randn(2, 100, columns, generator=generator)  # of the committed text
    lengths, corrected = list(PREFIXES), False
    for request, length in enumerate(lengths):
        context.write(features[request, :length], torch.arange(length), table[request, :length])

    for accepts in ((1, block), (4, 3), (block, 1)):
        tokens = torch.randint(0, model.spec.vocab_size, (2, block), generator=generator)
        embeds = model.forward_embed(tokens[:, :rows])
        places = [torch.arange(length, length + rows) for length in lengths]
        attention = layers.PlainAttention(pool, list(zip(table, lengths, strict=True)), rows)
        hidden = layers.run_draft(model, embeds.flatten(0, 1).clone(), torch.cat(places), attention)
        hidden = hidden.view(2, rows, -1)
        reader.write(torch.stack([proposing(of) for of in hidden]), tokens)
        drawn = reader.draw(tokens.clone(), torch.full((2,), TEMPERATURE), torch.tensor([False, False]))
        logprobs, best = reader.read(2, steps, 2)
        assert best is None
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], places[request], known)
            torch.testing.assert_close(hidden[request], expected, rtol=1e-4, atol=1e-4)
            anchor = int(tokens[request, 0])
            walk = reference.propose(expected, head, anchor)
            assert tokens[request, 1:].tolist() == walk
            expected = proposing(expected)
            corrected |= walk != head(expected).argmax(-1).tolist()
            for step in range(steps):
                scores = reference.scores(expected[: step + 1], head, [anchor, *walk][: step + 1])
                sure = torch.tensor(list(scores.values())).log_softmax(-1).max()
                torch.testing.assert_close(logprobs[request, step], sure, rtol=1e-3, atol=1e-3)
                taken = drawn.tokens[request, : step + 1].tolist()
                scores = reference.scores(expected[: step + 1], head, taken)
                q = (torch.tensor(list(scores.values())) / TEMPERATURE).softmax(-1)
                assert drawn.candidates[request, step].tolist() == list(scores)
                torch.testing.assert_close(drawn.probs[request, step], q, rtol=1e-3, atol=1e-4)
        for request, accept in enumerate(accepts):
            written = torch.arange(lengths[request], lengths[request] + block)
            new = features[request, written].clone()
            new[accept:] = 1e3
            context.write(new, written, table[request, written])
            lengths[request] += accept
    assert corrected, "edges decide, not the logits alone"
