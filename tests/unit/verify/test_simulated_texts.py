"""Texts that the target is said to write: what is read from the file, and what steps commit of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.settings.plugin_config import PluginConfig, Texts
from dflash_sglang.startup.facts import LoadError
from dflash_sglang.verify.acceptance import Acceptor

WIDTH = 4
# Of three proposals, so many come true after each token of two texts.
ACCEPTED = [0, 1, 2, 3, 0, 2, 3, 1, 0, 3]
TOKENS = [0, 10, 11, 12, 13, 14, 1, 20, 0, 22]


def arrays(**changed: Any) -> dict[str, Any]:
    ranks = np.array([[int(at >= n) for at in range(WIDTH - 1)] for n in ACCEPTED], np.uint8)
    logprobs = -np.arange(30, dtype=np.float16).reshape(10, 3, 1)
    prompts = np.array([0] * 6 + [1] * 4, np.uint8)
    return dict(ranks=ranks, logprobs=logprobs, prompts=prompts, tokens=np.array(TOKENS, np.int32)) | changed


def acceptor(directory: Path, width: int = WIDTH, **changed: Any) -> Acceptor:
    np.savez(path := directory / "texts.npz", **arrays(**changed))
    config = PluginConfig.from_mapping({"simulated_acceptance": {"texts": str(path)}})
    assert config.simulated_acceptance == Texts(path)
    return Acceptor(StepSlots(4, width, "cpu"), config.simulated_acceptance)


class Step:
    """Requests in rows 2 and 1, whose prompts begin with these tokens, at these lengths."""

    def __init__(self, acceptor: Acceptor, firsts: tuple[int, int], lens: list[int], width: int = WIDTH) -> None:
        self.acceptor, self.rows = acceptor, torch.tensor([2, 1])
        self.lens, self.width = torch.tensor(lens), width
        tokens = torch.full((2, width), 99)
        self.proposals = Proposals.certain(tokens, logprobs=torch.zeros(2, width - 1))
        reqs = [SimpleNamespace(origin_input_ids=[first, 5]) for first in firsts]
        batch: Any = SimpleNamespace(req_pool_indices_cpu=self.rows, reqs=reqs)
        block: Any = SimpleNamespace(requests=self.rows, prefix_lens=self.lens, size=width)
        assert acceptor.texts is not None
        acceptor.texts.foretell(batch, block, self.proposals)

    def commit(self, ragged: Ragged | None = None) -> list[list[int]]:
        slots, tokens = self.acceptor.slots, self.proposals.tokens
        slots.current.copy_(torch.tensor(slots.next()))
        if ragged is not None:
            tokens = torch.cat([row[:n] for row, n in zip(tokens, ragged.lens.tolist(), strict=False)])
        self.acceptor.accept(tokens, torch.zeros_like(tokens), self.lens, self.rows, ragged)
        outcome = slots.outcome(2, WIDTH if ragged is not None else self.width)
        return [ids[:n].tolist() for ids, n in zip(outcome.target_ids, outcome.commit_lens.tolist(), strict=True)]


def test_a_step_proposes_the_text_as_far_as_the_draft_was_right_and_commits_one_token_more(tmp_path: Path) -> None:
    step = Step(acceptor(tmp_path), (0, 3), [2, 0])  # 3: the second of two texts
    assert step.proposals.tokens.tolist() == [[99, 12, 13, 13], [99, 20, 0, 22]]
    assert step.proposals.logprobs is not None
    assert step.proposals.logprobs.tolist() == [[-6.0, -7.0, -8.0], [-18.0, -19.0, -20.0]]
    assert step.commit() == [[12, 13, 14], [20, 0, 22, 0]]


def test_what_is_wrong_is_no_token_of_the_text_and_a_narrower_block_has_less_of_it(tmp_path: Path) -> None:
    texts = acceptor(tmp_path)
    step = Step(texts, (1, 0), [1, 4], width=3)
    assert step.proposals.tokens.tolist() == [[99, 0, 21], [99, 13, 0]]
    assert step.commit() == [[0, 22], [14]]
    assert Step(texts, (1, 0), [1, 4], width=1).commit() == [[0], [14]]


def test_a_copy_that_says_the_text_is_accepted_beyond_what_the_draft_knew(tmp_path: Path) -> None:
    step = Step(acceptor(tmp_path), (0, 0), [0, 1])
    step.proposals.tokens[:, 1:] = torch.tensor([[10, 11, 9], [11, 12, 13]])
    assert step.commit() == [[10, 11, 12], [11, 12, 13, 14]]


def test_ragged_rows_have_the_answers_of_their_requests(tmp_path: Path) -> None:
    step = Step(acceptor(tmp_path), (1, 0), [0, 3])
    lens = torch.tensor([2, 4], dtype=torch.int32)
    assert step.commit(Ragged(torch.tensor([0, 2, 6], dtype=torch.int32), lens, WIDTH)) == [
        [20, 0],
        [13, 14, 1, 20],
    ]


def test_a_row_follows_the_request_that_has_it_now(tmp_path: Path) -> None:
    texts = acceptor(tmp_path)
    assert Step(texts, (0, 1), [1, 1]).commit() == [[11, 12], [0, 22]]
    assert Step(texts, (1, 1), [1, 1]).commit() == [[0, 22], [0, 22]]


def test_texts_know_nothing_of_the_branches_of_a_tree(tmp_path: Path) -> None:
    assert not acceptor(tmp_path).knows_trees


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (dict(tokens=np.zeros(9, np.int32)), r"tokens as integers of shape \(10,\), found int32 of shape \(9,\)"),
        (dict(tokens=np.zeros(10)), r"tokens as integers of shape \(10,\), found float64"),
        (dict(prompts=np.array([1] * 6 + [0] * 4, np.uint8)), "prompts 0, 1, ... in this order"),
        (dict(prompts=np.array([0] * 6 + [2] * 4, np.uint8)), "prompts 0, 1, ... in this order"),
        (dict(prompts=np.zeros(3, np.uint8)), r"prompts of shape \[10\]"),
    ],
)
def test_another_file_is_refused_with_what_is_wrong(tmp_path: Path, changed: dict, expected: str) -> None:
    with pytest.raises(LoadError, match=f"acceptance.texts=.*texts.npz.*{expected}.*python -m bench.copies"):
        acceptor(tmp_path, **changed)


def test_a_record_without_tokens_or_of_narrower_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"texts=.*at least 4 proposals, for a block of 5, found 3"):
        acceptor(tmp_path, width=5)
    fields = arrays()
    del fields["tokens"]
    np.savez(tmp_path / "record.npz", **fields)
    with pytest.raises(
        LoadError, match="texts=.*record.npz.*expected an array of tokens beside those of a record"
    ):
        Acceptor(StepSlots(4, WIDTH, "cpu"), Texts(tmp_path / "record.npz"))
