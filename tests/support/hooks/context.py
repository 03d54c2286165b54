"""What the draft keeps of the target's rows."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import torch

from dflash_sglang.sglang_names.scheduler import get_parallel
from tests.support.hooks.pools import kv_buffers, kv_pools, table_of
from tests.support.scheduler_hooks import PLANTED, note, records
from tests.support.seam import around


def features() -> None:
    """Every write of context KV leaves its positions and features in a file (`scheduler_hooks.features_at`), and
    the first one what the draft borrows of the target (`borrowed`).

    Of writes as they are called; a captured one is read from the forward whose graph has made it.
    """
    directory = records()
    count = itertools.count()

    def save(features: torch.Tensor, positions: torch.Tensor) -> None:
        torch.save((positions.cpu(), features.float().cpu()), directory / f"{next(count)}.features")

    def saved(write: Any, self: Any, features: torch.Tensor, positions: torch.Tensor, *of: Any) -> None:
        if not (directory / "borrowed").exists():
            model = self._model
            ids = torch.tensor([model.spec.mask_token_id, 7], device=features.device)
            with torch.no_grad():
                embeddings = model.forward_embed(ids)
                tensors = (ids, embeddings, model.head.logits(embeddings))
            torch.save(tuple(tensor.cpu() for tensor in tensors), directory / "borrowed")
        save(features, positions)
        write(self, features, positions, *of)

    def then_save(forward: Any, self: Any, batch: Any, block: Any, of: Any) -> Any:
        result = forward(self, batch, block, of)
        if result.can_run_cuda_graph and self._tail.writes_context:
            save(result.logits_output.hidden_states[: len(of.rows.positions)], of.rows.positions)
        return result

    around("context of a prefill", saved)
    around("context of a step", saved)
    around("target", then_save)


def context() -> None:
    """The draft's KV pool begins as NaN. Of requests whose rid begins with "context", its K and V rows of the
    prompt, as a prefill leaves them or as they arrive, go to a file (`scheduler_hooks.context_of`)."""

    def then_void(alloc: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        alloc(self, *args, **kwargs)
        for buffer in kv_buffers(self.model_runner.token_to_kv_pool):
            buffer[self._reservation.page_size :] = float("nan")

    def save(self: Any, batch: Any) -> None:
        for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            if req.rid.startswith("context"):
                slots = table_of(self)[row, : len(req.origin_input_ids)].long()
                rows = [buffer[slots] for buffer in kv_buffers(self.model_runner.token_to_kv_pool)]
                torch.save(torch.stack(rows), records() / f"{req.rid}.context")

    def extend_then_save(extend: Any, self: Any, batch: Any, *args: Any) -> Any:
        result = extend(self, batch, *args)
        save(self, batch)
        return result

    def save_then_arrive(arrive: Any, self: Any, batch: Any, *args: Any) -> Any:
        save(self, batch)
        return arrive(self, batch, *args)

    around("pools", then_void)
    around("prefill", extend_then_save)
    around("arrival", save_then_arrive)


def digests() -> None:
    """Hashes of the prompts of requests whose rid begins with "row" or PLANTED go to files of each rank: per token
    and head, one of the target's K and V, and one of the draft's (`scheduler_hooks.strays`). They are taken as
    forwards leave the rows on a prefill server, when the last are sent, and as they arrive. Ranks share the heads
    of a pool in their order.

    A token may have two: where requests that begin alike are prefilled at once, one takes over the other's rows.
    What arrives of a PLANTED request's last token is hashed with another bit.
    """
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as schedulers

    send, workers, arrived = schedulers._send_kv_chunk, list[Any](), set[str]()

    def digests_of(worker: Any, row: int, length: int, planted: bool) -> dict[str, str]:
        """{"pool position head": hash}"""
        found, slots = dict[str, str](), table_of(worker)[row, :length].long()
        for number, pool in enumerate(kv_pools(worker)):
            layers = [buffer[slots].contiguous().view(torch.uint8) for buffer in kv_buffers(pool)]
            rows = torch.cat(layers, dim=2).cpu().numpy()  # [length, heads, bytes]
            rows[-1, -1, -1] ^= planted
            first = get_parallel().tp_rank * rows.shape[1]
            for position, head in np.ndindex(*rows.shape[:2]):
                place = f"{number} {position} {first + head}"
                found[place] = hashlib.blake2b(rows[position, head].tobytes(), digest_size=8).hexdigest()
        return found

    def tell(worker: Any, file: str, req: Any, row: int, length: int, plants: bool = False) -> None:
        if req.rid.startswith(("row", PLANTED)):
            planted = plants and req.rid.startswith(PLANTED)
            note(f"{file}.{get_parallel().tp_rank}.jsonl", [req.rid, digests_of(worker, row, length, planted)])

    def extend_then_tell(extend: Any, self: Any, batch: Any, *args: Any) -> Any:
        result = extend(self, batch, *args)
        workers[:] = [self]
        parts = zip(
            batch.reqs, batch.req_pool_indices_cpu.tolist(), batch.prefix_lens, batch.extend_lens, strict=True
        )
        for req, row, prefix, extended in parts:
            tell(self, "prefilled", req, row, prefix + extended)
        return result

    def tell_then_send(self: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        if last_chunk:
            tell(workers[0], "prefilled", req, req.kv.req_pool_idx, len(req.origin_input_ids))
        send(self, req, last_chunk=last_chunk, end_idx=end_idx)

    def tell_then_arrive(arrive: Any, self: Any, batch: Any, *args: Any) -> Any:
        for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            if req.rid not in arrived:  # one that was retracted comes again
                arrived.add(req.rid)
                tell(self, "arrived", req, row, len(req.origin_input_ids), plants=True)
        return arrive(self, batch, *args)

    around("prefill server's prefill", extend_then_tell)
    around("arrival", tell_then_arrive)
    schedulers._send_kv_chunk = tell_then_send
