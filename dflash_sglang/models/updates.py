"""Weight updates while serving: of the draft, and of what it copied of the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dflash_sglang.compat import DecodeCudaGraphRunner
from dflash_sglang.models.checkpoint_form import CheckpointForm
from dflash_sglang.models.weights import listed

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
    of_target: list[Callable[[], None]] = []
    if refresh_head is not None:
        (of_draft if draft.model.has_own_head else of_target).append(refresh_head)

    def captured() -> bool:
        return isinstance(target.decode_cuda_graph_runner, DecodeCudaGraphRunner)

    target.weight_updater = TargetWeightUpdater(target.weight_updater, of_target, captured)
    draft.weight_updater = DraftWeightUpdater(draft.weight_updater, draft.model, of_draft)


class TargetWeightUpdater:
    """SGLang's weight updater of the target's runner; copies of its weights are refreshed, its graphs are kept.

    Weights are loaded into the memory that the graphs of all widths have captured. Capturing once more would
    replace what the attention backend of one width has prepared for its graphs, and leave the old ones in use.
    """

    def __init__(self, updater: Any, refresh: Iterable[Callable[[], None]], captured: Callable[[], bool]):
        """refresh: each takes the target's weights over into a copy; captured: whether graphs read the weights."""
        self._updater, self._refresh, self._captured = updater, tuple(refresh), captured
        self._in_session = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str,
        weight_name_filter: Callable[[str], bool] | None = None,
        recapture_cuda_graph: bool = False,
    ) -> tuple[bool, str]:
        """(success, message). Captures nothing; weights that have moved then fail a `recapture_cuda_graph`."""
        in_place = recapture_cuda_graph and self._captured()
        before = _addresses(self._updater.get_model()) if in_place else {}
        success, message = self._updater.update_weights_from_disk(model_path, load_format, weight_name_filter)
        self._refresh_copies()
        if not success or not in_place:
            return success, message
        after = _addresses(self._updater.get_model())
        moved = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if moved:
            return False, (
                f"recapture_cuda_graph=True: expected weights to be loaded in place, but {listed(moved)} moved. "
                "Captured graphs read the old ones, and those of several widths cannot be captured anew. Start "
                f"the server again, with {model_path!r}."
            )
        logger.info("recapture_cuda_graph: graphs are kept, the weights were loaded into the memory they read.")
        return success, message

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        result: tuple[bool, str] = self._updater.update_weights_from_ipc(*args, **kwargs)
        self._refresh_copies()
        return result

    def begin_weight_update(self) -> None:
        self._updater.begin_weight_update()
        self._in_session = True

    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        return self._loaded(self._updater.update_weights_from_tensor(*args, **kwargs))

    def load_weights_from_distributed(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        return self._loaded(self._updater.load_weights_from_distributed(*args, **kwargs))

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self._updater.end_weight_update(run_post_load=run_post_load)
        self._in_session = False
        self._refresh_copies()

    def _loaded(self, result: tuple[bool, str]) -> tuple[bool, str]:
        """Copies follow when the session ends; at once where it was begun for the draft alone."""
        if not self._in_session:
            self._refresh_copies()
        return result

    def _refresh_copies(self) -> None:
        for refresh in self._refresh:
            refresh()


def _addresses(model: nn.Module) -> dict[str, int]:
    """Of parameters and buffers, by name."""
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


class DraftWeightUpdater:
    """SGLang's weight updater of the draft's runner, for tensors only.

    An update from disk or by IPC names one checkpoint, which SGLang hands to target and draft alike: it is the
    target's. A quantised draft takes whole modules in its checkpoint's layout; they are processed as at start-up
    and end up in the memory that the graphs know. Copies, as context KV's, have the new weights when the update
    ends. An update that is refused leaves the draft as it was.
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
        return _draft_is_kept(f"from {model_path}")

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """(success, message), as the updater that it replaces."""
        del recv_req
        return _draft_is_kept("by IPC")

    def begin_weight_update(self) -> None:
        self._form = CheckpointForm(self._model)

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        """(success, message): tensors that do not fit, or a part of a quantised module, are refused."""
        if self._form is None:
            return False, (
                "weight update of the draft without its begin_weight_update: expected a session whose selector "
                "is 'draft' or 'all'. Call end_weight_update, then begin_weight_update with selector='draft'; for "
                "tensors of the target send the update with selector='target'."
            )
        if load_format not in (None, "flattened_bucket") and self._form.quantised:
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

    def load_weights_from_distributed(self, named_tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
        """(success, message): as tensors that came in the request."""
        return self.update_weights_from_tensor(named_tensors=named_tensors)

    def end_weight_update(self, *, run_post_load: bool) -> None:
        if self._form is None:
            raise RuntimeError("end_weight_update without begin_weight_update")
        if run_post_load:
            self._model.post_load_weights()
        self._form.close()
        self._form = None
        for refresh in self._refresh:
            refresh()


def _draft_is_kept(how: str) -> tuple[bool, str]:
    logger.info("The target's weights are updated %s; the draft keeps its own.", how)
    return True, "Succeeded to update the target's weights; the draft keeps its own."
