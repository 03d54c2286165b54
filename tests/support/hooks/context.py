"""What the draft keeps of the target's rows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.prefill_worker import PrefillWorker
from dflash_sglang.verify.verifier import Verifier
from dflash_sglang.worker import DFlashWorker
from tests.support.hooks.pools import kv_buffers, kv_pools, table_of
from tests.support.scheduler_hooks import PLANTED, note, records


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


def digests() -> None:
    """Of requests whose rid begins with "row" or PLANTED, hashes of the prompt's K and V rows go to files, one of
    the target's and one of the draft's: as a prefill leaves them, and as they arrive (`digests_of`).

    What arrives of a PLANTED request is hashed with another bit.
    """
    extend, arrive, arrived = PrefillWorker._extend, DFlashWorker._arrive, set[str]()

    def digest(worker: Any, pool: Any, row: int, length: int, planted: bool) -> str:
        slots = table_of(worker)[row, :length].long()
        rows = [buffer[slots].contiguous().view(torch.uint8).flatten() for buffer in kv_buffers(pool)]
        found = torch.cat(rows).cpu()
        found[-1] ^= planted
        return hashlib.sha256(found.numpy().tobytes()).hexdigest()

    def tell(worker: Any, file: str, req: Any, row: int, plants: bool) -> None:
        if req.rid.startswith(("row", PLANTED)):
            planted = plants and req.rid.startswith(PLANTED)
            of = [digest(worker, pool, row, len(req.origin_input_ids), planted) for pool in kv_pools(worker)]
            note(file, [req.rid, *of])

    def extend_then_tell(self: Any, batch: Any, *args: Any) -> Any:
        result = extend(self, batch, *args)
        parts = zip(
            batch.reqs, batch.req_pool_indices_cpu.tolist(), batch.prefix_lens, batch.extend_lens, strict=True
        )
        for req, row, prefix, extended in parts:
            if prefix + extended == len(req.origin_input_ids):  # the last chunk
                tell(self, "prefilled.jsonl", req, row, plants=False)
        return result

    def tell_then_arrive(self: Any, batch: Any, *args: Any) -> Any:
        for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            if req.rid not in arrived:  # one that was retracted comes again
                arrived.add(req.rid)
                tell(self, "arrived.jsonl", req, row, plants=True)
        return arrive(self, batch, *args)

    PrefillWorker._extend, DFlashWorker._arrive = extend_then_tell, tell_then_arrive
