"""Tokens per second with copies over those without, paired, on edits and on ordinary texts.

python -m bench.copies --target DIR --draft DIR --out FILE [--concurrency 1 8 32] [--rounds 3] [--seconds 5]
                       [--texts rewrite edits code prose] [--inside better | alike] [--width N]
                       [--copy block | 64]

Two servers of random weights, with copies and without, have every load in turn. The target is said to write texts
(`dflash_sglang.bench.forced`): copies are found in them for real, and the draft proposes what the
trained pair's draft had accepted elsewhere (`bench.record`). `--inside better`: where the last 8 tokens stood
before in the text, it has the acceptance of the pair's easiest texts, since a draft copies, too. How well it does
so is assumed.

The texts come from the Python that runs this, and its version decides them:

    rewrite    a part of a module, then the same with one line in twelve changed, dropped or followed by one more
    edits      the same part, then a block for each of these changes: lines as they were, and as they should be
    code       a part of a module, then what follows
    prose      the same of Python's reference manual (`pydoc_data.topics`)

A token is at most 7 letters of a word, a line break with the indent after it, or any other character: 3.2
characters on average.
"""

from __future__ import annotations

import functools
import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from bench import report
from bench.load import Load, OfTexts, Outcome
from bench.servers import Candidate, add_options, parse, together
from bench.steady import SPREAD, take_turns, watch
from bench.widths import BLOCK, PAIR_RECORD, since, told
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV, FORCED_ENV

MODULES = (
    "argparse ast bdb calendar configparser contextlib csv dataclasses difflib dis doctest enum fractions ftplib "
    "functools gettext imaplib inspect ipaddress locale mailbox mimetypes optparse pdb pickle pickletools "
    "platform plistlib poplib pprint pstats random shutil smtplib ssl statistics string tarfile tempfile textwrap "
    "threading tokenize traceback turtle typing unittest/mock uuid warnings"
).split()
KINDS = ("rewrite", "edits", "code", "prose")
PIECE = re.compile(r"\n *| ?[A-Za-z]{1,7}| ?[0-9_]+| +|.", re.DOTALL)
EACH = 32  # texts of a kind
TRIES = 1000  # of a place in a module, for a text that is long enough
EVERY = 12  # lines, one change
CONTEXT = 3  # lines before and after a change
MATCH = 8  # tokens
EASIEST = 12  # of the pair's 40 texts: accept length 9.0 of 16, of all of them 6.0
BOUNDS = {
    "rewrite": {"1": 1.3, "8": 1.2},
    "edits": {"1": 1.1, "8": 1.05},
    "code": dict.fromkeys(("1", "8", "32"), 0.995),
    "prose": dict.fromkeys(("1", "8", "32"), 0.995),
}
WITH, WITHOUT = OURS, f"{OURS}_without"


@functools.cache
def files() -> list[list[str]]:
    """Lines of each module."""
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / f"{module}.py").read_text().splitlines(keepends=True) for module in MODULES]


@functools.cache
def manual() -> list[str]:
    """Lines."""
    return "\n".join(topics[name] for name in sorted(topics)).splitlines(keepends=True)


def changed(lines: Sequence[str], others: Sequence[str], rng: random.Random) -> list[tuple[int, list[str]]]:
    """(line, what stands there instead) of a revision of these lines."""
    out = []
    for at in range(rng.randrange(EVERY), len(lines), EVERY):
        more, line = rng.choice(others), lines[at]
        words = re.findall(r"[A-Za-z_]{3,}", line)
        renamed = (
            line.replace(words[-1], f"{words[-1]}_{rng.choice(('new', 'all', 'of', 'at'))}") if words else more
        )
        out.append((at, rng.choice(([renamed], [renamed], [], [line, more]))))
    return out


def rewritten(lines: Sequence[str], changes: Sequence[tuple[int, list[str]]]) -> list[str]:
    instead = dict(changes)
    return [new for at, line in enumerate(lines) for new in instead.get(at, [line])]


