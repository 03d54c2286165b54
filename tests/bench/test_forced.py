"""Forced acceptance: what is read from lists and files, and what steps commit by it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.record import beginnings, statistics
from bench.widths import PAIR_RECORD
from dflash_sglang.bench.forced import answers
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.block.grow_tree import grow_tree
from dflash_sglang.kernels.block.share_rows import share_rows
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.settings.plugin_config import FORCED_ENV, PluginConfigError
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.tree import Trees
from tests.support.engines import serve
from training.pair import pair_directories
from training.shapes import grow

FACTS = json.loads(PAIR_RECORD.with_suffix(".json").read_text())
PAIR = json.dumps({"record": str(PAIR_RECORD)})
TARGET, DRAFT = map(Path, pair_directories().values())
EASY, HARD = [0.9, 0.5, 0.8], [0.5, 0.0, 0.0]


class Served:
    """Requests in rows of req_to_token, whose steps an acceptor with these answers accepts."""

    def __init__(
        self, forced: Any, width: int, rows: Sequence[int], lens: Sequence[int], firsts: Any = None
    ) -> None:
        """firsts: the first token of each prompt."""
        self.forced, self.width = forced, width
        self.slots = StepSlots(max(rows) + 1, width, "cpu")
        self.acceptor = Acceptor(self.slots, forced)
        self.rows, self.lens = torch.tensor(rows), torch.tensor(lens)
        self.reqs = [SimpleNamespace(rid=str(row), origin_input_ids=[0]) for row in rows]
        for req, first in zip(self.reqs, firsts or (), strict=False):
            req.origin_input_ids = [first]

    def propose(self, width: int | None = None, trees: bool = False) -> Proposals:
        width = width or self.width
        proposals = Proposals.certain(torch.full((len(self.rows), width), 99))
        if width > 1:
            proposals = proposals._replace(logprobs=torch.full((len(self.rows), width - 1), -7.0))
        if trees:
            none = torch.zeros(len(self.rows), width - 1, 8)
            proposals = proposals._replace(best=Candidates(none.long(), none))
        batch: Any = SimpleNamespace(req_pool_indices_cpu=self.rows, reqs=self.reqs)
        block: Any = SimpleNamespace(requests=self.rows, prefix_lens=self.lens, size=width)
        return self.forced.foretell(batch, block, proposals)

    def accept(self, tokens: torch.Tensor, ragged: Ragged | None = None, paths: Any = None) -> list[list[int]]:
        """Committed tokens of each request; tokens [bs, width] of blocks, or of trees."""
        outcome_width = tokens.shape[1] if ragged is None and paths is None else self.width
        self.slots.current.fill_(self.slots.next())
        if ragged is not None:
            tokens = torch.cat([row[:n] for row, n in zip(tokens, ragged.lens.tolist(), strict=True)])
        for _ in range(2):  # a step that is accepted twice, in a graph and after it, commits the same
            self.acceptor.accept(tokens, torch.zeros_like(tokens), self.lens, self.rows, ragged, paths)
        outcome = self.slots.outcome(len(self.rows), outcome_width)
        committed = zip(outcome.target_ids, outcome.commit_lens.tolist(), strict=True)
        return [ids[:n].tolist() for ids, n in committed]

    def step(self, width: int | None = None, ragged: Ragged | None = None) -> list[int]:
        """Lengths that requests commit, and from which they go on."""
        lengths = [len(ids) for ids in self.accept(self.propose(width).tokens, ragged)]
        self.lens = self.lens + torch.tensor(lengths)
        return lengths


def forced(source: object, width: int, rows: int) -> Any:
    return answers.forced_by(source if isinstance(source, str) else json.dumps(source), width, rows, "cpu")


def test_requests_toss_coins_of_their_own_for_the_profile_of_their_row() -> None:
    served = Served(forced([EASY, HARD], 4, 64), 4, range(64), [5] * 64)
    chances = served.propose(3).logprobs.exp()
    torch.testing.assert_close(chances[:2], torch.tensor([[0.9, 0.5], [0.5, 0.0]]), atol=1e-4, rtol=0)
    for width, means in ((4, (1 + 0.9 + 0.45 + 0.36, 1.5)), (3, (1 + 0.9 + 0.45, 1.5)), (1, (1, 1))):
        lengths = torch.tensor([served.step(width) for _ in range(60)]).float()
        assert width == 1 or lengths.std(dim=1).min() > 0.2, "all alike"
        for kind, mean in enumerate(means):
            assert lengths[:, kind::2].mean() == pytest.approx(mean, abs=0.03), (width, kind)
    chain = torch.zeros(8, 8, dtype=torch.int64)  # longer than blocks, as where copies go on behind them
    served = Served(forced([EASY], 4, 8), 8, range(8), [5] * 8)
    for committed in (served.accept(served.propose(4).tokens), served.accept(chain)):
        assert max(map(len, committed)) == 4 and set(itertools.chain(*committed)) == {answers.TOKEN_ID}
    served = Served(forced([1, 1, 0.5, 0], 5, 8), 5, [3, 1, 2], [5, 6, 7])
    ragged = Ragged(*(torch.tensor(rows, dtype=torch.int32) for rows in ([0, 2, 7, 10], [2, 5, 3])), 5)
    assert {tuple(served.step(ragged=ragged)) for _ in range(30)} == {(2, 3, 3), (2, 4, 3)}
    served.acceptor.set_max_commit(np.array([1]), np.array([2]))
    assert {tuple(served.step(ragged=ragged)) for _ in range(5)} == {(2, 2, 3)}


@pytest.mark.parametrize(
    ("length", "method", "mean"),
    [(2.4, "match-expected", 2.4), (9.0, "match-expected", 4.0), (2.5, "multinomial", 2.5)],
)
def test_sglangs_variable_forces_one_length_on_all_requests_of_a_step(
    monkeypatch: pytest.MonkeyPatch, length: float, method: str, mean: float
) -> None:
    monkeypatch.delenv(FORCED_ENV, raising=False)
    monkeypatch.setattr(answers, "SIMULATE_ACC_LEN", length)
    monkeypatch.setattr(answers, "SIMULATE_ACC_METHOD", method)
    served = Served(answers.from_environment(4, 4, "cpu"), 4, range(4), [5] * 4)
    lengths = [served.step() for _ in range(400)]
    assert all(len(set(of_step)) == 1 for of_step in lengths)
    assert float(np.mean(lengths)) == pytest.approx(mean, abs=0.12)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_has_the_length_of_sglangs_variable_and_answers_with_the_fixed_token() -> None:
    environment = {"SGLANG_SIMULATE_ACC_LEN": "3.5"}  # which SGLang reads when it is imported
    with serve(TARGET, DRAFT, environment=environment, fresh=True, skip_tokenizer_init=None) as server:
        sampling = dict(temperature=0, max_new_tokens=150, ignore_eos=True)
        answer = server.generate(input_ids=[5, 6, 7], sampling_params=sampling)
        assert "off (acceptance is forced, whatever is proposed)" in server.log_text()
    first, *others = answer["output_ids"]
    assert others == [answers.TOKEN_ID] * 149
    assert answer["meta_info"]["spec_verify_ct"] == pytest.approx(149 / 3.5, abs=4)


def of_texts(**changed: np.ndarray) -> dict[str, np.ndarray]:
    """Two texts of three tokens, blocks of five, two ranks."""
    logprobs = -np.arange(48, dtype=np.float16).reshape(6, 4, 2)
    prompts, tokens = np.array([0, 0, 0, 1, 1, 1], np.uint8), np.array([0, 10, 11, 1, 20, 0], np.int32)
    return dict(logprobs=logprobs, ranks=np.zeros((6, 4), np.uint8), prompts=prompts, tokens=tokens) | changed


# a list, or arrays of a file -> what is said of them
OTHERS: list[tuple[str | dict[str, np.ndarray], str]] = [
    ("[]", "DFLASH_SGLANG_FORCED=[]: expected a list of probabilities, 0 to 1"),
    ("[[0.5, 0, 0], 1]", "expected a list of prob"), ("[true, 0, 0]", "expected a list of prob"),
    ('{"record": 1}', "expected a list of prob"), ('{"texts": "a", "record": "a"}', "expected a list of prob"),
    ("[0.5", "expected JSON, found"),
    ("[[0.5, 0.5]]", "[[0.5, 0.5]]: expected at least 4 probabilities, one for each proposal of a block of 5"),
    ('{"record": "/nowhere.npz"}', "expected an .npz file of logprobs, ranks, prompts"),
    (dict(ranks=np.zeros(6, np.uint8)), "ranks of shape [starts, proposals], one start or more, found (6,)"),
    (dict(logprobs=np.zeros((6, 3, 2), np.float16)), "logprobs of shape [6, 4, 'K'], found (6, 3, 2)"),
    (dict(prompts=np.zeros(5, np.uint8)), "expected prompts of shape [6], found (5,)"),
    (dict(ranks=np.zeros((6, 4))), "ranks as unsigned integers, found float16 and float64. Write it with"),
    (dict(tokens=np.zeros(6)), "tokens as integers of shape (6,), found float64 of shape (6,). Write it with"),
    (dict(prompts=np.array([0] * 3 + [2] * 3, np.uint8)), "expected prompts 0, 1, ... in this order"),
    (dict(ranks=np.zeros((6, 3), np.uint8), logprobs=np.zeros((6, 3, 2), np.float16)), "at least 4 proposals"),
]  # fmt: skip


def test_what_cannot_be_forced_is_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "texts.npz"
    for source, expected in OTHERS:
        if not isinstance(source, str):
            np.savez(path, **of_texts(**source))
        with pytest.raises(PluginConfigError, match=re.escape(expected)):
            pytest.fail(f"{source}: {forced(source if isinstance(source, str) else {'texts': str(path)}, 5, 3)}")
    monkeypatch.setattr(answers, "SIMULATE_ACC_LEN", 2.0)
    monkeypatch.setattr(answers, "SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    with pytest.raises(PluginConfigError, match="'real-draft-token': expected 'fixed'"):
        answers.from_environment(4, 3, "cpu")
    monkeypatch.setenv(FORCED_ENV, "[1, 1, 1]")
    with pytest.raises(
        PluginConfigError, match="SGLANG_SIMULATE_ACC_LEN=2.0: expected unset beside DFLASH_SGLANG_"
    ):
        answers.from_environment(4, 3, "cpu")


# ---- Records ---------------------------------------------------------------------------------------------------


def of_pair(width: int) -> Served:
    return Served(forced(PAIR, 16, 65), width, range(1, 65), [100] * 64)


def mean(steps: int, step: Callable[[], Sequence[int]]) -> float:
    return float(np.mean([step() for _ in range(steps)]))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_requests_commit_at_every_width_what_the_pair_does(width: int) -> None:
    served, lens = of_pair(width), torch.full((64,), 100)
    accepted = AcceptanceRecord.load(PAIR_RECORD).accepted
    at = served.forced.places(served.rows, served.lens).numpy()
    for _ in range(100):
        expected = np.minimum(accepted[at], width - 1) + 1
        assert served.step() == expected.tolist()
        at = (at + expected) % len(accepted)
    assert (served.lens - lens).unique().numel() > 5
    places = served.propose().logprobs
    served.reqs[3] = SimpleNamespace(rid="new", origin_input_ids=[0])  # begins elsewhere
    other = (served.propose().logprobs != places).any(dim=1)
    assert other.nonzero().flatten().tolist() == [3]
    short = of_pair(width)
    of_one_text = round(FACTS["new_tokens"] / FACTS["in_a_circle"][str(width)])
    spread = float(np.std(np.mean([short.step() for _ in range(of_one_text)], axis=0), ddof=1))
    assert spread == pytest.approx(FACTS["by_prompt"][str(width)]["deviation_between_prompts"], rel=0.35)


def test_ragged_steps_commit_more_than_chains_of_as_many_rows() -> None:
    served = of_pair(16)

    def step() -> list[int]:
        lens, starts = (torch.empty(n, dtype=torch.int32) for n in (64, 65))
        share_rows(served.propose().logprobs, 8 * 64, lens, starts)
        return served.step(ragged=Ragged(starts, lens, 16))

    assert mean(200, step) > 1.02 * mean(200, of_pair(8).step)


def test_trees_commit_the_true_tokens_that_are_among_their_nodes() -> None:
    record, served, trees = AcceptanceRecord.load(PAIR_RECORD), of_pair(16), Trees(16, 64, 16, "cpu")
    tokens, tree = torch.empty((64, 16), dtype=torch.int64), trees.of(64)

    def step() -> list[int]:
        best = served.propose(trees=True).best
        assert best is not None and best.ids.is_contiguous() and best.logprobs.is_contiguous()
        grow_tree(torch.zeros(64, dtype=torch.int64), best, tokens, tree)
        committed = [len(ids) for ids in served.accept(tokens, paths=trees.paths(torch.arange(64 * 16)))]
        starts = served.forced.places(served.rows, served.lens).tolist()
        assert np.array_equal(best.logprobs.numpy(), record.logprobs[starts].astype(np.float32))
        expected = [longest_path(np.float32(record.logprobs[at]), record.ranks[at]) for at in starts]
        assert committed == expected
        served.lens = served.lens + torch.tensor(committed)
        return committed

    assert mean(100, step) > 1.2 * mean(100, of_pair(16).step)


def longest_path(logprobs: np.ndarray, ranks: np.ndarray) -> int:
    """Nodes, the root included, of the path along the true tokens in the reference's tree of 16 nodes."""
    tree = grow(logprobs, 16)
    node, length = 0, 1
    for following in range(1, 16):
        if tree.parents[following] == node and tree.ranks[following] == ranks[tree.depths[node]]:
            node, length = following, length + 1
    return length


