"""Copies: the search equals a plain one, and what is proposed and learned equals a plain account of texts."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import find_copy as kernels
from dflash_sglang.kernels.head.pack_shard import Candidates

BLOCK, ROWS, WIDTH = 8, 6, 96


class Case(NamedTuple):
    texts: list[list[int]]  # the last token of each is committed and has no slot yet
    tables: kernels.CopyTables
    rows: kernels.CopyRows


def new_case(
    texts: list[list[int]], device: str, page: int = 1, width: int = BLOCK, seed: int = 0, longest: int = BLOCK
) -> Case:
    """Texts whose pages lie anywhere; 900, 901, ... are the draft's proposals, which it does not trust."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(ROWS * WIDTH // page, generator=generator).view(ROWS, -1)
    table = (pages[..., None] * page + torch.arange(page)).view(ROWS, -1).int()
    tables = kernels.CopyTables.allocate(ROWS * WIDTH, table.to(device), longest)
    requests = torch.randperm(ROWS, generator=generator)[: len(texts)]
    tokens = 900 + torch.arange(len(texts) * width).view(-1, width)
    slots = torch.empty_like(tokens)
    for row, (request, text) in enumerate(zip(requests.tolist(), texts, strict=True)):
        prefix = len(text) - 1
        tables.history[table[request, :prefix].long()] = torch.tensor(text[:-1], dtype=torch.int32, device=device)
        tokens[row, 0], slots[row] = text[-1], table[request, prefix : prefix + width]
    lens = torch.tensor([len(text) - 1 for text in texts])
    logprobs = torch.full((len(texts), width - 1), -9.0)
    tokens, slots, lens, requests, logprobs = (of.to(device) for of in (tokens, slots, lens, requests, logprobs))
    return Case(texts, tables, kernels.CopyRows(tokens, slots, lens, requests, logprobs=logprobs))


def run(twin: str, name: str, rows: kernels.CopyRows, tables: kernels.CopyTables, on: int = 1) -> None:
    flag = torch.full((1,), on, dtype=torch.int32, device=rows.tokens.device)
    getattr(kernels, f"{name}_copies_{twin}")(rows, tables, flag)


def find(twin: str, case: Case) -> list[tuple[int, int]]:
    """(length, position after it) of each request's match."""
    run(twin, "find", case.rows, case.tables)
    keys = case.tables.matches[: len(case.texts)].tolist()
    return [(key >> 32, key & 0xFFFFFFFF) for key in keys]


def plain_match(text: list[int]) -> tuple[int, int]:
    best = (0, 0)
    for after in range(1, len(text)):
        length = 0
        while (
            length < min(after, kernels.LONGEST) and text[after - 1 - length] == text[len(text) - 1 - length] >= 0
        ):
            length += 1
        if length:
            best = max(best, (length, after))
    return best


def plain_copy(text: list[int], after: int, count: int) -> list[int]:
    """What a match foretells: the text after it, which goes on in what it foretells itself."""
    copy: list[int] = []
    for token in range(after, after + count):
        copy.append(text[token] if token < len(text) else copy[token - len(text)])
        if copy[-1] < 0:
            return copy[:-1]
    return copy


few = st.integers(-1, 2)
texts = st.lists(
    st.one_of(
        st.lists(few, max_size=70),
        st.tuples(st.lists(few, min_size=1, max_size=9), st.integers(2, 7)).map(lambda of: of[0] * of[1]),
        st.tuples(st.lists(few, min_size=8, max_size=24), st.lists(few, max_size=9)).map(
            lambda of: of[0] + of[1] + of[0]
        ),
    ).map(lambda text: [*text, 1]),
    min_size=1,
    max_size=ROWS,
)


