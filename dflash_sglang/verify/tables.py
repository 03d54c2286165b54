"""What verification keeps of requests on the device, for as many as can run.

The worker takes it before SGLang sizes the KV pools. Serving takes no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.sglang_names.scheduler import get_disagg, get_parallel, get_schedule
from dflash_sglang.verify.acceptance import Acceptor, Answers
from dflash_sglang.verify.adjustments import Adjustments
from dflash_sglang.verify.rejection import RejectionSampler


class Tables(NamedTuple):
    """Taken with `taken`; `acceptor.slots.fit` once req_to_token exists."""

    acceptor: Acceptor
    adjustments: Adjustments
    sampler: RejectionSampler

    @classmethod
    def taken(cls, slots: StepSlots, adjustments: Adjustments, answers: Answers | None = None) -> Tables:
        """For as many requests, and blocks as wide, as the slots are for; the adjustments are for the same."""
        rows, block_size, device = slots.max_requests, slots.block_size, slots.device
        return cls(
            Acceptor(slots, answers),
            adjustments,
            RejectionSampler(rows, block_size, adjustments.vocab_size, device),
        )

    @property
    def requests(self) -> int:
        return len(self.acceptor.slots.relay.new_seq_lens) - 1

    @property
    def nbytes(self) -> int:
        """Of the device, all together."""
        storages = {storage.data_ptr(): storage.nbytes() for storage in _storages(self)}
        return sum(storages.values())


def _storages(thing: object) -> Iterator[torch.UntypedStorage]:
    """Of the tensors that objects of this package hold."""
    if isinstance(thing, torch.Tensor):
        yield thing.untyped_storage()
    elif isinstance(thing, tuple | list):
        for item in thing:
            yield from _storages(item)
    elif type(thing).__module__.startswith(__package__.partition(".")[0]):
        yield from _storages(list(vars(thing).values()))


def most_rows() -> int:
    """Rows that this rank's req_to_token will have at most: one for padding, its part of --max-running-requests,
    and those of requests that a decode server receives. SGLang makes fewer where the KV pool has room for fewer
    requests."""
    receiving = get_disagg().disaggregation_decode_extra_slots or 0
    return max(1, get_schedule().max_running_requests // get_parallel().attn_dp_size) + receiving + 1
