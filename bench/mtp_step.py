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
from dflash_sglang.demo.launch import OURS, PLAIN
from dflash_sglang.demo.server import Server, ServerFailed

EAGLE = "eagle"
MTP_LAYERS = 3
# What a log has where the worker runs that the name says.
PROOF: Mapping[str, str] = {
    OURS: f"draft: MTP({MTP_LAYERS} layers",
    EAGLE: "Enable multi-layer EAGLE speculative decoding",
}
BOUNDS: Mapping[str, float] = {"greedy": 1.0, "sampled": 1.1}  # of SGLang's tokens/s, at least
FULL, SLIDING = "full_attention", "sliding_attention"
# Layers, hidden and MLP size, query heads of full and of sliding layers, KV heads, head size, vocabulary, experts,
# how many a token has, their size, sliding window. SGLang's worker takes layer 45 for its own: it needs 45 layers.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "flash": (45, 4096, 11264, 64, 96, 8, 128, 128896, 16, 8, 1280, 512),
    "tiny": (45, 64, 96, 4, 6, 2, 16, 320, 4, 2, 32, 24),
}


def config_of(shape: str) -> dict[str, Any]:
    """config.json of a target, in the hub's form: lists by layer cover the MTP layers."""
    layers, hidden, mlp, heads, sliding_heads, groups, dim, vocab, experts, chosen, expert, window = SHAPES[shape]
    types = [FULL if layer % 4 == 0 else SLIDING for layer in range(layers)] + [SLIDING] * MTP_LAYERS
    return dict(
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        torch_dtype="bfloat16",
        num_hidden_layers=layers,
        num_nextn_predict_layers=MTP_LAYERS,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_attention_groups=groups,
        head_dim=dim,
        vocab_size=vocab,
        max_position_embeddings=262144,
        max_seq_len=262144,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        layer_types=types,
        sliding_window=window,
        attention_other_setting=dict(
            attention_type=SLIDING, num_attention_heads=sliding_heads, num_attention_groups=groups, head_dim=dim
        ),
        use_head_wise_attn_gate=True,
        rope_theta=[5e6 if kind == FULL else 1e4 for kind in types],
        partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in types],
        rope_scaling=dict(
            rope_type="llama3",
            factor=2.0,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
            original_max_position_embeddings=131072,
        ),
        yarn_only_types=[FULL],
        moe_layers_enum=",".join(map(str, range(3, layers))),
        moe_num_experts=experts,
        moe_top_k=chosen,
        moe_intermediate_size=expert,
        share_expert_dim=expert,
        moe_router_scaling_factor=3.0,
        use_moe_router_bias=True,
        need_fp32_gate=True,
        norm_expert_weight=True,
        swiglu_limits=[0.0] * len(types),
        swiglu_limits_shared=[0.0] * len(types),
        per_layer_config={},  # not the hub's: else SGLang 0.5.23 asks transformers for one number of heads
    )


def parameters(shape: str) -> dict[str, int]:
    """Of the target, of its MTP layers, and of the embedding that SGLang's worker has for each of them."""
    layers, hidden, mlp, heads, sliding_heads, groups, dim, vocab, experts, _, expert, _ = SHAPES[shape]

    def attention(of_layer: int) -> int:
        return hidden * (2 * of_layer * dim + of_layer + 2 * groups * dim)

    full = len(range(0, layers, 4))
    dense = 3 * hidden * mlp
    sparse = 3 * hidden * expert * (experts + 1) + hidden * experts
    target = full * attention(heads) + (layers - full) * attention(sliding_heads)
    target += 3 * dense + (layers - 3) * sparse + 2 * vocab * hidden
    layer = attention(sliding_heads) + dense + 2 * hidden * hidden + vocab * hidden
    return {
        "target": target,
        "MTP layers": MTP_LAYERS * layer,
        "SGLang's worker besides": MTP_LAYERS * vocab * hidden,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