@pytest.mark.parametrize("page", [1, 16, 32])
@settings(max_examples=20)
@given(texts=texts, seed=st.integers(0, 99))
def test_the_longest_match_is_found_and_of_equals_the_latest(twin, device, page, texts, seed):
    assert find(twin, new_case(texts, device, page, seed=seed)) == [plain_match(text) for text in texts]


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_a_match_in_a_later_chunk_of_pages_of_64_is_found(twin, device, monkeypatch, programs):
    monkeypatch.setattr(kernels, "_CHUNK", 16)
    monkeypatch.setattr(kernels, "_programs", lambda requests, chunks: programs)
    monkeypatch.setitem(globals(), "WIDTH", 128)
    phrase = [5, 6, 7, 8]
    long = [*range(100, 130), *phrase, *range(200, 215), *phrase, 1, *phrase]
    assert find(twin, new_case([long, [*phrase, 9], phrase * 20], device, 64)) == [(4, 53), (0, 0), (32, 76)]
    for length in (14, 15, 16, 30, 31, 32, 46, 47):  # the last place that is searched, around the end of a chunk
        assert find(twin, new_case([[*range(100, 100 + length), 7, 7]], device, 64)) == [(1, length + 1)]


def test_nothing_is_done_while_it_is_off(twin, device):
    case = step(twin, device, repeated(12), [0.0, 1e6])
    case.tables.matches.fill_(7)
    before = [tensor.clone() for tensor in (*case.tables, case.rows.tokens, case.rows.logprobs)]
    for name in ("find", "write"):
        run(twin, name, case.rows, case.tables, on=0)
    after = [*case.tables, case.rows.tokens, case.rows.logprobs]
    assert all(torch.equal(of, was) for of, was in zip(after, before, strict=True))


def test_tokens_of_other_requests_and_of_rows_that_were_rejected_are_not_found(twin, device):
    case = new_case([[1, 2, 3, 4], [9, 9, 3]], device)
    case.tables.history[case.rows.slots] = 3  # rejected by the step before
    case.rows.tokens[0, 0] = 9
    assert find(twin, case) == [(0, 0), (0, 0)]


@settings(max_examples=25)
@given(texts=texts, seed=st.integers(0, 99), width=st.sampled_from([1, 2, 5, BLOCK]))
def test_a_copy_is_the_text_after_its_match_and_goes_on_in_itself(twin, device, texts, seed, width):
    case = new_case(texts, device, width=width, seed=seed)
    case.tables.record[:, 1] = 1000.0  # copies never fail
    before, slots = case.rows.tokens.tolist(), case.rows.slots.tolist()
    matches = find(twin, case)
    run(twin, "write", case.rows, case.tables)
    for row, text in enumerate(texts):
        length, after = matches[row]
        length = length if length >= kernels.LEAST else 0
        copy = plain_copy(text, after, BLOCK - 1) if length else []
        used = copy[: width - 1]
        after_step = [text[-1], *used, *before[row][1 + len(used) :]]
        assert case.rows.tokens[row].tolist() == after_step
        assert case.tables.history[slots[row]].tolist() == after_step
        kind = 0 if width == 1 else kernels.COPIED if used else kernels.DRAFTED
        promised = pytest.approx(1, abs=0.01) if used else 0
        assert case.tables.promised[row].item() == promised
        copy += [-1] * (BLOCK - 1 - len(copy))
        kept = [kind, len(text) - 1, length, width - 1, *copy]
        assert case.tables.last[case.rows.requests[row]].tolist() == kept
    assert not case.tables.matches.any()


