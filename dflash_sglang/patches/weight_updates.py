"""Weight updates while serving go through this package's updaters (`models.loading.updates`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.models.loading.updates import CheckpointWeightUpdater, DraftWeightUpdater, TargetWeightUpdater
from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import DecodeCudaGraphRunner, ModelRunner


def install(
    target: ModelRunner,
    draft: ModelRunner,
    refresh_kv: Callable[[], None] | None,
    refresh_head: Callable[[], None] | None,
) -> None:
    """Puts this package's updaters before those of both runners.

    refresh_kv, refresh_head: take new weights over into copies: of the draft's projections, and, where there is
    one, of the head that proposes, the draft's own or the target's. Without refresh_kv the draft is a part of the
    target's checkpoint, and has no copies.
    """
    of_draft = [] if refresh_kv is None else [refresh_kv]
    of_target: list[Callable[[], None]] = []
    if refresh_head is not None:
        (of_draft if draft.model.has_own_head else of_target).append(refresh_head)

    def captured() -> bool:
        return isinstance(target.decode_cuda_graph_runner, DecodeCudaGraphRunner)

    replace("weight-updaters", target, TargetWeightUpdater(target.weight_updater, of_target, captured))
    of_part = CheckpointWeightUpdater(draft.weight_updater)
    own = of_part if refresh_kv is None else DraftWeightUpdater(draft.weight_updater, draft.model, of_draft)
    replace("weight-updaters", draft, own)


def select_runners(
    original: Callable[..., list[tuple[str, Any]]], manager: Any, *args: Any, **kwargs: Any
) -> list[tuple[str, Any]]:
    """AROUND SchedulerWeightUpdaterManager._select_runners, which knows whose weights a request updates: tells the
    draft's updater whether the target gets the request too."""
    selected = original(manager, *args, **kwargs)
    for role, runner in selected:
        if role == "draft":
            runner.weight_updater.with_target = len(selected) > 1
    return selected
