"""What the load asks: prompts, as they are or as the end of a context of a given length, or random token ids."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import Cell, PromptSet, Settings, Turns

Template = Callable[[Sequence[Mapping[str, str]]], list[int]]


def texts_of(path: Path) -> tuple[str, ...]:
    """The lines of a file that hold more than white space. Raises ValueError without any, OSError unread."""
    texts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not texts:
        raise ValueError(f"{path} has no line of text")
    return texts


@functools.cache
def tokenizer_of(target: str) -> Any:
    """The target's tokenizer. Raises OSError or ValueError where it has none."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def template_of(target: str) -> Template:
    """Makes token ids of messages, up to where the target answers."""
    apply = tokenizer_of(target).apply_chat_template
    return functools.partial(apply, add_generation_prompt=True, tokenize=True, return_dict=False)


def room(one: PromptSet, target: str, new: int, context: int | None) -> int:
    """The most tokens that a prompt of the set takes, with answers of `new` tokens each.

    Of texts as they are an upper bound, their bytes, where that fits into the context.
    """
    if one.chat:
        template = template_of(target)
        answer = {"role": "assistant", "content": ""}
        return max(
            len(template([message for turn in turns for message in (*turn, answer)][:-1])) + len(turns) * new
            for turns in one.prompts
        )
    texts = [text_of(turns) for turns in one.prompts]
    most = max(len(text.encode()) for text in texts) + new
    if context is None or most <= context:
        return most
    return max(len(tokenizer_of(target).encode(text)) for text in texts) + new


def text_of(turns: Turns) -> str:
    """What the user says at the first turn."""
    return turns[0][-1]["content"]


def contexts(settings: Settings, one: PromptSet, length: int | None, count: int) -> list[Turns]:
    """`count` prompts, of texts evenly apart.

    With a length, each is cut or filled from the left, with other texts, to about that many tokens (it stays text,
    which the server divides into tokens itself). Without, a text that comes again is the same prompt: its prefix
    may be in the radix cache, on every server alike.
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


def dataset_flags(settings: Settings, cell: Cell, count: int, path: Path) -> list[str]:
    """The dataset of a load of `count` prompts, as arguments of `sglang.benchmark.serving`; written to `path`.

    Texts end where the target ends them; random ids, which say nothing, after `settings.output` tokens.
    """
    output, one = str(settings.output), settings.set_of(cell)
    if one is None:
        return [
            "--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0",
            "--random-input-len", str(cell.input), "--random-output-len", output,
        ]  # fmt: skip
    asked = contexts(settings, one, cell.input, count)
    if one.chat:
        conversations = [[{"messages": messages} for messages in turns] for turns in asked]
        path.write_text(json.dumps({"conversations": conversations}), encoding="utf-8")
    else:
        lines = ({"conversations": [{"content": text_of(turns)}, {"content": "-"}]} for turns in asked)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    name = "agentic-trace" if one.chat else "custom"
    path_and_end = ["--dataset-path", str(path), "--sharegpt-output-len", output, "--disable-ignore-eos"]
    return ["--dataset-name", name, *path_and_end]


def requests(settings: Settings, length: int | None, count: int) -> list[dict[str, Any]]:
    """Prompts of the first set, their first turns, as fields of /generate."""
    if not settings.sets:
        rng = random.Random(0)
        ids = range(settings.vocabulary)
        return [{"input_ids": rng.choices(ids, k=length or 1)} for _ in range(count)]
    one = settings.sets[0]
    asked = contexts(settings, one, length, count)
    if one.chat:
        template = template_of(settings.target)
        return [{"input_ids": template(turns[0])} for turns in asked]
    return [{"text": text_of(turns)} for turns in asked]
