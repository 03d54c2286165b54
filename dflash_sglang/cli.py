"""Command line: `dflash-sglang pair` and `dflash-sglang demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from dflash_sglang import __version__
from dflash_sglang.pair import held_out_prompts, pair_directories


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a server failed or float32 outputs differ, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    if options.command == "pair":
        print(json.dumps(pair_directories(), indent=1))
        return 0
    return _demo(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash-sglang", description="DFLASH for SGLang")
    parser.add_argument("--version", action="version", version=f"dflash-sglang {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pair", help="print the directories of the packaged target and draft as JSON")
    demo = commands.add_parser("demo", help="serve the packaged pair with and without DFLASH and compare")
    available = len(held_out_prompts())
    demo.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    demo.add_argument("--prompts", type=_between(1, available), default=8, help="held-out prompts (default 8)")
    demo.add_argument("--max-new-tokens", type=_between(2, 1024), default=128, help="default 128")
    return parser


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value}: expected {low} to {high}")
        return value

    return number


def _demo(options: argparse.Namespace) -> int:
    import torch

    from dflash_sglang.demo.launch import Setup
    from dflash_sglang.demo.progress import Progress
    from dflash_sglang.demo.run import compare
    from dflash_sglang.demo.server import ServerFailed

    setup = Setup(**pair_directories(), gpu=torch.cuda.is_available())
    prompts = spread(held_out_prompts(), options.prompts)
    try:
        comparison = compare(
            setup, prompts, options.max_new_tokens, Progress(sys.stderr if options.json else sys.stdout)
        )
    except ServerFailed as error:
        print(f"dflash-sglang demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndflash-sglang demo: interrupted, servers ended", file=sys.stderr)
        return 130
    print(json.dumps(comparison.as_json()) if options.json else f"\n{comparison.as_table()}")
    return 0 if comparison.identical or comparison.dtype != "float32" else 1


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """`count` of the prompts, evenly spaced from the first on."""
    return [prompts[i * len(prompts) // count] for i in range(count)]


if __name__ == "__main__":
    sys.exit(main())
