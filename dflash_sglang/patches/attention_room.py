"""Room for blocks in what attention backends hold of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_sglang.patches.apply import replaced
from dflash_sglang.sglang_names.scheduler import ModelRunner, get_spec


@contextmanager
def room_for_blocks(runner: ModelRunner) -> Iterator[None]:
    """Backends that are made meanwhile have room for blocks that end beyond the context.

    A block may start at the last token of a context (`longest_prefix`). SGLang's backends size page tables and
    lists of slots for the context alone: the kernels of FlashInfer's MLA graphs would write behind the list, and
    those of FlashAttention 3 would read pages behind the table. Rows of `req_to_token` are wide enough.
    """
    config = runner.model_config
    longest = config.context_len + get_spec().speculative_num_draft_tokens - 1
    with replaced("attention-context", config, longest):
        yield


def init_attention_backends(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """AROUND ModelRunner.init_attention_backends, of the target and the draft."""
    with room_for_blocks(runner):
        original(runner)
