"""Writes a random target and draft in the shapes of published ones: `dflash_sglang.bench.random_pair` lists them.

python -m bench.random_pair DIRECTORY [--shape NAME] [--layers N] [--config-only]   ->  DIRECTORY/{target,draft}

`--config-only` writes the target's config.json without weights, for servers with `--load-format dummy
--speculative-draft-load-format auto`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_sglang.bench.random_pair import SHAPES, write_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the target; the shape's own by default")
    parser.add_argument("--config-only", action="store_true", help="no weights of the target")
    arguments = parser.parse_args()
    write_pair(arguments.directory, arguments.shape, arguments.layers, arguments.config_only)


if __name__ == "__main__":
    main()
