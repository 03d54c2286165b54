"""What can be wrong with the embedding, head, vocabulary and mask row that a draft brings of its own, and with the
tokens of --speculative-token-map."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.family_specs import DRAWN_FROM
from dflash_sglang.checkpoint.files import UNPACKED_DTYPES
from dflash_sglang.checkpoint.own_modules import OwnModules, head_rows, head_tokens
from dflash_sglang.checkpoint.token_map import FLAG, TokenMapError, read_token_map
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
            expected = "a checkpoint of *.safetensors files, where modules of the draft's own are looked for"
            yield Problem(f"draft config {field}", value, expected, "Convert the checkpoint to safetensors.")


def _presence_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    for field, said, found, tensor in (
        ("has_lm_head", spec.vocabulary.has_head, own.head, "lm_head.weight"),
        ("has_embed_tokens", spec.vocabulary.has_embedding, own.embedding, "embed_tokens.weight"),
    ):
        if said is True and found is None:
            fix = f"Use a complete checkpoint, or set {field} to false to take the target's."
            yield Problem(f"draft config {field}", True, f"a tensor {tensor} in the checkpoint", fix)
        if said is False and found is not None:
            expected = f"no tensor {tensor} in the checkpoint, which would be used in place of the target's"
            yield Problem(f"draft config {field}", False, expected, f"Set {field} to true, or remove the tensor.")


def _shape_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    for tensor, found, rows, field in (
        ("lm_head.weight", own.head, head_rows(spec, own), "draft_vocab_size"),
        ("embed_tokens.weight", own.embedding, spec.vocab_size, "vocab_size"),
    ):
        if found is None or found.dtype not in UNPACKED_DTYPES:
            continue
        if found.shape != (rows, spec.hidden_size):
            expected = f"{[rows, spec.hidden_size]}: [{field}, hidden_size]"
            fix = f"Make {field} and the tensor agree."
            yield Problem(f"draft tensor {tensor}", list(found.shape), expected, fix)


def _vocabulary_problems(spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    rows = head_tokens(spec, own)
    if own.head is None:
        if rows != target.vocab_size and spec.vocabulary.draft_vocab_size not in (None, spec.vocab_size):
            expected = f"the target's vocab_size of {target.vocab_size} in a checkpoint without lm_head.weight"
            fix = "Use the checkpoint with the head of the draft's own."
            yield Problem("draft config draft_vocab_size", rows, expected, fix)
        if own.d2t is not None and bool(own.d2t.count_nonzero()):
            expected = "a head of the draft's own (lm_head.weight), whose rows it maps to the target's ids"
            fix = "Use the checkpoint with the head, or remove d2t."
            yield Problem("draft tensor d2t", list(own.d2t.shape), expected, fix)
        return
    if rows < target.vocab_size and own.d2t is None:  # of more, those beyond the target's ids are padding
        expected = (
            f"the offset to the target's id for each of the {rows} rows of the head "
            f"(the target's vocab_size is {target.vocab_size})"
        )
        fix = "Use a checkpoint that holds d2t, or serve the target that the draft was trained for."
        yield Problem("draft tensor d2t", None, expected, fix)
    if rows < DRAWN_FROM:
        expected = f"at least {DRAWN_FROM} rows of the head, from which proposals are drawn"
        yield Problem("draft config draft_vocab_size", rows, expected, "Serve a draft with a larger vocabulary.")


def _mapping_problems(
    spec: DraftSpec, target: TargetFacts, own: OwnModules, d2t: torch.Tensor
) -> Iterator[Problem]:
    rows = head_tokens(spec, own)
    if d2t.shape != (rows,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        expected = f"[{rows}] integers: one offset for each row of the head"
        fix = "Make draft_vocab_size and d2t agree."
        yield Problem("draft tensor d2t", f"{list(d2t.shape)} {d2t.dtype}", expected, fix)
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
        expected = f"[{target.vocab_size}]: one flag for each id of the target"
        fix = "Serve the target that the draft was trained for."
        yield Problem("draft tensor t2d", list(own.t2d.shape), expected, fix)
    elif not torch.equal(own.t2d.bool(), known):
        other = int((own.t2d.bool() != known).nonzero()[0])
        expected = "the ids row + d2t[row] to be those that t2d marks"
        fix = "Write target id - row into d2t, and true into t2d for those ids."
        yield Problem("draft tensor d2t", f"unlike t2d at the target's id {other}", expected, fix)


def _mask_embedding_problems(spec: DraftSpec, own: OwnModules) -> Iterator[Problem]:
    mask = own.mask_embedding
    if mask is None:
        return
    if mask.row.shape != (spec.hidden_size,):
        expected = f"[{spec.hidden_size}]: one row of hidden_size"
        yield Problem(mask.source, list(mask.row.shape), expected, "Use the one that was trained with this draft.")
    if mask.token_id is not None and mask.token_id != spec.mask_token_id:
        expected = f"the config's mask_token_id of {spec.mask_token_id}"
        fix = "Use the one that was trained with this draft, or correct the config."
        yield Problem(f"{mask.source} mask_token_id", mask.token_id, expected, fix)


def token_map_problems(path: str, spec: DraftSpec, target: TargetFacts, own: OwnModules) -> Iterator[Problem]:
    """path: --speculative-token-map."""
    try:
        token_ids = read_token_map(path)
    except TokenMapError as error:
        yield Problem(FLAG, path, error.expected, error.fix)
        return
    if own.head is not None:
        expected = "none beside a draft with a head of its own (lm_head.weight), whose vocabulary is that head's"
        yield Problem(FLAG, path, expected, f"Remove {FLAG}.")
    least = DRAWN_FROM if spec.dflash2 is None else spec.dflash2.selector_top_k
    if len(token_ids) < least:
        expected = f"{least} tokens or more, the candidates of a proposal"
        fix = "Make one with `dflash-sglang hot-vocab`."
        yield Problem(FLAG, f"{path} with {len(token_ids)} tokens", expected, fix)
    elif int(token_ids[0]) < 0 or int(token_ids[-1]) >= target.vocab_size:
        expected = f"ids of the target, 0 to {target.vocab_size - 1}"
        fix = "Make one with the target's tokenizer."
        yield Problem(FLAG, f"{path} with token ids {int(token_ids[0])} to {int(token_ids[-1])}", expected, fix)
