"""Tokens per second of Step-3.5's own MTP layers on one GPU, paired: this package's worker, and SGLang's for them.

python -m bench.mtp_step --target DIR --draft DIR --out FILE [--shape flash] [--concurrency 1 32]
                         [--sampling greedy sampled] [--rounds 3] [--accept-length 3]

DIR is the target, twice. Its config.json is written if it is missing: the layers of Step-3.5-Flash, with 16 of its
288 experts (`SHAPES`). Weights are made up (`--load-format dummy`), and acceptance is forced. A whole number as
accept length makes every step commit as much, on both sides.

SGLang's worker is its multi-layer EAGLE one, with as many steps as there are layers. Both servers are up at once
and take turns; each proves which worker it has. With 60,000 tokens of KV they need 110 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report, serve
from bench.servers import Candidate, add_load_options, add_options, at_each_concurrency, parse
from bench.step3p5 import FOR_SGLANG, FULL, MTP_LAYERS, SLIDING, hub_config
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, PLAIN
from dflash_sglang.demo.server import Server, ServerFailed

EAGLE = "eagle"
# What a log has where the worker runs that the name says.
PROOF: Mapping[str, str] = {
    OURS: f"draft: MTP({MTP_LAYERS} layers",
    EAGLE: "Enable multi-layer EAGLE speculative decoding",
}
BOUNDS: Mapping[str, float] = {"greedy": 1.0, "sampled": 1.1}  # of SGLang's tokens/s, at least
# Fields of config.json, and "heads", query heads of full and of sliding layers. SGLang's worker takes layer 45 for
# its own: the target needs 45 layers.
LAYERS = 45
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "flash": dict(
        heads={FULL: 64, SLIDING: 96},
        num_attention_groups=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=11264,
        vocab_size=128896,
        sliding_window=512,
        moe_num_experts=16,
        moe_top_k=8,
        moe_intermediate_size=1280,
        share_expert_dim=1280,
    ),
    "tiny": dict(
        heads={FULL: 4, SLIDING: 6},
        num_attention_groups=2,
        head_dim=16,
        hidden_size=64,
        intermediate_size=96,
        vocab_size=320,
        sliding_window=24,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=32,
        share_expert_dim=32,
    ),
}
DENSE = 3  # the first layers have an MLP, all others experts


def config_of(shape: str) -> dict[str, Any]:
    """config.json of a target."""
    types = [FULL if layer % 4 == 0 else SLIDING for layer in range(LAYERS)] + [SLIDING] * MTP_LAYERS
    config = hub_config(
        types,
        sparse=range(DENSE, LAYERS),
        rope_base=5e6,
        rope_scaling=dict(factor=2.0, high_freq_factor=32.0, original_max_position_embeddings=131072),
        torch_dtype="bfloat16",
        max_position_embeddings=262144,
        max_seq_len=262144,
        bos_token_id=0,
        eos_token_id=1,
        moe_router_scaling_factor=3.0,
        swiglu_limits_shared=[0.0] * len(types),
        **SHAPES[shape],
    )
    return {**config, **FOR_SGLANG}


def parameters(shape: str) -> dict[str, int]:
    """Of the target, of its MTP layers, and of the embedding that SGLang's worker has for each of them."""
    sizes = SHAPES[shape]
    hidden, head_dim, experts = sizes["hidden_size"], sizes["head_dim"], sizes["moe_num_experts"]
    embedding = sizes["vocab_size"] * hidden

    def attention(kind: str) -> int:
        heads = sizes["heads"][kind]
        return hidden * (2 * heads * head_dim + heads + 2 * sizes["num_attention_groups"] * head_dim)

    full = len(range(0, LAYERS, 4))
    dense = 3 * hidden * sizes["intermediate_size"]
    routed, shared = sizes["moe_intermediate_size"], sizes["share_expert_dim"]
    sparse = 3 * hidden * (routed * experts + shared) + hidden * experts
    target = full * attention(FULL) + (LAYERS - full) * attention(SLIDING)
    target += DENSE * dense + (LAYERS - DENSE) * sparse + 2 * embedding
    layer = attention(SLIDING) + dense + 2 * hidden * hidden + embedding
    return {
        "target": target,
        "MTP layers": MTP_LAYERS * layer,
        "SGLang's worker besides": MTP_LAYERS * embedding,
    }


def candidates(target: str) -> list[Candidate]:
    eagle = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", target)
    steps = ("--speculative-num-steps", str(MTP_LAYERS), "--speculative-eagle-topk", "1")
    rows = ("--speculative-num-draft-tokens", str(MTP_LAYERS + 1))
    return [Candidate(OURS, OURS), Candidate(EAGLE, PLAIN, (*eagle, *steps, *rows))]


def measure(servers: Mapping[str, Server], arguments: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    """{sampling: {server: {figure: [one value per round]}}}. Raises ServerFailed for another worker than named."""
    for name, server in servers.items():
        if PROOF[name] not in server.log_text():
            raise ServerFailed(f"{name}: another worker runs than expected, {server.log} lacks {PROOF[name]!r}")
    return serve.measure(servers, arguments, concurrency)


def claims(figures: Mapping[str, Any], length: float) -> list[dict[str, Any]]:
    """figures: {concurrency: what `measure` gives}; length: accept length that was forced."""
    out = []
    for concurrency, by_sampling in figures.items():
        for sampling, servers in by_sampling.items():
            where = f"at concurrency {concurrency}, {sampling}, median of rounds"
            rates = {name: statistics.median(of["tokens_per_second"]) for name, of in servers.items()}
            if EAGLE in rates:
                what = f"tokens/s over those of SGLang's worker {where}"
                out.append(report.at_least(what, round(rates[OURS] / rates[EAGLE], 4), BOUNDS[sampling]))
            for name, of in servers.items():
                off = abs(statistics.median(of["accept_length"]) / length - 1)
                out.append(report.at_most(f"accept length of {name} {where}, off {length:g}", round(off, 4), 0.02))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, EAGLE], accept_length=3)
    add_load_options(parser, [1, 32])
    parser.add_argument("--shape", choices=list(SHAPES), default="flash")
    parser.add_argument("--sampling", nargs="+", choices=list(BOUNDS), default=list(BOUNDS))
    arguments = parse(parser)
    if Path(arguments.target).resolve() != Path(arguments.draft).resolve():
        parser.error(f"--draft {arguments.draft}: expected {arguments.target}, the target's own layers draft")
    Path(arguments.target).mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), (Path(arguments.target) / "config.json").open("x") as file:
        json.dump(config_of(arguments.shape), file, indent=1)
    for what, count in parameters(arguments.shape).items():
        print(f"{what}: {count / 1e9:.2f} billion parameters, {2 * count / 1e9:.1f} GB in bfloat16", flush=True)
    return at_each_concurrency(
        "bench.mtp_step",
        [one for one in candidates(arguments.target) if one.name in arguments.kinds],
        arguments,
        lambda servers, concurrency: measure(servers, arguments, concurrency),
        lambda figures: claims(figures, arguments.accept_length),
    )


if __name__ == "__main__":
    sys.exit(main())
