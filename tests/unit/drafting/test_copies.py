"""What a prefill leaves for copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from dflash_sglang.drafting.copies import Copies
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.find_copy import FADE, chance_of_failure, worth_copying


def copies() -> Copies:
    allocator = SimpleNamespace(size_full=12, page_size=4)
    table = SimpleNamespace(req_to_token=torch.zeros((3, 8), dtype=torch.int32))
    target: Any = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=table,
        model_config=SimpleNamespace(vocab_size=100),
    )
    return Copies(target, 4)


def prefill(
    ids: list[int],
    slots: list[int],
    rows: list[int],
    decoding: int = 0,
    idle: bool = False,
    asked: tuple[Any, ...] = (None, None, None),
) -> Any:
    """asked: in the custom_params of each request."""
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params=of), to_finish=None)
        for _, of in zip(rows, asked, strict=False)
    ]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: idle),
        input_ids=torch.tensor(ids),
        out_cache_loc=torch.tensor(slots),
        req_pool_indices=torch.tensor(rows),
        reqs=requests,
        decoding_reqs=requests[len(rows) - decoding :] if decoding else None,
    )


def test_slots_hold_the_tokens_of_a_prefill_and_placeholders_match_nothing() -> None:
    kept = copies()
    kept.prefill(prefill([5, 99, 100, 1 << 40, -3, 0], [15, 2, 7, 1, 3, 9], [1]))
    assert kept.history.tolist() == [-1, -1, 99, -1, -1, -1, -1, -1, -1, 0, -1, -1, -1, -1, -1, 5]


def test_requests_that_another_server_has_prefilled_bring_their_tokens_and_begin_a_record() -> None:
    kept = copies()
    kept._tables.record.fill_(3.0)
    kept._tables.req_to_token[2, :3] = torch.tensor([7, 4, 9])
    kept._tables.req_to_token[1, :2] = torch.tensor([1, 2])
    arrived = prefill([], [], [2, 1])
    arrived.seq_lens_cpu, arrived.req_pool_indices_cpu = torch.tensor([3, 2]), arrived.req_pool_indices
    for req, prompt, output in zip(arrived.reqs, ([5, 100], [8, 6]), ([11, 12], [13]), strict=True):
        req.origin_input_ids, req.output_ids = prompt, output  # the first one was retracted after a step
    kept.arrive(arrived)
    assert kept.history.tolist() == [-1, 8, 6, -1, -1, -1, -1, 5, -1, 11, *[-1] * 6]
    assert kept._tables.record[:, 0].tolist() == [3.0, 0.0, 0.0]


def test_the_memory_is_that_of_a_token_a_slot_and_of_a_record_a_request() -> None:
    rows, block = 3, 4
    matches, record, last = rows * 8, rows * 2 * 4, rows * (4 + block - 1) * 8
    assert copies().nbytes == 16 * 4 + matches + record + last + 33 * 4 + 5 * 8 + rows * 4


def test_records_begin_with_a_prefill_and_go_on_for_requests_that_decode_beside_it_or_elsewhere() -> None:
    kept = copies()
    kept._tables.record.fill_(3.0)
    kept._tables.last.fill_(2)
    kept.prefill(prefill([7], [3], [1], idle=True))  # a rank without requests
    assert (kept.history == -1).all()
    kept.prefill(prefill([5, 6], [1, 2], [2, 1], decoding=1))
    assert kept._tables.record[:, 0].tolist() == [3.0, 3.0, 0.0]
    assert kept._tables.last[:, 0].tolist() == [2, 0, 0]  # what the step before the prefill proposed is not judged


def test_a_request_that_forbids_copies_gets_none_however_well_they_do_and_the_next_one_in_its_row_does() -> None:
    kept, forbids = copies(), {"dflash": {"copy": False}}

    def copied() -> list[bool]:
        right = 1 - chance_of_failure(kept._tables.record[1:], kept._tables.chances[[32, 32]])
        return worth_copying(right, torch.full((2, 15), -9.0)).tolist()

    kept.prefill(prefill([5, 6], [1, 2], [2, 1], asked=(forbids, {"dflash": {"max_width": 3}})))
    assert copied() == [True, False]
    kept._tables.record[:] = kept._tables.record * FADE + 1.0  # a step
    assert copied() == [True, False]
    refused = prefill([5], [1], [2], asked=({"dflash": 3},))
    refused.reqs[0].to_finish = "refused"
    kept.prefill(refused)
    assert copied() == [True, True]


def test_the_last_place_of_a_text_is_searched() -> None:
    """The only one behind which a token stands four times."""
    kept = copies()
    kept._tables.req_to_token[1] = torch.arange(1, 9)
    kept.history[1:6] = torch.tensor([3, 7, 7, 7, 7], dtype=torch.int32)
    kept._tables.record[:, 1] = 1000.0  # copies never fail
    block: Any = SimpleNamespace(
        size=3,
        batch_size=1,
        slots=torch.tensor([[6, 7, 8]]),
        prefix_lens=torch.tensor([5]),
        requests=torch.tensor([1]),
        kv_len_bounds=torch.tensor([8]),
    )
    proposals = Proposals.certain(torch.tensor([[7, 50, 51]]), logprobs=torch.full((1, 2), -9.0))
    assert kept.propose(cast(Any, None), block, proposals).tokens.tolist() == [[7, 7, 7]]
