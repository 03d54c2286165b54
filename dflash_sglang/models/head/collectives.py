"""What ranks exchange in a step, and how IDLE ranks keep step with those that have requests.

Groups: the tensor-parallel group (TP); with data-parallel attention it is made of attention-TP groups (ATP), one
per data-parallel rank, each with a batch of its own. SGLang lets all data-parallel ranks prefill, or all decode; a
rank without requests then gets an IDLE batch, and its sizes are those of the rank with most (`global_num_tokens`).

    step      what               group   with requests                      IDLE
    prefill   target             TP      its layers, head                   the same, on no tokens
              first tokens       ATP     broadcast (tp_sync)                nothing: all of ATP are IDLE
              context KV         -       nothing: column-parallel
                or MTP layers    ATP     embedding, attention, MLP          nothing: all of ATP are IDLE
    decode    draft's layers     ATP     embedding, attention, MLP          nothing: all of ATP are IDLE
                of MTP           ATP     if drawn, a broadcast of noise;    nothing: all of ATP are IDLE
                                         the same, a head after each layer
              draft's head       ATP     one gather of packed tokens        nothing: all of ATP are IDLE
                or, sharded
                over all ranks   TP      rows of all ranks (`RowGather`),   the same, on no rows
                                         one gather of packed tokens
              Domino's walk      ATP     embedding, once a proposal         nothing: all of ATP are IDLE
              target             TP      its layers, head                   the same, on no tokens
              accepted tokens    ATP     broadcast (tp_sync)                nothing: all of ATP are IDLE
    widths    loads              TP      gather, answered a step later      the same, of no requests
              decision           TP      rank 0's broadcast                 the same

The last two are exchanged by the processors (gloo), where a decode step chooses its width, before anything else of
it. Loads are exchanged only where ranks have requests of their own (data-parallel attention).

`DFlashWorker` issues them in this order: `_decode` and `_idle` side by side. Nothing that spans several
data-parallel ranks depends on what a rank's batch holds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class RowGather:
    """Gathers the draft's rows of all data-parallel ranks before a head that is sharded over all of them.

    Attention-TP ranks have the same rows, and each sends them.
    """

    def __init__(self, group: Any, same_batch: int) -> None:
        """group: the head's; same_batch: ranks with one data-parallel rank's batch, neighbours in the group."""
        self._group = group
        self._same_batch = same_batch
        self._most = 0

    def expect(self, most: int) -> None:
        """most: rows of the data-parallel rank that has most of them in this step, the same on all ranks."""
        self._most = most

    def gather(self, rows: Tensor) -> Tensor:
        """rows [at most `most`, hidden] of this rank -> [data-parallel ranks * most, hidden]. Collective."""
        padded = nn.functional.pad(rows, (0, 0, 0, self._most - len(rows)))
        everyone = rows.new_empty(self._group.world_size * self._most, rows.shape[1])
        self._group.all_gather_into_tensor(everyone, padded)
        return everyone.view(-1, self._same_batch, self._most, rows.shape[1])[:, 0].flatten(0, 1)

    def own(self, results: Tensor, count: int) -> Tensor:
        """results [data-parallel ranks * most, ...] -> those of this rank's `count` rows."""
        first = self._group.rank_in_group // self._same_batch * self._most
        return results[first : first + count]
