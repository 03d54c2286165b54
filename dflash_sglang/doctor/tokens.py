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
    found: list[dict[int, str]] = []
    ordinary: set[int] = set()
    why_not = None
    for role, directory in (("target", target), ("draft", draft)):
        path = directory / FILE
        tokens: dict[int, str] = {}
        if not path.is_file():
            why_not = why_not or f"the {role} has no {FILE}"
        else:
            try:
                added, tokens = _tokens(path)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
                why_not = why_not or f"the {role}'s {FILE} cannot be read"
            else:
                ordinary = tokens.keys() - added if role == "target" else ordinary
        found.append(tokens)
    of_target, of_draft = found
    mask = None if mask_token_id is None else of_target.get(mask_token_id)
    is_ordinary = mask is not None and mask_token_id in ordinary
    if why_not is not None:
        return Vocabularies(None, why_not, (), mask, is_ordinary)
    ids = sorted(i for i in of_target.keys() | of_draft.keys() if of_target.get(i) != of_draft.get(i))
    first = tuple(f"{i}: {of_target.get(i)!r}, draft {of_draft.get(i)!r}" for i in ids[:SHOWN])
    return Vocabularies(len(ids), None, first, mask, is_ordinary)


def _tokens(path: Path) -> tuple[set[int], dict[int, str]]:
    """(ids of added tokens, token by id)"""
    saved = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = saved["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score]
        tokens = {i: str(entry[0]) for i, entry in enumerate(vocabulary)}
    else:
        tokens = {int(i): str(token) for token, i in vocabulary.items()}
    added = {int(entry["id"]): str(entry["content"]) for entry in saved.get("added_tokens") or ()}
    return set(added), {**tokens, **added}
