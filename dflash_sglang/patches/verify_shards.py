"""A verify leaves each rank its shard of the logits: ranks exchange best tokens, 8 bytes a row, and no rows."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from dflash_sglang.patches.apply import replace


def keep_shards(processor: Any) -> bool:
    """Replace `_get_logits` of a target's logits processor. Call it before the target's graphs are captured.

    Returns whether verify forwards give shards from here on. Nothing changes for a head that a rank has as a
    whole, for one that data-parallel ranks share, and for SGLang's all-to-all.
    """
    others = processor.do_tensor_parallel_all_gather_dp_attn or processor.use_tp_lm_head_all_to_all
    if others or not processor.do_tensor_parallel_all_gather:
        return False
    whole, of_rank = processor._get_logits, copy.copy(processor)
    of_rank.do_tensor_parallel_all_gather = False

    def _get_logits(hidden_states: Tensor, lm_head: Any, metadata: Any, *args: Any, **kwargs: Any) -> Tensor:
        get = of_rank._get_logits if metadata.forward_mode.is_target_verify() else whole
        return get(hidden_states, lm_head, metadata, *args, **kwargs)

    replace("verify-logits", processor, _get_logits)
    return True