def test_the_statistics_are_those_of_the_record() -> None:
    record = AcceptanceRecord.load(PAIR_RECORD)
    found = json.loads(json.dumps(statistics(record)))
    assert found == {name: FACTS[name] for name in found}


def test_a_record_has_the_beginnings_of_the_first_texts_that_are_long_enough() -> None:
    ranks, prompts = np.arange(9, dtype=np.uint8)[:, None], np.array([0, 0, 1, 1, 1, 2, 3, 3, 3], np.uint8)
    whole = AcceptanceRecord(-ranks[..., None].astype(np.float16), ranks, prompts)
    logprobs, taken = beginnings(whole, texts=2, tokens=3)
    assert taken.ravel().tolist() == [2, 3, 4, 6, 7, 8] and (-logprobs).ravel().tolist() == taken.ravel().tolist()
    with pytest.raises(ValueError, match="--texts 3: 2 have 3 tokens; lower --texts or --tokens"):
        beginnings(whole, texts=3, tokens=3)


# ---- Texts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., Served]:
    """Requests in rows 2 and 1, whose prompts begin with these tokens, at these lengths, of two texts."""
    # Of three proposals, so many come true after each token.
    accepted = [0, 1, 2, 3, 0, 2, 3, 1, 0, 3]
    ranks = np.array([[int(at >= n) for at in range(3)] for n in accepted], np.uint8)
    tokens = np.array([0, 10, 11, 12, 13, 14, 1, 20, 0, 22], np.int32)
    logprobs, prompts = -np.arange(30, dtype=np.float16).reshape(10, 3, 1), np.array([0] * 6 + [1] * 4, np.uint8)
    np.savez(tmp_path / "texts.npz", ranks=ranks, logprobs=logprobs, prompts=prompts, tokens=tokens)
    answering = forced({"texts": str(tmp_path / "texts.npz")}, 4, 4)

    def served(firsts: tuple[int, int], lens: list[int]) -> Served:
        one = Served(answering, 4, [2, 1], lens, firsts)
        for req, first in zip(one.reqs, firsts, strict=True):
            req.rid = f"{first} {id(one)}"
        return one

    return served


