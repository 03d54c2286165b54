"""The last nodes of the target's verify graph: context KV of every verified row, and what greedy blocks commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.models.context_kv.base import ContextWriter
from dflash_sglang.sglang_names.scheduler import ForwardBatch, IdSpaceKind, ModelRunner
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.target_logits import TargetLogits
from dflash_sglang.verify.tree import Trees


class VerifyTail:
    """Installed before the target's graphs are captured; a forward that runs eagerly runs without it.

    Every replay accepts its blocks as greedy ones. For a batch whose logits are adjusted or sampled from, the
    outcome is overwritten by what is accepted after the graph.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        logits: TargetLogits,
        acceptor: Acceptor,
        context: ContextWriter,
    ) -> None:
        """acceptor: accepts every replay; context: writes every replay's rows, where draft and target name slots
        alike."""
        self._logits, self._acceptor, self._context = logits, acceptor, context
        # A graph has the slots as the target's pool names them.
        self.writes_context = names_slots_alike(target, draft)
        self._trees: Trees | None = None
        target.capture_tail_hooks.append(self._capture)

    @contextmanager
    def of_trees(self, trees: Trees) -> Iterator[None]:
        """What is captured meanwhile verifies these trees."""
        self._trees = trees
        try:
            yield
        finally:
            self._trees = None

    def _capture(self, runner: Any, out: Any, forward_batch: ForwardBatch, num_tokens: int) -> None:
        """SGLang's capture hook. Padding rows belong to request 0 and slot 0, which are nobody's."""
        del runner
        layout = forward_batch.spec_info.ragged_verify_layout  # its tensors are renewed before each replay
        if self.writes_context:
            self._context.write(
                out.hidden_states[:num_tokens],
                forward_batch.positions,
                forward_batch.out_cache_loc[:num_tokens],
                forward_batch.req_pool_indices,
            )
        ids, target_ids = forward_batch.input_ids, self._logits.best(out.next_token_logits[:num_tokens])
        ragged = None
        if layout is None:
            ids, target_ids = (of.view(forward_batch.batch_size, -1) for of in (ids, target_ids))
        else:
            ragged = Ragged(layout.qo_indptr_device, layout.verify_lens, self._acceptor.block_size)
        slots = forward_batch.out_cache_loc[:num_tokens]
        paths = None if self._trees is None else self._trees.paths(slots)
        requests = forward_batch.req_pool_indices
        self._acceptor.accept(ids, target_ids, forward_batch.seq_lens, requests, ragged, paths)


def names_slots_alike(target: ModelRunner, draft: ModelRunner) -> bool:
    """Whether both write keys and values to the slots that req_to_token names."""
    return all(runner.kv_index_translator.space(IdSpaceKind.FULL).write is None for runner in (target, draft))
