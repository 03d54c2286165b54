"""Rings of draft slots against a plain record of who wrote what: where tokens go, what a request takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_sglang.kernels.context import rings as kernels

ROWS, RINGS, WIDTH = 5, 8, 400


def tables(device: str, shape: kernels.RingShape) -> kernels.RingTables:
    generator = torch.Generator().manual_seed(1)
    ring_of_row = torch.randperm(RINGS, generator=generator)[:ROWS]
    return kernels.RingTables(
        shape,
        ring_of_row.to(device),
        torch.zeros(ROWS, dtype=torch.int64, device=device),
        torch.full((RINGS, shape.size), -1, device=device),
        torch.zeros(ROWS * WIDTH + 1, dtype=torch.int64, device=device),
        torch.zeros(RINGS, dtype=torch.int64, device=device),
    )


def draft_slot(shape: kernels.RingShape, ring: int, position: int) -> int:
    return shape.page_size + ring * shape.size + position % shape.size


def run(name: str, twin: str, *arguments: Any) -> None:
    getattr(kernels, f"{name}_{twin}")(*arguments)


@pytest.mark.parametrize(("window", "page"), [(32, 1), (32, 16), (40, 64)])
def test_a_ring_holds_a_window_after_a_block_and_a_tree_past_the_end(window, page):
    shape = kernels.RingShape.fitting(window, page, block=8, nodes=20)
    for end in range(300, 300 + page):
        hit = end // page * page  # of the request that follows
        first = (hit - window) // page * page
        last = end + 8 + 20 - 1
        assert last - first < shape.size <= window + 28 + 3 * page and shape.size % page == 0


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tokens", [1, 8, 50])
def test_every_token_has_its_slot_and_only_tokens_of_requests_are_noted(twin, device, page, tokens):
    shape = kernels.RingShape.fitting(32, page, 8, 60)
    state, rows, firsts = tables(device, shape), [3, 0, 4], [7, 0, 333]
    slots = (1 + torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(2)))[: 3 * tokens]
    slots = slots.view(3, tokens)
    slots[1, 0] = 0  # of nobody
    out = torch.zeros((3, tokens), dtype=torch.int64, device=device)
    on_device = [torch.tensor(values, device=device) for values in (rows, firsts)]
    run("assign_slots", twin, *on_device, slots.to(device), 5, state, out)
    latest = torch.zeros_like(state.latest, device="cpu")
    for i, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        ring = int(state.ring_of_row[row])
        for j, position in enumerate(range(first, first + tokens)):
            slot = draft_slot(shape, ring, position)
            assert out[i, j] == slot
            assert state.tags[ring, position % shape.size] == 5 << 32 | slot
            latest[slots[i, j]] = 5 << 32 | slot
    latest[0] = 0
    assert torch.equal(state.latest.cpu(), latest)
    assert (state.tags != -1).sum() == 3 * tokens


class Rows:
    """Requests that write whole prefixes to their rings, and one that takes over."""

    def __init__(self, twin: str, device: str, page: int) -> None:
        self.twin, self.device, self.shape = twin, device, kernels.RingShape.fitting(32, page, 8)
        self.state, self.step = tables(device, self.shape), 0
        self.table = torch.zeros((ROWS, WIDTH), dtype=torch.int32, device=device)

    def write(self, row: int, first: int, slots: torch.Tensor) -> None:
        self.table[row, first : first + len(slots)] = slots.int()
        for start in range(0, len(slots), self.shape.size):
            self.step += 1
            part = slots[start : start + self.shape.size].view(1, -1).to(self.device)
            of = [torch.tensor([value], device=self.device) for value in (row, first + start)]
            run("assign_slots", self.twin, *of, part, self.step, self.state, torch.empty_like(part))

    def take_over(self, row: int, hit: int) -> tuple[int, list[tuple[int, int]]]:
        """(low, copies that are none of slot 0)"""
        moves = kernels.Moves(*(torch.full((self.shape.context,), -1, device=self.device) for _ in range(2)))
        run("take_over", self.twin, row, hit, self.table, self.state, moves)
        pairs = list(zip(moves.targets.tolist(), moves.sources.tolist(), strict=True))
        return int(self.state.low[row]), [pair for pair in pairs if pair != (0, 0)]

    def copies(self, source: int, target: int, first: int, last: int) -> list[tuple[int, int]]:
        """Of positions from `last` - 1 down to `first`."""
        rings = self.state.ring_of_row.tolist()
        return [
            (draft_slot(self.shape, rings[target], p), draft_slot(self.shape, rings[source], p))
            for p in range(last - 1, first - 1, -1)
        ]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("hit", [1, 20, 100, 200])
def test_a_hit_is_copied_from_the_ring_that_has_the_most_of_it(twin, device, page, hit):
    """Row 1 has 200 tokens in its ring, as far as they fit; rows 2 and 3 have the same prefix."""
    rows = Rows(twin, device, page)
    slots = 1 + torch.arange(WIDTH)
    rows.write(1, 0, slots[:200])
    kept = 200 - rows.shape.size  # the first position that row 1's ring still has
    rows.table[2, :hit] = rows.table[3, :hit] = rows.table[1, :hit]
    before = rows.state.tags.clone()
    low, copies = rows.take_over(3, hit)
    first = max(hit - rows.shape.context, kept, 0)
    if hit <= kept:  # nothing is left of it
        assert (low, copies) == (hit, []) and torch.equal(rows.state.tags, before)
        return
    begin = min(-(-first // page) * page, hit)  # of a page
    assert (low, copies) == (begin, rows.copies(1, 3, first, hit))
    # What was copied is found in the copy, and its own ring needs no copy.
    rows.state.tags[int(rows.state.ring_of_row[1])] = -1
    assert rows.take_over(3, hit) == (begin, [])
    assert rows.take_over(2, hit) == (begin, rows.copies(3, 2, first, hit))


def test_a_slot_that_another_token_has_taken_since_is_not_found(twin, device):
    rows = Rows(twin, device, 1)
    slots = 1 + torch.arange(WIDTH)
    rows.write(1, 0, slots[:50])
    rows.write(2, 30, slots[30:40])  # freed meanwhile, and given to the same places of another text
    rows.table[3, :50] = slots[:50]
    assert rows.take_over(3, 50) == (40, rows.copies(1, 3, 40, 50))
    assert rows.take_over(3, 40) == (30, rows.copies(2, 3, 30, 40))
