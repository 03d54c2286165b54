"""Command line: `dflash-sglang pair`, `demo`, `doctor`, `bench`, `check`, `hot-vocab` and `patches`."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from dflash_sglang import __version__
from dflash_sglang.bench import arguments
from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.bench.trace import TraceError
from dflash_sglang.check import arguments as check_arguments
from dflash_sglang.check.prompts import chat_text
from dflash_sglang.checkpoint.fields import described
from dflash_sglang.checkpoint.files import no_such_directory
from dflash_sglang.demo.server import ServerFailed
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.pair import demo_prompts
from dflash_sglang.pair.target import NoTarget, pair_directories

_TAKE_LAUNCH_FLAGS = ("check", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a server failed, float32 outputs differ, a check finds a pair not fine, a
    text has too few tokens, a patch does not fit or a launch would be refused, 2 for an option that cannot be
    measured, read or written, 130 after Ctrl-C."""
    options, launch_flags = _parser().parse_known_args(argv)
    if launch_flags and options.command not in _TAKE_LAUNCH_FLAGS:
        options.parser.error(f"unrecognized arguments: {' '.join(launch_flags)}")
    if options.command == "doctor":
        from dflash_sglang.doctor.run import doctor

        return doctor(options, launch_flags)
    if options.command == "pair":
        return _with_servers("pair", _pair)
    if options.command == "bench":
        from dflash_sglang.bench.run import bench

        return _with_servers("bench", lambda: bench(options))
    if options.command == "check":
        from dflash_sglang.check.run import check

        return _with_servers("check", lambda: check(options, launch_flags))
    if options.command == "patches":
        return _patches(options)
    if options.command == "hot-vocab":
        return _hot_vocab(options)
    return _with_servers("demo", lambda: _demo(options))


def _with_servers(command: str, run: Callable[[], int]) -> int:
    """The exit code of a command whose servers end with it, by a failure, Ctrl-C or a signal, too."""
    try:
        with signals_as_exit():
            return run()
    except (BadSetting, NoTarget) as error:
        print(f"dflash-sglang {command}: {error}", file=sys.stderr)
        return 2
    except (ServerFailed, TraceError) as error:
        print(f"\ndflash-sglang {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ndflash-sglang {command}: interrupted, servers ended", file=sys.stderr)
        return 130


