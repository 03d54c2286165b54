"""Where instruments act in the package: the methods of its classes that tests watch or steer, in one table.

Instruments run in a scheduler of a server under test, and name a point, not a class: a class that is rebuilt
changes this table, and no test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from dflash_sglang.width import policy

POINTS = {
    # Start-up, in its order.
    "pools": "worker:DFlashWorker.alloc_memory_pool",
    "graphs": "worker:DFlashWorker.init_cuda_graphs",
    "warm-up": "worker:DFlashWorker.prewarm_sampling",
    "rehearsed prefill": "worker:DFlashWorker._rehearsed_prefill",
    # What a worker is asked: any batch, and by its kind.
    "batch": "worker:DFlashWorker.forward_batch_generation",
    "prefill": "worker:DFlashWorker._extend",
    "arrival": "worker:DFlashWorker._arrive",
    "prefill server's prefill": "prefill_worker:PrefillWorker._extend",
    "decode": "worker:DFlashWorker._decode",
    "whole prefill": "worker:DFlashWorker._prefill",
    "next step": "drafting.draft_input:DFlashDraftInput.prepare_for_decode",
    "reservation": "drafting.draft_input:SlotReservation.reserve",
    # What a decode step decides ...
    "kinds": "width.decider:Decider._allowed",
    "options": "width.decider:Decider._best",
    "kind": "width.decider:Chooser.choose",
    "step times": "width.step_times:StepTimes._filled",
    "chains pay": "width.requests:Chains.pay",
    "shape": "width.policy:WidthPolicy.choose",
    # ... and does, when its shape is known.
    "step": "worker:DFlashWorker._step",
    "window": "drafting.window:DraftWindow.cut",
    "rings": "drafting.rings:DraftRings.cut",
    "proposals": "drafting.proposer:Proposer.propose",
    "logprobs": "drafting.row_reader:RowReader.read",
    "copies": "drafting.copies:Copies.propose",
    "chain": "drafting.copies:Copies.extend",
    "tree": "verify.tree:TreeVerify.choose",
    "verify": "verify.verifier:Verifier.verify",
    "target": "verify.verifier:Verifier._forward",
    "paths": "verify.tree:TreeVerify.move_paths",
    "recurrent states": "verify.recurrent:RecurrentStates.commit",
    "context": "models.context_kv.projection:ContextKV.write",
    "context of a prefill": "models.context_kv.projection:ContextKV.write_prefill",
    "context of a step": "models.context_kv.projection:ContextKV.write_planned",
    # Multi-token prediction.
    "mtp rows of a prefill": "models.mtp.recent_rows:RecentRows.write_prefill",
    "mtp": "drafting.mtp.source:MtpSource.__init__",
    "mtp proposals": "drafting.mtp.source:MtpSource.propose",
    "mtp choice": "drafting.mtp.source:MtpSource._choose",
    "mtp layer": "drafting.mtp.source:MtpSource._forward",
}


def decide_every_step() -> None:
    """From now on a decision is for one step."""
    policy.HOLD = policy.HOLD_COPIES = 1


def wrap(point: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on `wrapper(call)` stands for the method of the point, `call`."""
    where, _, name = POINTS[point].rpartition(".")
    owner = resolve_name(f"dflash_sglang.{where}")
    setattr(owner, name, wrapper(getattr(owner, name)))


def around(point: str, act: Callable[..., Any]) -> None:
    """From now on `act(call, self, ...)` stands for a call of the point, and `call` is what stood there before."""

    def acting_around(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
            return act(call, self, *args, **kwargs)

        return acting

    wrap(point, acting_around)
