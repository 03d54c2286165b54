"""What the draft keeps of the target's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.worker import DFlashWorker
from tests.support.hooks.pools import kv_buffers, table_of
from tests.support.scheduler_hooks import records


def features() -> None:
    """Every write of context KV leaves its positions and features in a file (`scheduler_hooks.features_at`), and
    the first one what the draft borrows of the target (`borrowed`).

    Of writes as they are called; a captured one is read from the forward whose graph has made it.
    """
    directory = records()
    forward = Verifier._forward
    count = itertools.count()

    def save(features: torch.Tensor, positions: torch.Tensor) -> None:
        torch.save((positions.cpu(), features.float().cpu()), directory / f"{next(count)}.features")

    def saving(write: Callable[..., None]) -> Callable[..., None]:
        def saved(self: Any, features: torch.Tensor, positions: torch.Tensor, *of: Any) -> None:
            if not (directory / "borrowed").exists():
                model = self._model
                ids = torch.tensor([model.spec.mask_token_id, 7], device=features.device)
                with torch.no_grad():
                    embeddings = model.forward_embed(ids)
                    tensors = (ids, embeddings, model.head.logits(embeddings))
                torch.save(tuple(tensor.cpu() for tensor in tensors), directory / "borrowed")
            save(features, positions)
            write(self, features, positions, *of)

        return saved

    def then_save(self: Any, batch: Any, block: Any, of: Any) -> Any:
        result = forward(self, batch, block, of)
        if result.can_run_cuda_graph and self._tail.writes_context:
            save(result.logits_output.hidden_states[: len(of.rows.positions)], of.rows.positions)
        return result

    ContextKV.write_prefill = saving(ContextKV.write_prefill)
    ContextKV.write_planned = saving(ContextKV.write_planned)
    Verifier._forward = then_save


def context() -> None:
    """The draft's KV pool begins as NaN. Of requests whose rid begins with "context", its K and V rows of the
    prompt, as a prefill leaves them or as they arrive, go to a file (`scheduler_hooks.context_of`)."""
    alloc, extend, arrive = DFlashWorker.alloc_memory_pool, DFlashWorker._extend, DFlashWorker._arrive

    def then_void(self: Any, *args: Any, **kwargs: Any) -> None:
        alloc(self, *args, **kwargs)
        for buffer in kv_buffers(self.model_runner.token_to_kv_pool):
            buffer[self._reservation.page_size :] = float("nan")

    def save(self: Any, batch: Any) -> None:
        for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            if req.rid.startswith("context"):
                slots = table_of(self)[row, : len(req.origin_input_ids)].long()
                rows = [buffer[slots] for buffer in kv_buffers(self.model_runner.token_to_kv_pool)]
                torch.save(torch.stack(rows), records() / f"{req.rid}.context")

    def extend_then_save(self: Any, batch: Any, *args: Any) -> Any:
        result = extend(self, batch, *args)
        save(self, batch)
        return result

    def save_then_arrive(self: Any, batch: Any, *args: Any) -> Any:
        save(self, batch)
        return arrive(self, batch, *args)

    DFlashWorker.alloc_memory_pool = then_void
    DFlashWorker._extend, DFlashWorker._arrive = extend_then_save, save_then_arrive