class _Command(argparse.ArgumentParser):
    """The parser of a subcommand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash-sglang", description="DFLASH for SGLang", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"dflash-sglang {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Command)
    commands.add_parser("pair", help="print the directories of the packaged pair as JSON; makes its target first")
    demo = commands.add_parser("demo", help="serve the packaged pair with and without DFLASH and compare")
    available = len(demo_prompts())
    demo.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    demo.add_argument("--prompts", type=_between(1, available), default=available, help="the first so many")
    demo.add_argument("--max-new-tokens", type=_between(2, 1024), default=128, help="at most (default 128)")
    doctor = commands.add_parser(
        "doctor",
        help="say what a launch would do, from checkpoints and flags alone",
        usage="dflash-sglang doctor --target DIR --draft DIR [--json] [flags of sglang.launch_server]",
    )
    doctor.add_argument(
        "--target", "--model-path", "--model", required=True, help="directory or name of the target"
    )
    doctor.add_argument(
        "--draft", "--speculative-draft-model-path", required=True, help="directory or name of the draft"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_parser(commands)
    check_arguments.add_parser(commands)
    hot = commands.add_parser(
        "hot-vocab", help="write the most frequent tokens of a text as a file for --speculative-token-map"
    )
    hot.add_argument("--tokenizer", required=True, help="directory or name of the target's tokenizer")
    hot.add_argument("--text", required=True, nargs="+", type=Path, help="files like what the server will write")
    hot.add_argument("--size", type=_between(16, 1 << 20), default=32768, help="tokens to keep (default 32768)")
    hot.add_argument("--out", required=True, type=Path)
    patches = commands.add_parser(
        "patches", help="print what is changed in SGLang, and whether SGLang is as known"
    )
    patches.add_argument("--sglang", type=Path, metavar="DIR", help="a folder with another `sglang` package")
    patches.add_argument(
        "--json", action="store_true", help="print each patch's hash in that SGLang, null where gone"
    )
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # whose usage is shown with an option that it does not know
    return parser


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: expected {low} to {high}")
        return value

    return number


def _pair() -> int:
    print(json.dumps(pair_directories(), indent=1))
    return 0


def _demo(options: argparse.Namespace) -> int:
    import torch
    from transformers import AutoTokenizer

    from dflash_sglang.demo.progress import Progress
    from dflash_sglang.demo.run import Setup, compare

    setup = Setup(**pair_directories(), gpu=torch.cuda.is_available())
    prompts = demo_prompts()[: options.prompts]
    tokenizer: Any = AutoTokenizer.from_pretrained(setup.target)
    texts = [chat_text(tokenizer, prompt.text) for prompt in prompts]
    progress = Progress(sys.stderr if options.json else sys.stdout)
    comparison = compare(setup, prompts, texts, options.max_new_tokens, progress)
    print(json.dumps(comparison.as_json()) if options.json else f"\n{comparison.as_table()}")
    return 0 if comparison.all.identical or comparison.dtype != "float32" else 1


def _hot_vocab(options: argparse.Namespace) -> int:
    import torch
    from transformers import AutoTokenizer

    from dflash_sglang.checkpoint.token_map import TooFewTokens, most_frequent, stretches

    def pieces(path: Path, file: TextIO) -> Iterator[str]:
        with _expected("--text", path, "a file of UTF-8 text"):
            yield from stretches(file)

    try:  # what can be known before the texts are read, before they are
        with contextlib.ExitStack() as stack:
            with _expected("--out", options.out, "a file that can be written"):
                _try_to_write(options.out)
            files = []
            for path in options.text:
                with _expected("--text", path, "a file of UTF-8 text"):
                    files.append(stack.enter_context(path.open(encoding="utf-8", newline="")))
            with _expected("--tokenizer", options.tokenizer, "the directory or name of a tokenizer"):
                if no_such_directory(options.tokenizer):
                    raise OSError("no such directory")
                tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
            texts = itertools.chain.from_iterable(map(pieces, options.text, files))
            tokens, share = most_frequent(tokenizer, texts, options.size)
        with _expected("--out", options.out, "a file that can be written"), options.out.open("wb") as out:
            torch.save(tokens, out)
    except BadSetting as error:
        print(f"dflash-sglang hot-vocab: {error}", file=sys.stderr)
        return 2
    except TooFewTokens as error:
        print(f"dflash-sglang hot-vocab: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(tokens)} of {len(tokenizer)} tokens, {share:.2%} of this text's")
    return 0


def _patches(options: argparse.Namespace) -> int:
    from dflash_sglang.patches.contract import MATCHES, states
    from dflash_sglang.patches.source import fingerprint
    from dflash_sglang.patches.table import PATCHES

    if options.sglang is not None and not (options.sglang / "srt").is_dir():
        print(
            f"dflash-sglang patches: --sglang {options.sglang}: expected a folder with srt/ in it", file=sys.stderr
        )
        return 2
    found = states(options.sglang)
    if options.json:
        print(json.dumps({patch.name: fingerprint(patch.source, options.sglang) for patch in PATCHES}, indent=1))
    else:
        for patch in PATCHES:
            print(f"{patch.name:22}{found[patch.name]:16}{patch.kind:20}{patch.target}")
            print(f"{'':22}{patch.why} {patch.worth} In {patch.by}.")
    differing = [name for name, state in found.items() if state != MATCHES]
    if not options.json:
        print(f"{len(found)} patches, {len(found) - len(differing)} of them fit")
    if differing:
        print(f"{len(differing)} of {len(found)} patches do not fit: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


@contextlib.contextmanager
def _expected(option: str, value: object, what: str) -> Iterator[None]:
    """What is raised by a file that is missing or something else becomes BadSetting."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise BadSetting(f"{option} {value}: expected {what} ({described(error)})") from error


def _try_to_write(path: Path) -> None:
    """Leaves no file where there was none, and one as it is. Raises OSError."""
    new = not (path.exists() or path.is_symlink())
    path.open("ab").close()
    if new:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
