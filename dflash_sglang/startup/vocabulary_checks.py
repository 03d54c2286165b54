"""What can be wrong with the embedding, head, vocabulary and mask row that a draft brings of its own, and with the
tokens of --speculative-token-map."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import UNPACKED_DTYPES
from dflash_sglang.checkpoint.own_modules import OwnModules, head_rows, head_tokens
from dflash_sglang.checkpoint.token_map import FLAG, TokenMapError, read_token_map
from dflash_sglang.checkpoint.vocabulary import DRAWN_FROM
from dflash_sglang.startup.facts import Problem, TargetFacts


def own_problems(spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    """Problems of a checkpoint whose tensors are known."""
    yield from _presence_problems(spec, own)
    yield from _shape_problems(spec, own)
    yield from _vocabulary_problems(spec, target, own)
    if own.d2t is not None and own.head is not None:
        yield from _mapping_problems(spec, target, own, own.d2t)
    yield from _mask_embedding_problems(spec, own)


def unread_problems(spec: DraftSpec, target: TargetFacts) -> Iterator[Problem]:
    """Problems of a checkpoint without *.safetensors files, in which alone the draft's own modules are found."""
    said = spec.vocabulary
    for field, value, own in (
        ("has_lm_head", said.has_head, said.has_head),
        ("has_embed_tokens", said.has_embedding, said.has_embedding),
        ("draft_vocab_size", said.draft_vocab_size, said.draft_vocab_size not in (None, target.vocab_size)),
    ):
        if own:
            yield Problem(
                f"draft config {field}",
                value,
                "a checkpoint of *.safetensors files, where modules of the draft's own are looked for",
                "Convert the checkpoint to safetensors.",
            )


def _presence_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    for field, said, found, tensor in (
        ("has_lm_head", spec.vocabulary.has_head, own.head, "lm_head.weight"),
        ("has_embed_tokens", spec.vocabulary.has_embedding, own.embedding, "embed_tokens.weight"),
    ):
        if said is True and found is None:
            yield Problem(
                f"draft config {field}",
                True,
                f"a tensor {tensor} in the checkpoint",
                f"Use a complete checkpoint, or set {field} to false to take the target's.",
            )
        if said is False and found is not None:
            yield Problem(
                f"draft config {field}",
                False,
                f"no tensor {tensor} in the checkpoint, which would be used in place of the target's",
                f"Set {field} to true, or remove the tensor.",
            )


def _shape_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    for tensor, found, rows, field in (
        ("lm_head.weight", own.head, head_rows(spec, own), "draft_vocab_size"),
        ("embed_tokens.weight", own.embedding, spec.vocab_size, "vocab_size"),
    ):
        if found is None or found.dtype not in UNPACKED_DTYPES:
            continue
        if found.shape != (rows, spec.hidden_size):
            yield Problem(
                f"draft tensor {tensor}",
                list(found.shape),
                f"{[rows, spec.hidden_size]}: [{field}, hidden_size]",
                f"Make {field} and the tensor agree.",
            )


def _vocabulary_problems(spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    rows = head_tokens(spec, own)
    if own.head is None:
        if rows != target.vocab_size and spec.vocabulary.draft_vocab_size not in (None, spec.vocab_size):
            yield Problem(
                "draft config draft_vocab_size",
                rows,
                f"the target's vocab_size of {target.vocab_size} in a checkpoint without lm_head.weight",
                "Use the checkpoint with the head of the draft's own.",
            )
        if own.d2t is not None and bool(own.d2t.count_nonzero()):
            yield Problem(
                "draft tensor d2t",
                list(own.d2t.shape),
                "a head of the draft's own (lm_head.weight), whose rows it maps to the target's ids",
                "Use the checkpoint with the head, or remove d2t.",
            )
        return
    if rows < target.vocab_size and own.d2t is None:  # of more, those beyond the target's ids are padding
        yield Problem(
            "draft tensor d2t",
            None,
            f"the offset to the target's id for each of the {rows} rows of the head "
            f"(the target's vocab_size is {target.vocab_size})",
            "Use a checkpoint that holds d2t, or serve the target that the draft was trained for.",
        )
    if rows < DRAWN_FROM:
        yield Problem(
            "draft config draft_vocab_size",
            rows,
            f"at least {DRAWN_FROM} rows of the head, from which proposals are drawn",
            "Serve a draft with a larger vocabulary.",
        )


def _mapping_problems(
    spec: DraftSpec, target: TargetFacts, own: OwnModules, d2t: torch.Tensor
) -> Iterator[Problem]:
    rows = head_tokens(spec, own)
    if d2t.shape != (rows,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        yield Problem(
            "draft tensor d2t",
            f"{list(d2t.shape)} {d2t.dtype}",
            f"[{rows}] integers: one offset for each row of the head",
            "Make draft_vocab_size and d2t agree.",
        )
        return
    ids = torch.arange(rows) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(ids.unique()) != rows:
        yield Problem(
            "draft tensor d2t",
            f"rows to ids {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of them different",
            f"offsets: row + d2t[row] is one id of the target each, 0 to {target.vocab_size - 1}",
            "Write target id - row into d2t, not the target's id itself.",
        )
        return
    if own.t2d is None:
        return
    known = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if own.t2d.shape != known.shape:
        yield Problem(
            "draft tensor t2d",
            list(own.t2d.shape),
            f"[{target.vocab_size}]: one flag for each id of the target",
            "Serve the target that the draft was trained for.",
        )
    elif not torch.equal(own.t2d.bool(), known):
        other = int((own.t2d.bool() != known).nonzero()[0])
        yield Problem(
            "draft tensor d2t",
            f"unlike t2d at the target's id {other}",
            "the ids row + d2t[row] to be those that t2d marks",
            "Write target id - row into d2t, and true into t2d for those ids.",
        )


def _mask_embedding_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    mask = own.mask_embedding
    if mask is None:
        return
    if mask.row.shape != (spec.hidden_size,):
        yield Problem(
            mask.source,
            list(mask.row.shape),
            f"[{spec.hidden_size}]: one row of hidden_size",
            "Use the one that was trained with this draft.",
        )
    if mask.token_id is not None and mask.token_id != spec.mask_token_id:
        yield Problem(
            f"{mask.source} mask_token_id",
            mask.token_id,
            f"the config's mask_token_id of {spec.mask_token_id}",
            "Use the one that was trained with this draft, or correct the config.",
        )


def token_map_problems(path: str, spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    """path: --speculative-token-map."""
    try:
        token_ids = read_token_map(path)
    except TokenMapError as error:
        yield Problem(FLAG, path, error.expected, error.fix)
        return
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
