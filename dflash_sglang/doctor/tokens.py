"""Whether the tokenizers of target and draft name the same tokens, and what the mask token is called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = "tokenizer.json"
SHOWN = 5


@dataclass(frozen=True)
class Vocabularies:
    differing: int | None  # ids that name different tokens, or one in one tokenizer only; None: not compared,
    why_not: str | None  # which this explains
    first: tuple[str, ...]  # some of them
    mask_token: str | None  # its text in the target's tokenizer, None for an id without one
    mask_is_ordinary: bool  # whether text can hold it


def compare(target: Path, draft: Path, mask_token_id: int | None) -> Vocabularies:
    """Reads the tokenizer.json of both directories, where there is one."""
    (added, of_target, no_target), (_, of_draft, no_draft) = _tokens("target", target), _tokens("draft", draft)
    mask = None if mask_token_id is None else of_target.get(mask_token_id)
    is_ordinary = mask is not None and mask_token_id not in added
    if (why_not := no_target or no_draft) is not None:
        return Vocabularies(None, why_not, (), mask, is_ordinary)
    ids = sorted(i for i in of_target.keys() | of_draft.keys() if of_target.get(i) != of_draft.get(i))
    first = tuple(f"{i}: {of_target.get(i)!r}, draft {of_draft.get(i)!r}" for i in ids[:SHOWN])
    return Vocabularies(len(ids), None, first, mask, is_ordinary)


def _tokens(role: str, directory: Path) -> tuple[set[int], dict[int, str], str | None]:
    """(ids of added tokens, token by id, why there are none)"""
    path = directory / FILE
    if not path.is_file():
        return set(), {}, f"the {role} has no {FILE}"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = saved["model"]["vocab"]
        unigram = isinstance(vocabulary, list)  # [token, score]
        named = ((entry[0], i) for i, entry in enumerate(vocabulary)) if unigram else vocabulary.items()
        tokens = {int(i): str(token) for token, i in named}
        added = {int(entry["id"]): str(entry["content"]) for entry in saved.get("added_tokens") or ()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        return set(), {}, f"the {role}'s {FILE} cannot be read"
    return set(added), {**tokens, **added}, None
