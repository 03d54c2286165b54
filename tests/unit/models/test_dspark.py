"""DSpark drafts: the served model and its walks against plain PyTorch, and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from tests.support import sglang_layers as layers
from tests.support.draft_formats import speculators_config
from tests.support.reference_dspark import ReferenceDSpark, dspark_config, dspark_tensors
from tests.support.tiny import write_checkpoint
from tests.unit.models.test_dflash2 import PREFIXES, Target

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="Qwen3", draft="DSpark", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def make_draft(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    from dflash_sglang.models.dspark import Qwen3DSparkModel

    write_checkpoint(directory, config, tensors)
    with layers.defaults(torch.float32):
        model = Qwen3DSparkModel(layers.hf_config(directory))
        model.load_weights(tensors.items())
    return model


@works
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, kind
):
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.models.context_kv.projection import ContextKV

    config = dspark_config(block_size=block - 1, markov_head_type=kind)
    model, target = make_draft(tmp_path, config, dspark_tensors(config)), Target()
    model.bind_target(target)
    assert model.spec.block_size == block
    rows = model.spec.draft_rows(block)
    assert rows == block - 1
    reference = ReferenceDSpark.from_weights(config, dspark_tensors(config))
    reader = RowReader(model.head, model.edges, 2, block - 1, drawn=True, device="cpu")
    pool, context = layers.make_pool(model), ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    features = torch.randn(2, 100, 3 * config["hidden_size"], generator=generator)  # of the committed text
    lengths, corrected = list(PREFIXES), False
    for request, length in enumerate(lengths):
        context.write(features[request, :length], torch.arange(length), table[request, :length])

    for accepts in ((1, block), (4, 3), (block, 1)):
        tokens = torch.randint(0, 320, (2, block), generator=generator)
        embeds = model.forward_embed(tokens[:, :-1])
        places = [torch.arange(length, length + rows) for length in lengths]
        attention = layers.PlainAttention(pool, list(zip(table, lengths, strict=True)), rows)
        hidden = layers.run_draft(model, embeds.flatten(0, 1).clone(), torch.cat(places), attention)
        hidden = hidden.view(2, rows, -1)
        reader.write(hidden, tokens)
        temperature = 0.7
        drawn = reader.draw(tokens.clone(), torch.full((2,), temperature), torch.tensor([False, False]))
        logprobs, best = reader.read(2, rows, 2)
        assert best is None
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], places[request], known)
            torch.testing.assert_close(hidden[request], expected, rtol=1e-4, atol=1e-4)
            anchor = int(tokens[request, 0])
            walk = reference.propose(expected, target.lm_head, anchor)
            assert tokens[request, 1:].tolist() == walk
            corrected |= walk != target.lm_head(expected).argmax(-1).tolist()
            for step, row in enumerate(expected):
                scores = reference.scores(row, target.lm_head, ([anchor] + walk)[step])
                sure = torch.tensor(list(scores.values())).log_softmax(-1).max()
                torch.testing.assert_close(logprobs[request, step], sure, rtol=1e-3, atol=1e-3)
                scores = reference.scores(row, target.lm_head, int(drawn.tokens[request, step]))
                q = (torch.tensor(list(scores.values())) / temperature).softmax(-1)
                assert drawn.candidates[request, step].tolist() == list(scores)
                torch.testing.assert_close(drawn.probs[request, step], q, rtol=1e-3, atol=1e-4)
        for request, accept in enumerate(accepts):
            written = torch.arange(lengths[request], lengths[request] + block)
            new = features[request, written].clone()
            new[accept:] = 1e3
            context.write(new, written, table[request, written])
            lengths[request] += accept
    assert corrected, "edges decide, not the logits alone"


def test_both_formats_say_the_same_and_the_anchors_row_proposes_unless_the_config_says_otherwise():
    zlab = dspark_config()
    written = speculators_config(
        zlab,
        speculators_model_type="dspark",
        architectures=["Qwen3DSparkModel"],
        markov_rank=12,
        sample_from_anchor=True,
    )
    for config in (zlab, written):
        assert foreign(config) is None
        spec = DraftSpec.from_config(config)
        assert (spec.block_size, spec.draft_rows(8), spec.draft_rows(2)) == (8, 7, 1)
        spec = DraftSpec.from_config({**config, "sample_from_anchor": False})
        assert (spec.block_size, spec.draft_rows(7)) == (7, 7)


def test_other_markov_heads_are_the_built_in_workers():
    other = foreign(dspark_config(markov_head_type="rnn"))
    assert str(other) == (
        "draft config markov_head_type='rnn': a Markov head of another kind, such as one with a state. "
        "SGLang's built-in DFlashWorkerV2 serves it, not dflash_sglang."
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("markov_rank", None, "the rank of the Markov head"), ("draft_vocab_size", 40, "a row for every token")],
)
def test_a_markov_head_that_cannot_be_served_is_refused_by_its_field(field, value, expected):
    with pytest.raises(DraftConfigError, match=f"draft config {field}={value}: expected .*{expected}"):
        DraftSpec.from_config({**dspark_config(), field: value})
