"""Lets a target answer prompts, greedily and without speculation: the text that its draft is trained on.

python -m training.answers --target DIR --prompts DIR --out FILE.npz [--held-out DIR...] [--tokens 512]

`--prompts`: every `*.jsonl` of that directory, a line each `{"prompt": text}`, one user turn; or
`{"begin": text, "end": text, "count": n}`, n user turns that the target itself goes on with after `begin`, sampled
up to the turn's end, to which `end` is added. Prompts are asked in random order, with the target's chat template.
`--seconds`: no new part is begun after so many. Needs a GPU for more than a few prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from training.conversations import Conversations

PART = 4096  # prompts whose answers are awaited together
OWN_TOKENS = 160  # tokens of a turn that the target writes, at most


class Answerer:
    """A target's template, and its SGLang engine without speculation, which starts when it is first asked.

    Raises SystemExit for a target that is not there or has no chat template.
    """

    def __init__(self, target: str, tokens: int, flags: dict[str, Any]) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.target, self.tokens, self.flags = target, tokens, flags
        try:
            self.context = int(AutoConfig.from_pretrained(target).get_text_config().max_position_embeddings)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        except (OSError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise SystemExit(
                f"--target {target}: expected a causal LM that transformers reads ({why}); give its directory"
            ) from error
        if not self.tokenizer.chat_template:
            raise SystemExit(
                f"--target {target}: it has no chat template, expected one to ask prompts with; take the model's "
                "chat version, or put a chat_template.jinja into its directory"
            )

    @cached_property
    def engine(self) -> Any:
        import sglang

        flags: dict[str, Any] = {"log_level": "error", "schedule_conservativeness": 0.3, **self.flags}
        return sglang.Engine(model_path=self.target, skip_tokenizer_init=True, **flags)

    def prompt(self, text: str) -> list[int]:
        """The ids of a conversation of one user turn, up to where the answer begins.

        Raises SystemExit where the answer has no room in the target's context.
        """
        turns = [{"role": "user", "content": text}]
        ids = list(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
        if len(ids) + self.tokens > self.context:
            raise SystemExit(
                f"--prompts: {text[:40]!r}... has {len(ids)} tokens: expected at most "
                f"{self.context - self.tokens}, the target's context of {self.context} less --tokens "
                f"{self.tokens}; shorten or leave out the prompt, or lower --tokens"
            )
        return ids

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


def lines_of(directory: Path, option: str) -> list[dict[str, Any]]:
    """The lines of a directory's prompts. Raises SystemExit where there is none, or one has neither form."""
    lines = []
    for path in sorted(directory.glob("*.jsonl")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict) or not ("prompt" in line or {"begin", "end", "count"} <= line.keys()):
                raise SystemExit(
                    f"{option} {path}:{number}: {text[:40]!r}: expected a JSON object with `prompt`, or with "
                    "`begin`, `end` and `count`; correct or remove the line"
                )
            lines.append(line)
    if not lines:
        raise SystemExit(f"{option} {directory}: expected lines in *.jsonl files there, found none; write some")
    return lines


def answer(answerer: Answerer, lines: Sequence[dict[str, Any]], seconds: float, seed: int | None) -> Conversations:
    """The conversations of the turns of `lines`, up to those that `seconds` left no time for.

    seed: of their order; None: as they are.
    """
    given = [line["prompt"] for line in lines if "prompt" in line]
    prompts = [answerer.prompt(text) for text in given]
    prompts += map(answerer.prompt, answerer.own([line for line in lines if "prompt" not in line]))
    if seed is not None:
        random.Random(seed).shuffle(prompts)
    begin, pairs = time.monotonic(), []
    for start in range(0, len(prompts), PART):
        part = prompts[start : start + PART]
        pairs += list(zip(part, answerer.answers(part, answerer.tokens), strict=True))
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
        "--held-out", type=Path, nargs="*", default=[], help="directories answered first, as NAME.npz beside --out"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1, help="of the order of prompts")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of SGLang's engine, as JSON")
    args = parser.parse_args(arguments)
    lines = lines_of(args.prompts, "--prompts")
    held = {directory: lines_of(directory, "--held-out") for directory in args.held_out}
    answerer = Answerer(args.target, args.tokens, args.engine)
    for directory, of in held.items():
        answer(answerer, of, float("inf"), None).save(args.out.with_name(f"{directory.name}.npz"))
    made = answer(answerer, lines, args.seconds, args.seed)
    made.save(args.out)
    print(f"{len(made)} conversations, {len(made.ids)} tokens, in {args.out}", flush=True)
    answerer.engine.shutdown()


if __name__ == "__main__":
    main()
