"""Lets a target answer prompts, greedily and without speculation: the text that its draft is trained on.

python -m training.answers --target DIR --prompts DIR --out FILE.npz [--held-out DIR...] [--tokens 512] [--seconds S]

`--prompts`: every `*.jsonl` of that directory, a line each `{"prompt": text}`, one user turn; or
`{"begin": text, "end": text, "count": n}`, n user turns that the target itself goes on with after `begin`, sampled
up to a line's or the turn's end, to which `end` is added. `--seconds`: no new part is begun after so many.
Prompts are asked in random order, with the target's chat template. Needs a GPU for more than a few prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.conversations import Conversations

PART = 4096  # prompts whose answers are awaited together
LONGEST = 1024  # tokens of a prompt, at most
OWN_TOKENS = 160  # tokens of a turn that the target writes, at most


class Answerer:
    """One SGLang engine without speculation, and the target's template."""

    def __init__(self, target: str, **flags: Any) -> None:
        import sglang
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        if not self.tokenizer.chat_template:
            raise SystemExit(f"--target {target}: it has no chat template, which the prompts are asked with")
        self.engine: Any = sglang.Engine(
            model_path=target, skip_tokenizer_init=True, log_level="error", schedule_conservativeness=0.3, **flags
        )

    def prompt(self, text: str) -> list[int]:
        """The ids of a conversation of one user turn, up to where the answer begins."""
        turns = [{"role": "user", "content": text}]
        return list(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))

    def answers(self, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> list[list[int]]:
        """prompts: ids -> the ids of each answer, of at most `tokens`, its end token included."""
        wanted = {
            "temperature": 0.0,
            "max_new_tokens": tokens,
            "stop_token_ids": [self.tokenizer.eos_token_id],
            **sampling,
        }
        got = self.engine.generate(input_ids=list(prompts), sampling_params=wanted)
        return [list(one["output_ids"]) for one in got]

    def own(self, lines: Sequence[dict[str, Any]]) -> list[str]:
        """The user turns that `lines` ask for; those that did not come to an end are left out."""
        mark = "\0"
        whole = self.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        head = whole[: whole.index(mark)]
        wanted = [line for line in lines for _ in range(line["count"])]
        heads = [self.tokenizer.encode(head + line["begin"], add_special_tokens=False) for line in wanted]
        got = self.answers(heads, OWN_TOKENS, temperature=1.0, top_p=0.95) if heads else []
        turns = []
        for line, ids in zip(wanted, got, strict=True):
            if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
                turns.append(line["begin"] + self.tokenizer.decode(ids[:-1]) + line["end"])
        return turns

    def close(self) -> None:
        self.engine.shutdown()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The lines of a directory's prompts. Raises SystemExit where there is none, or one has neither form."""
    lines = []
    for path in sorted(directory.glob("*.jsonl")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            line = json.loads(text)
            if not isinstance(line, dict) or not ("prompt" in line or {"begin", "end", "count"} <= line.keys()):
                raise SystemExit(
                    f"{path}:{number}: {text[:60]!r}: expected an object with `prompt`, or with `begin`, `end`, `count`"
                )
            lines.append(line)
    if not lines:
        raise SystemExit(f"--prompts {directory}: no line in a *.jsonl file there; write some prompts")
    return lines


def turns_of(lines: Sequence[dict[str, Any]], answerer: Answerer) -> list[str]:
    """The user turns of `lines`, each of the target's own written."""
    own = [line for line in lines if "prompt" not in line]
    return [line["prompt"] for line in lines if "prompt" in line] + answerer.own(own)


def answer(answerer: Answerer, turns: Sequence[str], tokens: int, seconds: float) -> Conversations:
    """The conversations of `turns`, in that order, up to those that `seconds` left no time for."""
    prompts = [ids for ids in map(answerer.prompt, turns) if len(ids) <= LONGEST]
    begin, pairs = time.monotonic(), []
    for start in range(0, len(prompts), PART):
        part = prompts[start : start + PART]
        pairs += list(zip(part, answerer.answers(part, tokens), strict=True))
        spent = time.monotonic() - begin
        print(f"{len(pairs)} of {len(prompts)} answers in {spent:.0f} s", flush=True)
        if spent > seconds:
            break
    return Conversations.of(pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument(
        "--held-out", type=Path, nargs="*", default=[], help="directories answered first, as NAME.npz"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1, help="of the order of prompts")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of SGLang's engine, as JSON")
    args = parser.parse_args(arguments)
    lines = lines_of(args.prompts)
    answerer = Answerer(args.target, **args.engine)
    for directory in args.held_out:
        path = args.out.with_name(f"{directory.name}.npz")
        answer(answerer, turns_of(lines_of(directory), answerer), args.tokens, float("inf")).save(path)
    turns = turns_of(lines, answerer)
    print(f"{len(turns)} prompts", flush=True)
    random.Random(args.seed).shuffle(turns)
    made = answer(answerer, turns, args.tokens, args.seconds)
    made.save(args.out)
    print(f"{len(made)} conversations, {len(made.ids)} tokens, in {args.out}", flush=True)
    answerer.close()


if __name__ == "__main__":
    main()
