"""What can be wrong with --speculative-token-map."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.own_modules import OwnModules
from dflash_sglang.checkpoint.token_map import FLAG
from dflash_sglang.checkpoint.vocabulary import DRAWN_FROM
from dflash_sglang.startup.facts import Problem, TargetFacts


def token_map_problems(
    path: str, token_ids: Tensor, spec: DraftSpec, target: TargetFacts, own: OwnModules
) -> Iterator[Problem]:
    """token_ids [n], ascending, of the file at `path`."""
    if own.head is not None:
        yield Problem(
            FLAG,
            path,
            "none beside a draft with a head of its own (lm_head.weight), whose vocabulary is that head's",
            f"Remove {FLAG}.",
        )
    least = DRAWN_FROM if spec.dflash2 is None else spec.dflash2.selector_top_k
    if len(token_ids) < least:
        yield Problem(
            FLAG,
            f"{path} with {len(token_ids)} tokens",
            f"{least} tokens or more, the candidates of a proposal",
            "Make one with `dflash-sglang hot-vocab`.",
        )
    elif int(token_ids[0]) < 0 or int(token_ids[-1]) >= target.vocab_size:
        yield Problem(
            FLAG,
            f"{path} with token ids {int(token_ids[0])} to {int(token_ids[-1])}",
            f"ids of the target, 0 to {target.vocab_size - 1}",
            "Make one with the target's tokenizer.",
        )
