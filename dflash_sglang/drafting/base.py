"""What the step asks of a source of proposals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dflash_sglang.drafting.proposals import Proposals

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Changed:
    """A `ProposalSource` whose proposals `change` writes over in place, and returns."""

    def __init__(
        self, source: ProposalSource, change: Callable[[ScheduleBatch, Block, Proposals], Proposals]
    ) -> None:
        self._source, self._change = source, change
        self.draft_rows, self.propose_idle, self.examples = source.draft_rows, source.propose_idle, source.examples

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        return self._change(batch, block, self._source.propose(batch, block))