@pytest.mark.parametrize("longest", [BLOCK + 6, 4 * BLOCK])
@settings(max_examples=25)
@given(texts=texts.map(lambda of: [repeated(9), *(text[:60] + [1] for text in of[1:])]), seed=st.integers(0, 99))
def test_behind_a_block_go_the_next_tokens_of_its_copy_and_then_zeros(twin, device, longest, texts, seed):
    rows = longest - 3
    case = new_case(texts, device, seed=seed, longest=longest)
    case.tables.record[:, 1] = 1000.0
    matches = find(twin, case)
    run(twin, "write", case.rows, case.tables)
    blocks, counts = case.rows.tokens.tolist(), case.tables.counts.tolist()
    chains = getattr(kernels, f"extend_copies_{twin}")(case.rows, case.tables, rows)
    beyond = 0
    for row, (text, (length, after)) in enumerate(zip(texts, matches, strict=True)):
        request = case.rows.requests[row]
        foretold = plain_copy(text, after, longest - 1) if length >= kernels.LEAST else []
        copy = foretold[BLOCK - 1 : rows - 1]
        beyond += len(copy)
        chain = blocks[row] + copy + [0] * (rows - BLOCK - len(copy))
        assert chains.ids[row].tolist() == chain
        columns = range(len(text) - 1, len(text) - 1 + rows)
        assert chains.positions[row].tolist() == list(columns)
        assert chains.slots[row].tolist() == case.tables.req_to_token[request, list(columns)].tolist()
        assert case.tables.history[chains.slots[row]].tolist() == chain
        steps = rows - 1 if foretold else BLOCK - 1
        kept = [steps, *foretold, *[-1] * (longest - 1 - len(foretold))]
        assert case.tables.last[request, 3:].tolist() == kept
    assert beyond >= rows - BLOCK, "of the first text"
    assert case.tables.counts.tolist() == [*counts[:4], beyond]


def step(twin: str, device: str, text: list[int], record: list[float], drafted: list[float] | None = None) -> Case:
    """drafted: chances of the draft's proposals, each given those before it."""
    case = new_case([text], device)
    case.tables.record[:] = torch.tensor(record)
    if drafted is not None:
        case.rows.logprobs[:] = torch.tensor(drafted).log()
    find(twin, case)
    run(twin, "write", case.rows, case.tables)
    return case


def repeated(length: int) -> list[int]:
    """A text whose match has this length, and goes on with 70, 71, ..."""
    phrase = list(range(10, 10 + length))
    return [*phrase, *range(70, 90), 3, *phrase]


@pytest.mark.parametrize(
    "length, prior", [(4, 0.16), (5, 0.16), (6, 0.11), (11, 0.08), (12, 0.055), (31, 0.04), (32, 0.015)]
)
def test_a_copy_is_proposed_where_it_promises_more_than_the_drafts_own_probabilities(twin, device, length, prior):
    """Its first proposals are certain, one is as likely as it takes, and those behind it are wrong."""
    right = 1 - prior * (1.5 + kernels.FIRST_FAILED) / (2.0 + kernels.FIRST_EXPECTED)
    enough = sum(right**rows for rows in range(BLOCK)) / kernels.GAIN - 1  # tokens of the draft
    whole = int(enough)
    for more, proposed in ((-0.002, True), (0.002, False)):
        drafted = [1.0] * whole + [max(0.0, enough - whole + more)] + [0.0] * (BLOCK - 2 - whole)
        case = step(twin, device, repeated(length), [1.5, 2.0], drafted)
        assert (case.rows.tokens[0, 1].item() == 70) is proposed, (more, case.rows.tokens)


def test_what_was_proposed_is_counted_and_a_short_match_is_for_nothing_whatever_it_promises(twin, device):
    sure = [0.0, 1e6]
    assert step(twin, device, repeated(12), sure).tables.counts.tolist() == [1, BLOCK - 1, 0, 12, 0]
    assert step(twin, device, repeated(kernels.LEAST), sure).rows.tokens[0, 1] == 70
    case = step(twin, device, repeated(kernels.LEAST - 1), sure)
    assert case.rows.tokens[0, 1] == 901 and case.tables.counts.tolist() == [0] * 5
    _, _, length, _, *copy = case.tables.last[case.rows.requests[0]].tolist()
    assert (length, set(copy)) == (0, {-1})  # so that the record learns nothing of it


