"""Weight updates while serving: of the draft, and of what it copied of the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dflash_sglang.models.loading.checkpoint_form import quantised_layers
from dflash_sglang.models.loading.weights import listed, of_others, unexpected_in_update
from dflash_sglang.requests.errors import shown
from dflash_sglang.startup.facts import LoadError

if TYPE_CHECKING:
    from dflash_sglang.models.draft import DFlashDraftModel

logger = logging.getLogger(__name__)


class _Updater:
    """SGLang's updater but for what a subclass does otherwise."""

    def __init__(self, updater: Any, refresh: Iterable[Callable[[], None]] = ()) -> None:
        """refresh: each takes the present weights over into a copy."""
        self._updater, self._refresh = updater, tuple(refresh)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    def _refresh_copies(self) -> None:
        for refresh in self._refresh:
            refresh()


class TargetWeightUpdater(_Updater):
    """SGLang's weight updater of the target's runner; copies of its weights are refreshed, its graphs are kept.

    Weights are loaded into the memory that the graphs of all widths have captured. Capturing once more would
    replace what the attention backend of one width has prepared for its graphs, and leave the old ones in use.
    """

    def __init__(self, updater: Any, refresh: Iterable[Callable[[], None]], captured: Callable[[], bool]):
        """refresh: each takes the target's weights over into a copy; captured: whether graphs read the weights."""
        super().__init__(updater, refresh)
        self._captured, self._in_session = captured, False

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
                f"the server again, with {shown(model_path)}."
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


def _addresses(model: nn.Module) -> dict[str, int]:
    """Of parameters and buffers, by name."""
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


class DraftWeightUpdater(_Updater):
    """SGLang's weight updater of the draft's runner, for tensors only.

    An update from disk or by IPC names one checkpoint, which SGLang hands to target and draft alike: it is the
    target's, and so are tensors handed to both of which none has a name of the draft's. A quantised draft takes
    whole modules in its checkpoint's layout; they are processed as at start-up and end up in the memory that the
    graphs know. Each request is complete by itself: steps between those of a session run on whole weights, and
    copies, as context KV's, have the new ones. A request that is refused leaves the draft as it was.
    """

    def __init__(self, updater: Any, model: DFlashDraftModel, refresh: Iterable[Callable[[], None]]):
        """refresh: each takes the model's weights over into a copy."""
        super().__init__(updater, refresh)
        self._model = model
        self.with_target = False  # whether the target gets the request too, see `patches.weight_updates`

    def update_weights_from_disk(self, model_path: str, *_: Any, **__: Any) -> tuple[bool, str]:
        """(success, message), as the updater that it replaces, and the next."""
        return _draft_is_kept(f"from {model_path}")

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return _draft_is_kept("by IPC")

    def begin_weight_update(self) -> None:
        """Nothing: the layout of a checkpoint is there while a request is loaded, and no longer."""

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        """(success, message): tensors that do not fit, or a part of a quantised module, are refused."""
        if self.with_target:
            names = _names(named_tensors, load_format)
            foreign = of_others(self._model, names)
            if len(foreign) == len(names):
                return _draft_is_kept("by tensors")
            if foreign:
                return False, unexpected_in_update(foreign)
        if load_format not in (None, "flattened_bucket") and quantised_layers(self._model):
            return False, (
                f"load_format={shown(load_format)}: expected None or 'flattened_bucket', because the draft is "
                "quantised and its weights are packed after loading. Send its checkpoint's tensors."
            )
        try:
            success, message = self._updater.update_weights_from_tensor(
                named_tensors=named_tensors, load_format=load_format
            )
        except ValueError as error:
            return False, str(error)
        self._refresh_copies()
        return success, message

    def load_weights_from_distributed(self, named_tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
        """(success, message): as tensors that came in the request."""
        return self.update_weights_from_tensor(named_tensors=named_tensors)

    def end_weight_update(self, *, run_post_load: bool) -> None:
        if run_post_load:  # nothing was sent: weights may have been written past SGLang
            self._model.post_load_weights()
            self._refresh_copies()


class CheckpointWeightUpdater(_Updater):
    """SGLang's weight updater of a draft's runner, where the draft is a part of the target's checkpoint.

    The draft follows every update of the target: its model takes its own tensors, and leaves the target's.
    """

    with_target = False  # as of `DraftWeightUpdater`

    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """(success, message): tensors that do not fit are refused."""
        try:
            result: tuple[bool, str] = self._updater.update_weights_from_tensor(*args, **kwargs)
        except LoadError as error:
            return False, str(error)
        return result


def _names(named_tensors: Any, load_format: str | None) -> list[str]:
    if load_format == "flattened_bucket":
        return [part.name for part in named_tensors["metadata"]]
    return [name for name, _ in named_tensors]


def _draft_is_kept(how: str) -> tuple[bool, str]:
    logger.info("The target's weights are updated %s; the draft keeps its own.", how)
    return True, "Succeeded to update the target's weights; the draft keeps its own."
