"""Rings of a server that lives for a while: whatever was finished, freed and given to others, a block reads the
rows of its own request's tokens, and of no others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.drafting.rings import DraftRings
from dflash_sglang.kernels.context.rings import RingShape

BLOCK, WINDOW, ROWS, WIDTH, SLOTS = 8, 24, 5, 600, 6000
GARBAGE = -9  # of rows that were not committed


class Pool:
    """A draft pool whose rows are numbers."""

    def __init__(self, slots: int) -> None:
        self.rows = torch.full((slots,), -1)

    def move_kv_cache(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        self.rows[targets] = self.rows[sources]


class Request:
    def __init__(self, row: int, tokens: list[int], slots: list[int]) -> None:
        """tokens: of the text, with numbers of their own; slots: of the prefix that is cached."""
        self.row, self.tokens, self.slots, self.known = row, tokens, slots, len(slots)
        self.hit = len(slots)


class Server:
    """Requests as SGLang runs them: slots of the target are shared by prefixes, freed, and taken again."""

    def __init__(self, page: int, rings: int, seed: int = 0) -> None:
        self.random, self.page = random.Random(seed), page
        self.shape = RingShape.fitting(WINDOW, page, BLOCK)
        self.pool = Pool(page + rings * self.shape.size)
        self.table, self.own = (torch.zeros((ROWS, WIDTH), dtype=torch.int32) for _ in range(2))
        self.rings = DraftRings(self.shape, rings, BLOCK, SLOTS, self.pool, self.table, self.own)
        self.free, self.token = list(range(page, SLOTS)), 0
        self.running: dict[int, Request] = {}
        self.cached: list[Request] = []

    def new_tokens(self, count: int) -> list[int]:
        self.token += count
        return list(range(self.token - count, self.token))

    def reserve(self, request: Request, length: int) -> None:
        while len(request.slots) < length:
            request.slots.append(self.free.pop(0))
        self.table[request.row, :length] = torch.tensor(request.slots[:length])

    def prefill(self, row: int, prefix: Request | None, hit: int, more: int, chunk: int = 1000) -> Request:
        tokens, slots = ([], []) if prefix is None else (prefix.tokens[:hit], prefix.slots[:hit])
        request = self.running[row] = Request(row, tokens + self.new_tokens(more), slots)
        while request.known < len(request.tokens):
            self.chunk(request, min(chunk, len(request.tokens) - request.known))
        return request

    def chunk(self, request: Request, tokens: int) -> None:
        begin, end = request.known, request.known + tokens
        self.reserve(request, end)
        batch: Any = SimpleNamespace(
            reqs=[request],
            req_pool_indices_cpu=torch.tensor([request.row]),
            req_pool_indices=torch.tensor([request.row]),
            prefix_lens=[begin],
            extend_lens=[tokens],
        )
        self.rings.admit(batch)
        positions, slots = torch.arange(begin, end), torch.tensor(request.slots[begin:end])
        kept, positions, slots = self.rings.assign_prefill(batch, positions, slots)
        assert kept is None or kept.tolist() == list(range(tokens - self.shape.size, tokens))
        self.pool.rows[slots] = torch.tensor(request.tokens)[positions]
        request.known = end

    def step(self) -> dict[int, int]:
        """Draft and verify a block of every running request; the tokens that each block saw, by row."""
        requests = list(self.running.values())
        rows = torch.tensor([request.row for request in requests])
        prefixes = torch.tensor([request.known for request in requests])
        for request in requests:
            self.reserve(request, request.known + BLOCK)
        slots = self.table[rows[:, None], prefixes[:, None] + torch.arange(BLOCK)].long()
        drafted = self.rings.assign_block(rows, prefixes, slots)
        block: Any = SimpleNamespace(batch_size=len(rows), size=BLOCK, requests=rows, requests_cpu=rows)
        block.prefix_lens, block.kv_len_bounds, block.exact = prefixes, prefixes + BLOCK, True
        seen = self.rings.cut(block)
        assert seen.kv_len_bounds.tolist() == (seen.prefix_lens + BLOCK).tolist()
        block.exact = False
        assert (self.rings.cut(block).kv_len_bounds >= seen.prefix_lens + BLOCK).all()
        for i, request in enumerate(requests):
            length = int(seen.prefix_lens[i])
            read = self.pool.rows[self.own[request.row, :length].long()].tolist()
            assert read == request.tokens[request.known - length : request.known]
            assert length >= min(request.known - request.hit, WINDOW), "its own tokens are in its ring"
            assert self.own[request.row, length : length + BLOCK].tolist() == drafted[i].tolist()
        self.pool.rows[drafted] = GARBAGE
        assert torch.equal(self.rings.named(slots), drafted) and self.rings.named(torch.tensor(0)) == 0
        for i, request in enumerate(requests):
            accepted = self.random.randint(1, BLOCK)
            self.pool.rows[drafted[i, :accepted]] = torch.arange(self.token, self.token + accepted)
            request.tokens += self.new_tokens(accepted)
            request.known += accepted
        return {request.row: int(length) for request, length in zip(requests, seen.prefix_lens, strict=True)}

    def finish(self, row: int) -> Request:
        """Its committed tokens stay in the prefix cache; the slots of others are free."""
        request = self.running.pop(row)
        self.free += request.slots[request.known :]
        del request.slots[request.known :]
        self.cached.append(request)
        return request

    def evict(self) -> None:
        gone = self.cached.pop(self.random.randrange(len(self.cached)))
        used = {slot for other in (*self.cached, *self.running.values()) for slot in other.slots}
        self.free = [slot for slot in gone.slots if slot not in used] + self.free  # taken again at once


@pytest.mark.parametrize("page", [1, 16])
def test_blocks_read_their_own_tokens_whatever_happened_before(page):
    server = Server(page, rings=ROWS + 3)
    saw_less = 0
    for _ in range(400):
        row = server.random.randrange(1, ROWS)
        if row in server.running:
            server.finish(row)
        if len(server.cached) > 6:
            server.evict()
        prefix = server.random.choice(server.cached) if server.cached and server.random.random() < 0.8 else None
        hit = 0 if prefix is None else server.random.randrange(0, min(prefix.known, 300) + 1, page)
        server.prefill(row, prefix, hit, server.random.randint(1, 150), server.random.choice((7, 50, 1000)))
        for _ in range(server.random.randrange(3)):
            known = [request.known for request in server.running.values()]
            seen = server.step().values()
            saw_less += sum(of < min(all_of, WINDOW) for of, all_of in zip(seen, known, strict=True))
    assert 10 < saw_less, "every prefix was found: the rings are too many for this test"


@pytest.mark.parametrize("page", [1, 16])
def test_the_next_turn_sees_a_whole_window_until_as_many_others_as_there_are_tails_have_come(page):
    tails = 3
    server = Server(page, rings=ROWS - 1 + tails)
    for others in range(6):
        server.prefill(1, None, 0, 100)
        for _ in range(5):
            server.step()
        first = server.finish(1)
        for _ in range(others):
            server.prefill(1, None, 0, 30)
            server.finish(1)
        server.prefill(1, first, first.known // page * page, page)
        seen = server.step()[1]
        assert (seen >= WINDOW) == (others <= tails), others
        while server.running[1].known < first.known // page * page + WINDOW:
            server.step()
        assert server.step()[1] >= WINDOW  # as a fresh request
        server.finish(1)


def test_a_retracted_request_finds_what_it_left_in_another_row():
    server = Server(1, rings=ROWS + 3)
    request = server.prefill(1, None, 0, 100)
    server.step()
    del server.running[1]
    request.known -= 5  # these are computed again, at other slots
    server.free += request.slots[request.known :]
    del request.slots[request.known :]
    server.prefill(1, None, 0, 30)
    del server.running[1]
    request.row, server.running[2] = 2, request
    server.chunk(request, len(request.tokens) - request.known)
    assert server.step() == {2: WINDOW}


def test_tokens_that_a_long_chunk_left_out_are_in_no_ring():
    server = Server(1, rings=ROWS + 3)
    server.prefill(1, None, 0, 40)
    server.finish(1)
    server.evict()
    again = server.prefill(2, None, 0, 200)  # in one chunk, its first tokens at the slots of the other's
    assert again.slots[:40] == list(range(1, 41))
    server.prefill(3, again, 40, 5)
    assert server.step()[3] == 5


def test_a_prefill_keeps_the_last_tokens_of_each_of_its_requests():
    server = Server(1, rings=ROWS + 3)
    lens, size = [200, 10, 150], server.shape.size
    rows = torch.tensor([1, 2, 3])
    batch: Any = SimpleNamespace(
        reqs=[Request(row, [], []) for row in (1, 2, 3)],
        req_pool_indices_cpu=rows,
        req_pool_indices=rows,
        prefix_lens=[0, 0, 0],
        extend_lens=lens,
    )
    slots, positions = torch.arange(1, 1 + sum(lens)), torch.cat([torch.arange(n) for n in lens])
    server.rings.admit(batch)
    kept, positions, own = server.rings.assign_prefill(batch, positions, slots)
    assert kept is not None
    assert kept.tolist() == [*range(200 - size, 200), *range(200, 210), *range(360 - size, 360)]
    assert positions.tolist() == [*range(200 - size, 200), *range(10), *range(150 - size, 150)]
    assert server.rings.named(slots[kept]).tolist() == own.tolist() and len(set(own.tolist())) == len(kept)


def test_fewer_rings_than_rows_are_an_error():
    with pytest.raises(ValueError, match=r"rings=4: expected at least 5, the rows of req_to_token\."):
        Server(1, rings=4)