def test_copied_proposals_are_certain_and_others_stay(twin, device):
    text = repeated(8)
    text[8 + 3] = -1  # the copy has three tokens
    case = new_case([text, [1, 2, 3]], device)
    steps, count = BLOCK - 1, 4
    drawn, best = (
        Candidates(
            torch.arange(2 * steps * count, device=device).view(2, steps, count) + first,
            torch.full((2, steps, count), value, device=device),
        )
        for first, value in ((300, 0.25), (400, -2.0))
    )
    logprobs = torch.full((2, steps, count), -9.0, device=device)[..., 0]
    drawn.ids[0, 1, 2] = best.ids[0, 1, 3] = 71
    rows = case.rows._replace(drawn=drawn, best=best, logprobs=logprobs)
    case.tables.record[:, 1] = 1000.0
    find(twin, case)
    run(twin, "write", rows, case.tables)
    chance = 0.08 * kernels.FIRST_FAILED / (1000 + kernels.FIRST_EXPECTED)
    certain = math.log(1 - chance)
    assert rows.tokens.tolist()[0] == [17, 70, 71, 72, 904, 905, 906, 907]
    assert rows.tokens.tolist()[1] == [3, *range(909, 916)]
    assert rows.logprobs.tolist() == [pytest.approx([certain] * 3 + [-9.0] * 4, abs=1e-6), [-9.0] * 7]
    for of, first, (one, other, was) in ((drawn, 300, (1, 0, 0.25)), (best, 400, (certain, -math.inf, -2.0))):
        ids = torch.arange(2 * steps * count).view(2, steps, count) + first
        ids[0, 1, 2 if of is drawn else 3] = first + count  # candidates stay distinct
        ids[0, :3, 0] = torch.tensor([70, 71, 72])
        assert of.ids.tolist() == ids.tolist()
        assert of.logprobs[0].tolist() == [pytest.approx([one, *[other] * 3], abs=1e-6)] * 3 + [[was] * 4] * 4
        assert of.logprobs[1].tolist() == [[was] * 4] * 7


# (tokens that the step committed, the copy, proposals that were verified, tried, failed)
LEARNT: list[tuple[list[int], list[int], int, int, int]] = [
    ([70, 71, 5], [70, 71, 72, 73], BLOCK - 1, 3, 1),
    ([70, 71], [70, 71, 72], BLOCK - 1, 2, 0),
    ([70, 71, 5], [70, 71], BLOCK - 1, 2, 0),
    ([5], [70, 71], BLOCK - 1, 1, 1),
    ([70, 5, 72], [70, 71, 72], BLOCK - 1, 2, 1),
    ([5, 6], [], BLOCK - 1, 0, 0),
    ([70, 71, 72, 73, 74, 75, 76, 5], [70, 71, 72, 73, 74, 75, 76], BLOCK - 1, 7, 0),
    ([70, 71, 72], [70, 71, 72, 73], 2, 2, 0),  # though the last token agrees
]


@pytest.mark.parametrize("kind", [0, kernels.DRAFTED, kernels.COPIED])
def test_the_record_learns_how_far_a_copy_came_true_proposed_or_not(twin, device, kind):
    for committed, copy, verified, tried, failed in LEARNT:
        case = new_case([[1, 2, 3, *committed]], device)
        (request,) = case.rows.requests.tolist()
        padded = copy + [-1] * (BLOCK - 1 - len(copy))
        case.tables.last[request] = torch.tensor([kind, 2, 9, verified, *padded], device=device)
        case.tables.record[request] = torch.tensor([1.0, 2.0])
        find(twin, case)
        run(twin, "write", case.rows, case.tables)
        learns = kind and tried
        expected = [kernels.FADE * 1 + failed, kernels.FADE * 2 + 0.08 * tried] if learns else [1.0, 2.0]
        assert case.tables.record[request].tolist() == pytest.approx(expected), (committed, copy)
        assert case.tables.counts[2].item() == (tried - failed if kind == kernels.COPIED else 0)
