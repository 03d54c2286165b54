"""RecentRows: what a window reads, whatever was verified and committed before."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.models.mtp.recent_rows import Prompt, RecentRows

LAYERS, ROWS, HIDDEN = 3, 4, 2
ROW = 2  # of req_to_token


def recent() -> RecentRows:
    return RecentRows(5, ROWS, LAYERS, HIDDEN, torch.float32, "cpu")


def features(positions: torch.Tensor, of: int = 0) -> torch.Tensor:
    """A hidden state that tells its position and whose it is."""
    return torch.stack([positions.float(), torch.full(positions.shape, float(of))], dim=-1)


def text(length: int) -> list[int]:
    return [100 + position for position in range(length)]


def prefill(
    rows: RecentRows,
    of: dict[int, list[int]],
    starts: list[int],
    ends: list[int],
    sampled: list[int],
    rid: str = "a",
) -> Prompt:
    """Of the tokens from `starts` to `ends` of prompts, by their row."""
    ran: list[Prompt] = []
    rows.bind(lambda batch, plan, positions, prompt: ran.append(prompt))
    spans = list(zip(of.values(), starts, ends, strict=True))
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid=f"{rid}{row}", full_untruncated_fill_ids=array("q", of[row])) for row in of],
        req_pool_indices=torch.tensor([*of]),
        req_pool_indices_cpu=torch.tensor([*of]),
        prefix_lens=starts,
        extend_lens=[end - start for start, end in zip(starts, ends, strict=True)],
        input_ids=torch.tensor([token for ids, start, end in spans for token in ids[start:end]]),
    )
    positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
    plan: Any = None
    rows.write_prefill(features(positions), positions, plan, batch, torch.tensor(sampled))
    (prompt,) = ran
    return prompt


def of_one(rows: RecentRows, ids: list[int], start: int, end: int, rid: str = "a") -> Prompt:
    """A request at ROW."""
    return prefill(rows, {ROW: ids}, [start], [end], [7], rid)


def test_layers_read_the_tokens_behind_theirs_across_the_ends_of_chunks() -> None:
    rows, ids = recent(), text(8)
    assert of_one(rows, ids, 0, 5).tokens.tolist() == [
        [101, 102, 103, 104, 105],
        [102, 103, 104, 105, 106],
        [103, 104, 105, 106, 107],
    ]
    assert of_one(rows, ids, 5, 8).tokens.tolist() == [[106, 107, 7], [107, 7, 7], [7, 7, 7]]


def test_proposals_that_are_not_kept_change_no_requests_tokens() -> None:
    rows, requests, places = recent(), torch.tensor([ROW]), torch.tensor([5])
    for proposing, token, found in ((1, 7, 7), (0, 8, 7)):
        rows.proposing.fill_(proposing)
        rows.set_proposed(requests, places, torch.tensor([token]))
        assert rows.tokens_of(requests, places[None]).tolist() == [found]


def test_requests_of_one_prefill_read_their_own_tokens() -> None:
    rows = recent()
    read = prefill(rows, {1: text(2), 3: [51, 52, 53, 54, 55]}, [0, 1], [2, 4], [8, 9], "a")
    assert read.tokens.tolist() == [[101, 8, 53, 54, 55], [8, 8, 54, 55, 9], [8, 8, 55, 9, 9]]
    assert rows.known_from[[1, 3]].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("start", "end", "first", "last"), [(0, 9, 5, 3), (0, 2, 0, 1), (6, 9, 6, 2), (8, 9, 8, 0)]
)
def test_a_window_starts_behind_a_prefix_that_the_cache_had(start: int, end: int, first: int, last: int) -> None:
    rows, requests = recent(), torch.tensor([ROW])
    of_one(rows, text(end), start, end)
    rows.set_tokens(requests, torch.tensor([end]), torch.tensor([7]))
    window = rows.window(requests, torch.tensor([end]))
    assert window.tolist() == [list(range(first, first + ROWS))]
    assert rows.last[[ROW]].tolist() == [last]
    committed = slice(0, last + 1)
    assert rows.tokens_of(requests, window + 1)[committed].tolist() == [*text(end)[first + 1 :], 7]
    assert rows.hidden_of(requests, window)[committed].tolist() == features(window[0, committed]).tolist()


def test_a_window_reaches_into_the_chunk_before_and_not_into_another_request() -> None:
    for rid, first in (("a", 5), ("b", 8)):  # at the same row, with a prefix that the cache had
        rows = recent()
        of_one(rows, text(9), 0, 8)
        of_one(rows, text(9), 8, 9, rid)
        assert rows.window(torch.tensor([ROW]), torch.tensor([9]))[:, 0].tolist() == [first]


def test_windows_read_what_was_committed_and_no_rejected_row() -> None:
    """The window behind which a step proposes, and the one before, after steps of all widths."""
    rows, requests = recent(), torch.tensor([ROW])
    of_one(rows, text(20), 0, 20)
    n, tokens = 20, text(20) + [7]  # the last token has no hidden state yet
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        rows.set_tokens(requests, torch.tensor([n]), torch.tensor([tokens[-1]]))
        for end in (n - ROWS, n):
            window = rows.window(requests, torch.tensor([end]))
            assert window[0].tolist() == list(range(end - ROWS, end))
            assert rows.hidden_of(requests, window).tolist() == features(window[0]).tolist()
            for ahead in range(1, LAYERS + 1):
                read = rows.tokens_of(requests, window + ahead).tolist()
                known = tokens[end - ROWS + ahead :][:ROWS]
                assert read[: len(known)] == known and len(known) == min(ROWS, n + 1 - end + ROWS - ahead)
        width = int(torch.randint(1, LAYERS + 2, (), generator=generator))
        proposed = torch.randint(200, 900, (width - 1,), generator=generator)
        for i, token in enumerate(proposed):
            rows.set_tokens(requests, torch.tensor([n + 1 + i]), token[None])
        accepted = step % width
        positions = torch.arange(n, n + width)
        verified = features(positions)
        verified[accepted + 1 :] = -1  # of rejected rows
        rows.write(verified, positions, positions, requests)
        tokens += proposed[:accepted].tolist() + [1000 + step]
        n += accepted + 1
