"""The prompts of a check, as token ids: of texts, or given as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.prompts import texts_of
from dflash_sglang.bench.settings import BadSetting


def read(path: Path) -> list[Any]:
    """What a file holds: the items of a .json list, of the lines of a .jsonl file, or else a text a line.

    Raises BadSetting where the file cannot be read or has no prompt.
    """
    try:
        if path.suffix not in (".json", ".jsonl"):
            return list(texts_of(path))
        if path.suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
        else:
            found = [json.loads(line) for line in texts_of(path)]
        if isinstance(found, list) and found:
            return found
        reason = "it is no list, or an empty one"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise BadSetting(
        f"--prompts {path}: expected a .json list, .jsonl, or a file with a text a line ({reason})"
    ) from None


def tokens(
    prompts: Sequence[Any], tokenizer: Any, vocabulary: int, path: Path | None, chat: bool = False
) -> list[list[int]]:
    """The token ids of each prompt; texts get the tokenizer's special tokens, as on the server. chat: a text is
    what a user says, and gets the chat template.

    Raises BadSetting for one that is neither a text nor a list of ids below `vocabulary`, or that has no token.
    """
    out = []
    for number, prompt in enumerate(prompts):
        ids = _of_text(prompt, tokenizer, chat) if isinstance(prompt, str) else prompt
        if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < vocabulary for id in ids):
            shown = json.dumps(prompt)
            raise BadSetting(
                f"--prompts {path}: prompt {number} is {shown[:60]}{'...' if len(shown) > 60 else ''}: expected a "
                f"text, or a list of token ids from 0 to {vocabulary - 1}"
            )
        out.append(ids)
    return out


def _of_text(text: str, tokenizer: Any, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(text)
    return tokenizer.encode(chat_text(tokenizer, text), add_special_tokens=False)  # the template has them


def chat_text(tokenizer: Any, text: str) -> str:
    """What a user says, in the tokenizer's chat template, up to where the answer begins."""
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
