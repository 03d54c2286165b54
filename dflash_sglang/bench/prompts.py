"""What the load asks: prompts, as they are or as the end of a context of a given length, or random token ids."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import Cell, PromptSet, Settings, Turns

Ids = Callable[[Sequence[Mapping[str, str]]], list[int]]  # of messages


def texts_of(path: Path) -> tuple[str, ...]:
    """The lines of a file that hold more than white space. Raises ValueError without any, OSError unread."""
    texts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not texts:
        raise ValueError(f"{path} has no line of text")
    return texts


@functools.cache
def tokenizer_of(target: str) -> Any:
    """The target's tokenizer, which takes texts of any length. Raises OSError or ValueError where it has none."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target, model_max_length=sys.maxsize)


def ids_of(one: PromptSet, target: str) -> Ids:
    """Makes token ids of a prompt's messages: with the chat template up to the answer, or of a text as it is.

    It remembers them: dividing a long text while a load runs would hold up the answers to others.
    """
    tokenizer, known = tokenizer_of(target), dict[str, list[int]]()

    def ids(messages: Sequence[Mapping[str, str]]) -> list[int]:
        key = json.dumps(messages)
        if key not in known and one.chat:
            known[key] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        elif key not in known:
            known[key] = tokenizer.encode(messages[-1]["content"])
        return known[key]

    return ids


def room(one: PromptSet, target: str, new: int) -> int:
    """The most tokens that a prompt of the set takes, with answers of `new` tokens each."""
    ids, answer = ids_of(one, target), {"role": "assistant", "content": ""}
    return max(
        len(ids([message for turn in turns for message in (*turn, answer)][:-1])) + len(turns) * new
        for turns in one.prompts
    )


def text_of(turns: Turns) -> str:
    """What the user says at the first turn."""
    return turns[0][-1]["content"]


def contexts(settings: Settings, one: PromptSet, length: int | None, count: int) -> list[Turns]:
    """`count` prompts, of texts evenly apart.

    With a length, each is cut or filled from the left, with other texts, to about that many tokens (of a text,
    which is divided into tokens again). Without, a text that comes again is the same prompt: its prefix may be in
    the radix cache, on every server alike.
    """
    prompts = one.prompts
    chosen = [i * len(prompts) // count if count < len(prompts) else i % len(prompts) for i in range(count)]
    if length is None:
        return [prompts[i] for i in chosen]
    tokenizer = tokenizer_of(settings.target)
    ids = [tokenizer.encode(text_of(turns) + "\n", add_special_tokens=False) for turns in prompts]
    texts = (tokenizer.decode(_context(ids, last, length, seed)) for seed, last in enumerate(chosen))
    return [(({"role": "user", "content": text},),) for text in texts]


def _context(texts: Sequence[Sequence[int]], last: int, length: int, seed: int) -> list[int]:
    """The `length` last ids of a row of texts, drawn from `seed` but for the last one."""
    rng = random.Random(seed)
    out = list(texts[last])
    while len(out) < length:
        out = [*rng.choice(texts), *out]
    return out[-length:]


def load_of(settings: Settings, cell: Cell, count: int, path: Path) -> tuple[list[str], Ids | None]:
    """A load of `count` prompts: the dataset, written to `path`, as arguments of `sglang.benchmark.serving`, and
    what makes token ids of its messages.

    Texts end where the target ends them; random ids, which say nothing, after `settings.output` tokens.
    """
    output, one = str(settings.output), settings.set_of(cell)
    if one is None:
        return [
            "--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0",
            "--random-input-len", str(cell.input), "--random-output-len", output,
        ], None  # fmt: skip
    asked, ids = contexts(settings, one, cell.input, count), ids_of(one, settings.target)
    for turns in asked:
        ids(turns[0])
    conversations = [[{"messages": messages} for messages in turns] for turns in asked]
    path.write_text(json.dumps({"conversations": conversations}), encoding="utf-8")
    file = ["--dataset-name", "agentic-trace", "--dataset-path", str(path)]
    return [*file, "--sharegpt-output-len", output, "--disable-ignore-eos"], ids


def requests(settings: Settings, length: int | None, count: int) -> list[dict[str, Any]]:
    """Prompts of the first set, their first turns, as fields of /generate."""
    if not settings.sets:
        rng = random.Random(0)
        ids = range(settings.vocabulary)
        return [{"input_ids": rng.choices(ids, k=length or 1)} for _ in range(count)]
    one = settings.sets[0]
    ids_of_messages = ids_of(one, settings.target)
    return [{"input_ids": ids_of_messages(turns[0])} for turns in contexts(settings, one, length, count)]
