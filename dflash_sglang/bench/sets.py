"""Sets of prompts by the values of `--prompts`: a file of texts or conversations, or a public data set by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash_sglang.bench.prompts import texts_of
from dflash_sglang.bench.settings import BadSetting, PromptSet, Turns
from dflash_sglang.checkpoint.fields import described

MOST = 1024  # prompts of a data set; of a larger one, every n-th
LINE = "a text, or an object with prompt (a text), turns (a list of texts) or messages that end with a user's"


class DataSet(NamedTuple):
    """A data set of the hub, and what a user says in one of its rows."""

    path: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]


def _maths(field: str) -> Callable[[Mapping[str, Any]], list[str]]:
    ending = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [row[field] + ending]


def _code(row: Mapping[str, Any]) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _instruction(row: Mapping[str, Any]) -> list[str]:
    return ["\n\n".join(filter(None, (row["instruction"], row["input"])))]


# The instructions are those of the published DFlash evaluations.
DATA_SETS = {
    "gsm8k": DataSet("openai/gsm8k", "main", "test", _maths("question")),
    "math500": DataSet("HuggingFaceH4/MATH-500", None, "test", _maths("problem")),
    "humaneval": DataSet("openai/openai_humaneval", None, "test", _code),
    "mbpp": DataSet("google-research-datasets/mbpp", "sanitized", "test", _code),
    "mt-bench": DataSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
    "alpaca": DataSet("tatsu-lab/alpaca", None, "train", _instruction),
}


def read(value: str, chat: bool) -> PromptSet:
    """The set that a value of `--prompts` names. Raises BadSetting.

    chat: of texts; a data set and conversations have the chat template in any case.
    """
    if value in DATA_SETS:
        return PromptSet(value, tuple(asked(turns) for turns in _rows(value)), True)
    try:
        lines = texts_of(Path(value))
    except (OSError, ValueError) as error:
        expected = f"a file with prompts, or one of {', '.join(DATA_SETS)}"
        raise BadSetting(f"--prompts {value}: expected {expected} ({error})") from error
    if not value.endswith(".jsonl"):
        return PromptSet(value, tuple(asked([text]) for text in lines), chat)
    prompts = []
    for text in lines:
        try:
            line = json.loads(text)
            prompts.append(_prompt(line))
            chat = chat or isinstance(line, dict) and "prompt" not in line
        except (ValueError, KeyError, TypeError):
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise BadSetting(f"--prompts {value}: has the line {shown}: expected {LINE}") from None
    return PromptSet(value, tuple(prompts), chat)


def asked(texts: list[str]) -> Turns:
    """A prompt whose texts a user says, one after the other."""
    return tuple(({"role": "user", "content": text},) for text in texts)


def _prompt(line: Any) -> Turns:
    """Raises ValueError, KeyError or TypeError for a line that is not one of LINE."""
    if isinstance(line, str):
        line = {"prompt": line}
    if not isinstance(line, dict):
        raise TypeError
    (field,) = line.keys() & {"prompt", "turns", "messages"}
    if field == "messages":
        turns: Turns = (tuple({"role": one["role"], "content": one["content"]} for one in line[field]),)
    else:
        turns = asked([line[field]] if field == "prompt" else list(line[field]))
    words = [word for messages in turns for message in messages for word in message.values()]
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError
    if isinstance(line[field], str) != (field == "prompt") or turns[-1][-1]["role"] != "user":
        raise ValueError
    return turns


def _rows(name: str) -> list[list[str]]:
    """What a user says in each row of a data set. Raises BadSetting where it cannot be loaded."""
    one = DATA_SETS[name]
    remedy = f"or give the prompts of {one.path} as a .jsonl file"
    try:
        import datasets
    except ImportError as error:
        raise BadSetting(
            f"--prompts {name}: expected the library that loads it ({error}): pip install datasets, {remedy}"
        ) from error
    try:
        rows = datasets.load_dataset(one.path, one.config, split=one.split)
        return [one.turns(rows[i]) for i in range(0, len(rows), -(-len(rows) // MOST) or 1)]
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = f"expected {one.path} from the hub or its cache ({described(error)})"
        raise BadSetting(f"--prompts {name}: {reason}: go online, {remedy}") from error