def as_edits(lines: Sequence[str], changes: Sequence[tuple[int, list[str]]]) -> list[str]:
    out: list[str] = []
    for at, new in changes:
        before, after = lines[max(0, at - CONTEXT) : at], lines[at + 1 : at + 1 + CONTEXT]
        search, replace = [*before, lines[at], *after], [*before, *new, *after]
        out += ["<<<<<<< SEARCH\n", *search, "=======\n", *replace, ">>>>>>> REPLACE\n\n"]
    return out


def text_of(kind: str, number: int, prompt: int, answer: int) -> tuple[list[str], list[str]]:
    """Tokens of a prompt and of its answer: so many at least, or a few fewer of a prompt. The same every time."""
    rng = random.Random(f"{kind} {number}")
    for _ in range(TRIES):
        lines = manual() if kind == "prose" else rng.choice(files())
        start = rng.randrange(len(lines))
        part, tokens = list[str](), 0
        for line in lines[start:]:
            if tokens + len(PIECE.findall(line)) > prompt:
                break
            part.append(line)
            tokens += len(PIECE.findall(line))
        following = lines[start + len(part) :]
        if kind in ("rewrite", "edits"):
            changes = changed(part, rng.choice(files()), rng)
            following = (rewritten if kind == "rewrite" else as_edits)(part, changes)
        said = PIECE.findall("".join(following))
        if len(said) >= answer:
            return PIECE.findall("".join(part)), said[:answer]
    raise ValueError(
        f"{kind} of {prompt} tokens: found no answer of {answer} tokens. Raise --input, or lower --output."
    )


def repeats(tokens: Sequence[int]) -> list[bool]:
    """Of each token: whether it and those before it, MATCH together, stood in the text before."""
    seen, out = set[tuple[int, ...]](), []
    for end in range(1, len(tokens) + 1):
        last = tuple(tokens[max(0, end - MATCH) : end])
        out.append(len(last) == MATCH and last in seen)
        seen.add(last)
    return out


