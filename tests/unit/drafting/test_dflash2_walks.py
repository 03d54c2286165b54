"""DFlash2's drawn walks: what they are drawn from, and the output that they lead to (C16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.drafting.row_reader import RowReader
from dflash_sglang.models.dflash2 import CandidateSelector
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.verify.rejection import NOT_COMMITTED
from tests.support import sglang_layers as layers
from tests.support.reference_dflash2 import dflash2_config
from tests.unit.verify.test_sampling import (
    FILTERS,
    first_step_of_two_tokens,
    markov_target,
    some_rows,
)

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


VOCAB, STEPS, REQUESTS, WIDTH = 7, 2, 20_000, 4


class Walker:
    """Draws walks of two tokens after a last one; rows depend on that token alone, as a block's do."""

    def __init__(self) -> None:
        nested = dict(selector_rank=6, selector_top_k=WIDTH)
        spec = DraftSpec.from_config(dflash2_config(vocab_size=VOCAB, dflash_config=nested)).dflash2
        generator = torch.Generator().manual_seed(17)
        with layers.defaults(torch.float32):
            self.selector = CandidateSelector(spec, 8, VOCAB, None, "selector")
        for parameter in self.selector.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.rows = torch.randn(VOCAB, STEPS, 8, generator=generator)
        self.head = TargetHead(nn.Linear(8, VOCAB, bias=False))
        self.head.lm_head.weight.data = torch.randn(VOCAB, 8, generator=generator)
        self._proposals = RowReader(self.head, self.selector, REQUESTS, STEPS, True, "cpu")

    def propose(self, last: Tensor, temperature: float, greedy: bool = False) -> Any:
        tokens = torch.zeros(len(last), STEPS + 1, dtype=torch.long)
        tokens[:, 0] = last
        self._proposals.write(self.hidden(last), tokens)
        proposals = self._proposals.draw(
            tokens, torch.full((len(last),), temperature), torch.full((len(last),), greedy)
        )
        return proposals._replace(logprobs=self._proposals.read(len(last), STEPS, len(last))[0])

    def hidden(self, last: Tensor) -> Tensor:
        return self.rows[last]


@works
@pytest.mark.parametrize("name", FILTERS)
def test_output_follows_the_targets_filtered_distribution_when_walks_are_proposed(name):
    """A Markov target: the joint distribution of two output tokens, by chi-square at 0.001."""
    torch.manual_seed(11)
    committed = first_step_of_two_tokens(markov_target(), FILTERS[name], Walker().propose)
    if name != "top-k of one":
        assert 0 < int((committed[:, 2] != NOT_COMMITTED).sum()) < REQUESTS, "whole walks are accepted too"


class ConfidentlyWrong(Walker):
    """Mostly walks to a token that the target finds unlikely, for some requests more than for others."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.head.lm_head.weight.data = torch.eye(VOCAB, 8)
        for codebook in (self.selector.predecessor_codebook, self.selector.successor_codebook):
            codebook.data *= 0.15  # edges matter less than what is sure
        favourite = target.argsort(-1)[:, 1]
        rows = torch.stack([target, target[favourite]], dim=1)
        self._favourites = torch.stack([favourite, favourite[favourite]], dim=1)[..., None]
        self.rows = rows
        self._sureness = (torch.arange(REQUESTS) % 4 / 2 + 0.5)[:, None, None]

    def hidden(self, last: Tensor) -> Tensor:
        best = self.rows[last].amax(-1, keepdim=True) + self._sureness
        return torch.nn.functional.pad(self.rows[last].scatter(2, self._favourites[last], best), (0, 1))


@pytest.mark.parametrize(
    ("decides", "name"), [("the likeliest walk", "temperature 0.7"), ("the drawn walk", "temperature 1")]
)
def test_rows_may_be_given_by_the_likeliest_walk_and_not_by_the_drawn_one(decides, name):
    """Half of all proposals are verified, as `test_sampling` has it for drafts without a selector."""
    torch.manual_seed(12)
    table = markov_target()

    def rows(proposals: Any) -> Any:
        of_drawn = ((proposals.candidates == proposals.tokens[:, 1:, None]) * proposals.probs).sum(-1).log()
        ragged = some_rows(proposals.logprobs if decides == "the likeliest walk" else of_drawn, 2 * REQUESTS)
        assert set(ragged.lens.tolist()) == {1, 2, 3}
        return ragged

    draft = ConfidentlyWrong(table)
    if decides == "the likeliest walk":
        committed = first_step_of_two_tokens(table, FILTERS[name], draft.propose, rows)
        assert 0 < int((committed[:, 1] >= 0).sum()) < REQUESTS
    else:
        with pytest.raises(AssertionError, match="chi-square"):
            first_step_of_two_tokens(table, FILTERS[name], draft.propose, rows)
