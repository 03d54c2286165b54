"""Weight updates of the draft while serving."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class DraftWeightUpdater:
    """SGLang's weight updater of the draft's runner, for tensors only.

    An update from disk names one checkpoint, which SGLang hands to target and draft alike: it is the target's.
    """

    def __init__(self, updater: Any):
        self._updater = updater

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """(success, message), as the updater that it replaces."""
        del args, kwargs
        logger.info("The target's weights are updated from %s; the draft keeps its own.", model_path)
        return True, "Succeeded to update the target's weights; the draft keeps its own."