class Texts:
    """Texts of these kinds, `EACH` of each, as token ids; the first of a text is its number."""

    def __init__(self, kinds: Sequence[str], prompt: int, answer: int, ids: range) -> None:
        words: dict[str, int] = {}
        self.prompts: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
        self.tokens: list[list[int]] = []
        for kind in kinds:
            for number in range(EACH):
                before, after = (
                    [ids[words.setdefault(word, len(words)) % len(ids)] for word in of]
                    for of in text_of(kind, number, prompt, answer)
                )
                before.insert(0, len(self.tokens))
                self.prompts[kind].append(before)
                self.tokens.append(before + after)

    def write(self, path: Path, inside: str) -> dict[str, Any]:
        """The file of `texts` in DFLASH_SGLANG_FORCED; inside: as the option. Returns what is in it, by kind."""
        record = AcceptanceRecord.load(PAIR_RECORD)
        of_text = [record.accepted[record.prompts == text].mean() for text in range(record.prompts.max() + 1)]
        hard = np.arange(len(record.prompts))
        easiest = np.argsort(of_text)[::-1][:EASIEST]
        easy = np.flatnonzero(np.isin(record.prompts, easiest)) if inside == "better" else hard
        places, numbers, told = list[int](), list[int](), dict[str, Any]()
        for number, text in enumerate(self.tokens):
            start = number * len(hard) // len(self.tokens)
            again = repeats(text)
            of = ((easy if repeated else hard) for repeated in again)
            places += [int(pool[(start + at) % len(pool)]) for at, pool in enumerate(of)]
            numbers += [number] * len(text)
            kind = list(self.prompts)[number // EACH]
            told.setdefault(kind, []).append(statistics.fmean(again[len(self.prompts[kind][number % EACH]) :]))
        likeliest = AcceptanceRecord(
            record.logprobs[places, :, :1], record.ranks[places].clip(max=1), np.array(numbers, np.uint8)
        )
        np.savez(path, **likeliest._asdict(), tokens=np.array([token for text in self.tokens for token in text]))
        return {kind: round(statistics.fmean(shares), 4) for kind, shares in told.items()}


def require_texts(server: Server, texts: Texts) -> None:
    """Raises ValueError where a server writes something else than the texts."""
    for kind, prompts in texts.prompts.items():
        prompt, text = prompts[-1], texts.tokens[prompts[-1][0]]
        answer = server.generate(
            input_ids=prompt, sampling_params=dict(temperature=0, max_new_tokens=40, ignore_eos=True)
        )
        found, expected = answer["output_ids"][1:], text[len(prompt) + 1 : len(prompt) + 40]
        if found != expected:
            raise ValueError(f"{kind}: expected tokens {expected[:8]}... of the text, found {found[:8]}...")


def copied(server: Server) -> list[int]:
    """[proposed, accepted] copies since start-up."""
    [state] = server.get("/server_info")["internal_states"]
    return [state["dflash_copy"][name] for name in ("proposed", "accepted")]


def measure(servers: Mapping[str, Server], load: OfTexts, rounds: int, seconds: float) -> dict[str, Any]:
    """{server: {figure: [one value per round]}}, with `copied`: [proposed, accepted], and `by_width`: what `since`
    gives."""
    counts: list[list[int]] = []
    steps: dict[str, list[dict[str, list[float]]]] = {name: [] for name in servers}

    def measured(name: str, server: Server, load: Load) -> Outcome:
        before, widths = copied(server) if name == WITH else [], told(server)
        outcome = watch(server, load, seconds)
        steps[name].append(since(widths, told(server)))
        if name == WITH:
            counts.append([now - then for now, then in zip(copied(server), before, strict=True)])
        return outcome

    found: dict[str, Any] = take_turns(servers, dict.fromkeys(servers, load), rounds, measured, kept=list(servers))
    found[WITH]["copied"] = counts
    for name, of_rounds in steps.items():
        found[name]["by_width"] = of_rounds
    return found


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """figures: {kind: {concurrency: what `measure` gave}}"""
    out = []
    for kind, by_concurrency in figures.items():
        for concurrency, of in by_concurrency.items():
            if concurrency in BOUNDS[kind]:
                on, off = (statistics.median(of[name]["tokens_per_second"]) for name in (WITH, WITHOUT))
                what = f"{kind}, concurrency {concurrency}: tokens/s over those without copies, medians of rounds"
                out.append(report.at_least(what, round(on / off, 4), BOUNDS[kind][concurrency]))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS], accept_length=0)
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer, on average")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a load that are measured")
    parser.add_argument("--inside", choices=["better", "alike"], default="better")
    parser.add_argument("--copy", type=lambda copy: copy if copy == "block" else int(copy), default="block")
    parser.add_argument("--width", type=int, help="of every step; chosen by default")
    parser.set_defaults(input=1536)
    arguments = parse(parser)
    longest, most = int((1 + SPREAD) * arguments.output) + 1, max(arguments.concurrency)
    texts = Texts(arguments.texts, arguments.input, longest + BLOCK, range(*arguments.token_ids))
    figures: dict[str, Any] = {}
    status = 1
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "texts.npz"
        shares = texts.write(path, arguments.inside)
        settings, forced = {"width": arguments.width or {}}, {FORCED_ENV: json.dumps({"texts": str(path)})}
        candidates = [
            Candidate(
                name,
                OURS,
                environment={CONFIG_ENV: json.dumps({**settings, "copy": copy}), **forced},
                accept_length=0,
            )
            for name, copy in ((WITH, arguments.copy), (WITHOUT, "off"))
        ]
        tokens = most * (arguments.input + longest + 2 * BLOCK)  # no request waits for another one's end
        with together(candidates, arguments, requests=most, tokens=tokens) as servers:
            for server in servers.values():
                require_texts(server, texts)
            for kind in arguments.texts:
                for concurrency in arguments.concurrency:
                    load = OfTexts(concurrency, 1, output_tokens=arguments.output, texts=texts.prompts[kind])
                    of_kind = figures.setdefault(kind, {})
                    of_kind[str(concurrency)] = measure(servers, load, arguments.rounds, arguments.seconds)
                    print(kind, concurrency, "done", flush=True)
                # What is there, should the next kind not come.
                status = report.finish(
                    "bench.copies", arguments.out, claims(figures), figures=figures, answers_that_repeat=shares
                )
    return status


if __name__ == "__main__":
    sys.exit(main())
