"""Holds the served model of a draft to its reference in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import sglang_layers as layers

PREFIXES = (37, 5)  # committed tokens before the first step; the first is longer than a window of 16
TEMPERATURE = 0.7


class Target(nn.Module):
    """A target with an embedding and a head, of `tests.support.tiny`'s sizes."""

    def __init__(self, vocab: int = 320, hidden: int = 64, scale: float | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(21)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for module in (self.model.embed_tokens, self.lm_head):
            module.weight.data = torch.randn(vocab, hidden, generator=generator)
        if scale is not None:
            self.get_dflash_noise_embedding_scale = lambda: scale


def assert_equals_the_reference(model: Any, reference: Any, head: Any, block: int) -> None:
    """Rows and proposals over three steps of different accept lengths, of two requests; logprobs and q too, where
    the reference has `scores(rows, head, before)`: {token: score} of the step whose row is the last, given the
    token before each.

    head: rows -> logits, where the reference has none of its own. `reference.proposing` gives the rows of a block
    that propose, by default all but the anchor's. As verify does, steps write context KV of all rows of a block,
    accepted or not.
    """
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.models.context_kv.projection import ContextKV

    rows, steps = model.spec.draft_rows(block), block - 1
    proposing = getattr(reference, "proposing", lambda rows: rows[1:])
    head, drawn = getattr(reference, "head", None) or head, hasattr(reference, "scores")
    reader = RowReader(model.head, model.edges, 2, steps, drawn=drawn, device="cpu")
    pool, context = layers.make_pool(model), ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    features = torch.randn(2, 100, model.fc.input_size, generator=generator)  # of the committed text
    lengths, corrected = list(PREFIXES), model.edges is None
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
        logprobs, best = reader.read(2, steps, 2)
        assert best is None
        if drawn:
            sampled = reader.draw(tokens.clone(), torch.full((2,), TEMPERATURE), torch.zeros(2, dtype=torch.bool))
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], places[request], known)
            torch.testing.assert_close(hidden[request], expected, rtol=1e-4, atol=1e-4)
            anchor = int(tokens[request, 0])
            walk = reference.propose(expected, head, anchor)
            assert tokens[request, 1:].tolist() == walk
            expected = proposing(expected)
            corrected |= walk != head(expected).argmax(-1).tolist()
            for step in range(steps if drawn else 0):
                scores = reference.scores(expected[: step + 1], head, [anchor, *walk][: step + 1])
                sure = torch.tensor(list(scores.values())).log_softmax(-1).max()
                torch.testing.assert_close(logprobs[request, step], sure, rtol=1e-3, atol=1e-3)
                taken = sampled.tokens[request, : step + 1].tolist()
                scores = reference.scores(expected[: step + 1], head, taken)
                q = (torch.tensor(list(scores.values())) / TEMPERATURE).softmax(-1)
                assert sampled.candidates[request, step].tolist() == list(scores)
                torch.testing.assert_close(sampled.probs[request, step], q, rtol=1e-3, atol=1e-4)
        for request, accept in enumerate(accepts):
            written = torch.arange(lengths[request], lengths[request] + block)
            new = features[request, written].clone()
            new[accept:] = 1e3
            context.write(new, written, table[request, written])
            lengths[request] += accept
    assert corrected, "edges decide, not the logits alone"