def test_a_step_proposes_the_text_as_far_as_the_draft_was_right_and_commits_one_token_more(texts: Any) -> None:
    """And what is wrong is no token of the text, and narrower blocks have less of it."""
    for firsts, lens, width, proposed, committed in (
        ((0, 3), [2, 0], 4, [[99, 12, 13, 13], [99, 20, 0, 22]], [[12, 13, 14], [20, 0, 22, 0]]),  # 3: the second
        ((1, 0), [1, 4], 3, [[99, 0, 21], [99, 13, 0]], [[0, 22], [14]]),
        ((1, 0), [1, 4], 1, [[99], [99]], [[0], [14]]),
        ((0, 1), [1, 1], 4, [[99, 11, 11, 12], [99, 0, 21, 1]], [[11, 12], [0, 22]]),
        ((1, 1), [1, 1], 4, [[99, 0, 21, 1]] * 2, [[0, 22]] * 2),  # a row follows the request that has it now
    ):
        served = texts(firsts, lens)
        proposals = served.propose(width)
        assert proposals.tokens.tolist() == proposed, (firsts, width)
        assert served.accept(proposals.tokens) == committed, (firsts, width)
    chances = texts((0, 3), [2, 0]).propose().logprobs
    assert chances.tolist() == [[-6.0, -7.0, -8.0], [-18.0, -19.0, -20.0]]
    served = texts((0, 0), [0, 1])
    tokens = served.propose().tokens
    tokens[:, 1:] = torch.tensor([[10, 11, 9], [11, 12, 13]])  # a copy may say more than the draft knew
    assert served.accept(tokens) == [[10, 11, 12], [11, 12, 13, 14]]
    served = texts((1, 0), [0, 3])
    ragged = Ragged(*(torch.tensor(rows, dtype=torch.int32) for rows in ([0, 2, 6], [2, 4])), 4)
    assert served.accept(served.propose().tokens, ragged) == [[20, 0], [13, 14, 1, 20]]
    assert not served.forced.trees
