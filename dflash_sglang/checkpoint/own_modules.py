"""What a draft checkpoint holds of its own instead of the target's: embedding, head, vocabulary, mask row.

Decided by the tensors in its files. Shapes tell nothing: a trained head is as large as the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.fields import described
from dflash_sglang.checkpoint.files import UNPACKED_DTYPES, TensorFacts

MASK_EMBEDDING = "mask_embedding"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
_VOCABULARY = ("d2t", "t2d")  # read here, not by the loader of the weights
TRAINING_TENSORS = (  # belong to training, or guess what walks give
    *("verifier_lm_head.weight", "verifier_norm.weight"),
    *("confidence_head.proj.weight", "confidence_head.proj.bias"),
)
NOT_LOADED = _VOCABULARY + TRAINING_TENSORS
TABLES = ("embed_tokens", "markov_head.markov_w1", "markov_head.markov_w2")
"""Modules that are read row by row. Those of a checkpoint in NVFP4 are dense once they are loaded."""


@dataclass(frozen=True)
class MaskEmbedding:
    source: str
    row: Tensor  # the embedding of a mask token as stored
    token_id: int | None = None  # the id that it was trained as


@dataclass(frozen=True)
class OwnModules:
    """None: the target's serves."""

    head: TensorFacts | None = None  # of its weight, or of any of its tensors where that is packed
    embedding: TensorFacts | None = None  # the same
    d2t: Tensor | None = None  # [draft vocabulary] offset from a row of the head to the target's id
    t2d: Tensor | None = None  # [target vocabulary] which ids of the target the head knows
    mask_embedding: MaskEmbedding | None = None

    def target_ids(self) -> Tensor | None:
        """The target's id of each row of the head [draft vocabulary] int64; None where rows are ids."""
        if self.d2t is None or self.head is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t.long()


def own_modules(directory: Path, tensors: Mapping[str, TensorFacts]) -> OwnModules:
    """From the `tensors` of a checkpoint directory, as `tensor_facts` has them, and its mask_embedding.pt.

    Raises DraftConfigError for a mask_embedding.pt that is no tensor.
    """
    facts = {name.removeprefix("model."): fact for name, fact in tensors.items()}
    small = _read(directory, facts.keys() & {*_VOCABULARY, MASK_EMBEDDING})
    return OwnModules(
        head=_module(facts, "lm_head"),
        embedding=_module(facts, "embed_tokens"),
        d2t=small.get("d2t"),
        t2d=small.get("t2d"),
        mask_embedding=_mask_embedding(directory, small),
    )


def head_rows(spec: DraftSpec, own: OwnModules) -> int:
    """Rows of a head of the draft's own: as many as it has tokens. A weight whose rows are the target's ids may
    have more: padding."""
    tokens = head_tokens(spec, own)
    if own.head is None or own.d2t is not None or own.head.dtype not in UNPACKED_DTYPES:
        return tokens
    return max(tokens, own.head.shape[0])


def head_tokens(spec: DraftSpec, own: OwnModules) -> int:
    """Tokens of such a head: the config's draft_vocab_size, those that d2t maps, or the vocabulary."""
    if spec.vocabulary.draft_vocab_size is not None:
        return spec.vocabulary.draft_vocab_size
    return spec.vocab_size if own.d2t is None else own.d2t.numel()


def own_in_words(spec: DraftSpec, own: OwnModules) -> str:
    """For the start-up line and the doctor."""
    parts = (
        f"head of {head_tokens(spec, own)} tokens" if own.head is not None else None,
        f"embedding of {spec.vocab_size} tokens" if own.embedding is not None else None,
        "mask row" if own.mask_embedding is not None else None,
    )
    return ", ".join(part for part in parts if part is not None) or "none"


def _module(facts: Mapping[str, TensorFacts], name: str) -> TensorFacts | None:
    parts = [fact for tensor, fact in facts.items() if tensor.startswith(f"{name}.")]
    return facts.get(f"{name}.weight", parts[0] if parts else None)


def _read(directory: Path, names: Set[str]) -> dict[str, Tensor]:
    """The tensors themselves, from the files; these are opened only where there is something to read."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")) if names else ():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                if name.removeprefix("model.") in names:
                    found[name.removeprefix("model.")] = file.get_tensor(name)
    return found


def _mask_embedding(directory: Path, tensors: Mapping[str, Tensor]) -> MaskEmbedding | None:
    path = directory / MASK_EMBEDDING_FILE
    if path.is_file():
        return _from_file(path)
    row = tensors.get(MASK_EMBEDDING)
    return None if row is None else MaskEmbedding(f"draft tensor {MASK_EMBEDDING}", row.squeeze())


def _from_file(path: Path) -> MaskEmbedding:
    """A tensor, or a dict with it as `embedding` and, as published, `mask_token_id` and `per_position`."""
    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind fails anywhere in the unpickler
        raise _unreadable(f"a file of another kind ({described(error)})") from error
    entries = saved if isinstance(saved, dict) else {"embedding": saved}
    row = entries.get("embedding", entries.get(MASK_EMBEDDING))
    if not isinstance(row, Tensor):
        raise _unreadable(f"{type(saved).__name__} with {sorted(map(str, entries))}")
    per_position = entries.get("per_position")
    if per_position is not None and per_position is not False:
        raise _unreadable("one row per position of the block")
    token_id = entries.get("mask_token_id")
    if isinstance(token_id, Tensor) and token_id.numel() == 1:
        token_id = token_id.item()
    if token_id is not None and (isinstance(token_id, bool) or not isinstance(token_id, int)):
        fix = "Save it again with the id that the draft was trained with."
        raise DraftConfigError(f"{path.name} mask_token_id", token_id, "the id of the mask token, an integer", fix)
    return MaskEmbedding(f"draft file {path.name}", row.squeeze(), token_id)


def _unreadable(found: str) -> DraftConfigError:
    expected = "one embedding row for every mask token, saved as a tensor or as {'embedding': tensor}"
    fix = "Save it again from the embedding that the draft was trained with."
    return DraftConfigError(MASK_EMBEDDING_FILE, found, expected, fix)
