"""Data-parallel attention over gloo: what SGLang's gather and scatter of the ranks' rows do on a GPU.

Ranks pad their rows to agreed lengths, copy them into a buffer of all ranks' rows, and reduce or gather that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def keep_counts_unpinned() -> None:
    """Makes a batch's token counts ordinary memory: SGLang pins them, which takes a GPU, unless it runs its own
    CPU engine. It then asks the attention for `get_cpu_graph_seq_len_fill_value`."""
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True


def reduce_scatter_over_gloo(original: Callable[..., None], group: Any, output: Tensor, input: Tensor) -> None:
    """Stands in for the custom operator behind `reduce_scatter_tensor`, which has no CPU kernel."""
    group._reduce_scatter_tensor(output, input)


def all_to_all_over_gloo(original: Callable[..., None], group: Any, output: Tensor, input: Tensor) -> None:
    """The same for `all_to_all_single`, by which a decode server's ranks get their rows of the logits."""
    group._all_to_all_single(output, input)


def mask_dp_pad_moe_topk_ids(topk_ids: Tensor) -> None:
    """topk_ids [ranks * longest, k], written: -1 in the rows that pad a rank's tokens to the longest rank's."""
    from sglang.srt.layers.dp_attention import _DpGatheredBufferWrapper as buffer

    counts, longest = buffer.get_dp_global_num_tokens_gpu(), buffer.get_local_dp_buffer_len()
    if counts is None or not 0 < len(topk_ids) == len(counts) * longest:
        return
    padding = topk_ids.new_tensor(range(longest)) >= counts[:, None]
    topk_ids[padding.view(-1)] = -1
