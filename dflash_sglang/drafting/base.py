"""What the step asks of a source of proposals, and DFlash of what reads proposals off its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.head.pack_shard import Candidates

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from dflash_sglang.drafting.block import Block


class ProposalSource(Protocol):
    """Proposes the tokens of a block that follow its first one.

    What a source keeps of the rows that the target has verified is its `ContextWriter`
    (`models.context_kv.base`). DFlash keeps keys and values.
    """

    def draft_rows(self, width: int) -> int:
        """Rows of one request in the draft's forward, for a block of `width` tokens. 0: no forward."""

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        """Propose for every request of the batch, with logprobs if blocks have proposals. They may be drawn for
        sampled requests without seeds."""

    def propose_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Take part in the collectives of `propose` on a rank without requests, whose neighbours draft blocks of
        `width`."""

    def examples(self, width: int) -> list[Proposals]:
        """One request's proposals of each kind that steps of this width get, to compile what reads them."""


class RowReader(Protocol):
    """Reads proposals off the draft's rows: the end of the draft's graph, and what follows it."""

    ranks_may_part: bool  # whether ranks that compute the same rows may read different proposals off them

    def write(self, rows: Tensor, tokens: Tensor) -> None:
        """Write the likeliest proposals of rows [bs, steps, hidden] to `tokens[:, 1:]`.

        tokens [bs, steps + 1] int64 begin with the last committed token. Capturable in a CUDA graph; collective
        over the head's group.
        """

    def write_nothing(self, rows: Tensor) -> None:
        """The collectives of `write` on no rows [0, hidden]."""

    def read(self, bs: int, steps: int, padded: int) -> tuple[Tensor, Candidates | None]:
        """What `write` kept last, of the first bs of so many requests: logprobs [bs, steps] float32 of the
        likeliest proposals, and candidates for trees or None."""

    def draw(self, tokens: Tensor, temperatures: Tensor, greedy: Tensor) -> Proposals:
        """Draw the blocks that `write` read last, over their likeliest proposals in tokens [bs, steps + 1].

        temperatures [bs]; greedy [bs] bool: requests that keep their likeliest proposals.
        """
