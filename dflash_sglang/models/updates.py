"""Weight updates while serving: of the draft, and of what it copied of the target."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dflash_sglang.models.checkpoint_form import CheckpointForm

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.models.draft import DFlashDraftModel

logger = logging.getLogger(__name__)


def install(
    target: ModelRunner,
    draft: ModelRunner,
    refresh_kv: Callable[[], None],
    refresh_head: Callable[[], None] | None,
) -> None:
    """Puts the updaters of this module before those of both runners.

    refresh_kv, refresh_head: take new weights over into copies, of the draft's projections, and of the head that
    it proposes by, its own or the target's.
    """
    of_draft = [refresh_kv]
    if refresh_head is not None:
        if draft.model.has_own_head:
            of_draft.append(refresh_head)
        else:
            target.weight_updater = TargetWeightUpdater(target.weight_updater, refresh_head)
    draft.weight_updater = DraftWeightUpdater(draft.weight_updater, draft.model, of_draft)


class TargetWeightUpdater:
    """SGLang's weight updater of the target's runner; a copy of the target's weights is refreshed after each."""

    def __init__(self, updater: Any, refresh: Callable[[], None]):
        self._updater, self._refresh = updater, refresh

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._updater, name)
        if not name.startswith("update_weights_from_"):
            return method

        @functools.wraps(method)
        def update(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._refresh()
            return result

        return update


class DraftWeightUpdater:
    """SGLang's weight updater of the draft's runner, for tensors only.

    An update from disk names one checkpoint, which SGLang hands to target and draft alike: it is the target's.
    A quantised draft takes whole modules in its checkpoint's layout; they are processed as at start-up and end
    up in the memory that the graphs know. Copies, as context KV's, have the new weights when the update ends.
    """

    def __init__(self, updater: Any, model: DFlashDraftModel, refresh: Iterable[Callable[[], None]]):
        """refresh: each takes the model's weights over into a copy."""
        self._updater, self._model, self._refresh = updater, model, tuple(refresh)
        self._form: CheckpointForm | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """(success, message), as the updater that it replaces."""
        del args, kwargs
        logger.info("The target's weights are updated from %s; the draft keeps its own.", model_path)
        return True, "Succeeded to update the target's weights; the draft keeps its own."

    def begin_weight_update(self) -> None:
        self._form = CheckpointForm(self._model)

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        """(success, message): tensors that do not fit, or a part of a quantised module, are refused."""
        if load_format not in (None, "flattened_bucket") and self._form is not None and self._form.quantised:
            return False, (
                f"load_format={load_format!r}: expected None or 'flattened_bucket', because the draft is "
                "quantised and its weights are packed after loading. Send its checkpoint's tensors."
            )
        try:
            success, message = self._updater.update_weights_from_tensor(
                named_tensors=named_tensors, load_format=load_format
            )
        except ValueError as error:
            return False, str(error)
        return success, message

    def end_weight_update(self, *, run_post_load: bool) -> None:
        if self._form is None:
            raise RuntimeError("end_weight_update without begin_weight_update")
        if run_post_load:
            self._model.post_load_weights()
        self._form.close()
        self._form = None
        for refresh in self._refresh:
            refresh()
