"""Drafts of the served families beside the trained target, each near enough to the trained draft, or to how often
letters follow each other, that some of its proposals are accepted.

`spread` gives checkpoints another order of tokens: letters then lie in the shards of two ranks.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tests.support import reference_dflash2 as dflash2
from tests.support import reference_dspark as dspark
from tests.support.draft_formats import speculators_config, speculators_dflash2, vocabulary_tensors
from tests.support.reference_domino import OF_DOMINO
from tests.support.reference_gemma4 import gemma4_config, gemma4_tensors
from tests.support.reference_layers import LAGUNA, SWIGLU, is_norm, laguna_tensors
from tests.support.tiny import write_checkpoint
from training.pair import held_out_prompts, pair_directories
from training.quantise import SCHEMES, quantise

TARGET, PLAIN_DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
VOCABULARY = 320
BLOCK, ROWS = 16, 7  # of drafts with the trained one's block, and of DSpark drafts, whose block has one token more
STATE, GRU_RANK = 192, 96  # of Domino
MARKOV_RANK = 32
SCALE = 0.15  # of the random additions: about half of the plain draft's acceptance is left
SIZES = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=32, selector_top_k=16)
REDUCED = "vanilla, a reduced vocabulary"
KEPT = random.Random(5).sample(range(256), 160)  # tokens of it, in its order
NVFP4 = SCHEMES["nvfp4-a16"]
_PER_TOKEN = ("embed_tokens", "lm_head", "markov_w1", "markov_w2", "codebook", "embed_proj.2", "t2d")

Draft = tuple[dict[str, Any], dict[str, Tensor]]  # config.json, tensors


def place(byte: int) -> int:
    """The token of a byte in `spread` checkpoints: odd bytes lie in the second half of the vocabulary."""
    return byte // 2 + VOCABULARY // 2 * (byte % 2)


def spread(checkpoint: Path, directory: Path) -> Path:
    """A copy of a target or draft of byte tokens whose tokens are `place(byte)`."""
    config = json.loads((checkpoint / "config.json").read_text())
    for fields in (config, config.get("dflash_config", {})):
        if "mask_token_id" in fields:
            fields["mask_token_id"] = place(fields["mask_token_id"])
    bytes_of = sorted(range(VOCABULARY), key=place)
    tensors = load_file(checkpoint / "model.safetensors")
    reduced = "d2t" in tensors
    for name, tensor in tensors.items():
        of_token = any(part in name for part in _PER_TOKEN)
        if of_token and tensor.ndim and len(tensor) == VOCABULARY:
            tensors[name] = tensor[bytes_of]
        else:
            assert not of_token or not tensor.ndim or reduced, f"{name}: {tuple(tensor.shape)}"
    if reduced:
        kept = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
        tensors |= vocabulary_tensors([place(token) for token in kept], VOCABULARY)
    return write_checkpoint(directory, config, tensors)


def trained() -> Draft:
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    return config, load_file(PLAIN_DRAFT / "model.safetensors")


def write_trained(directory: Path, config: dict[str, Any], added: dict[str, Tensor]) -> Path:
    """The trained plain draft with a config and tensors of a family."""
    added = {name: one.bfloat16() if one.is_floating_point() else one for name, one in added.items()}
    return write_checkpoint(directory, config, trained()[1] | added)


def letter_logprobs(vocab: int) -> Tensor:
    """[vocab, vocab]: how often a byte follows another in English, which two families draft by."""
    counts = torch.full((vocab, vocab), 0.05)
    for before, after in pairwise("\n".join(held_out_prompts()).encode()):
        counts[before, after] += 1
    return (counts / counts.sum(1, keepdim=True)).log()


def dflash2_draft(directory: Path, speculators: bool = False) -> Path:
    """With random convolutions and a random selector, near enough to nothing that it is still accepted."""
    config, _ = trained()
    config["dflash_config"] |= {**SIZES, "block_size": config.pop("block_size")}
    config["architectures"] = ["DFlash2DraftModel"]
    added = dflash2.added_tensors(config, scale=SCALE)
    return write_trained(directory, speculators_dflash2(config) if speculators else config, added)


def domino_draft(directory: Path, shifted: bool) -> Path:
    """With a GRU whose state tells the letter that comes next: `_next_letters`.

    Where labels are shifted, rows that were trained for the token of their own place propose the next one: the GRU
    decides. Elsewhere it counts less, as rows know better.
    """
    config, _ = trained()
    sizes = dict(gru_hidden_dim=STATE, emb_dim=GRU_RANK)
    config["dflash_config"] |= {**OF_DOMINO, **sizes, "shift_label": shifted}
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    added = _next_letters(embedding)
    added["embed_proj.2.weight"] *= 1 if shifted else 0.2
    return write_trained(directory, config, added)


def _next_letters(embedding: Tensor) -> dict[str, Tensor]:
    """Domino's tensors for an embedding [vocab, hidden]: a GRU whose state is half of the state before and half of
    the token it reads, and scores of how often a byte follows the last one in English, as far as the state tells.
    """
    vocab, hidden = embedding.shape
    text = list("\n".join(held_out_prompts()).encode())
    generator = torch.Generator().manual_seed(5)
    read = torch.randn(STATE, hidden, generator=generator) / embedding.std() * hidden**-0.5
    of_state = torch.randn(GRU_RANK, STATE, generator=generator) * 4 * STATE**-0.5
    state, states = torch.zeros(STATE), []
    for row in torch.tanh(embedding[text[:20_000]] @ read.T):
        state = (state + row) / 2
        states.append(state)
    vectors = functional.silu(torch.stack(states) @ of_state.T)
    wanted = 2 * letter_logprobs(vocab)[text[: len(states)]]
    ridge = vectors.T @ vectors + torch.eye(GRU_RANK)
    return {
        "prefix_gru.weight_ih_l0": torch.cat((torch.zeros(2 * STATE, hidden), read)),
        "prefix_gru.weight_hh_l0": torch.zeros(3 * STATE, STATE),
        "embed_proj.0.weight": torch.cat((torch.zeros(GRU_RANK, hidden), of_state), dim=1),
        "embed_proj.2.weight": torch.linalg.solve(ridge, vectors.T @ wanted).T.contiguous(),
    }


def dspark_draft(directory: Path, kind: str = "vanilla", speculators: bool = False) -> Path:
    """With a Markov head of `pairs_of_letters`: under a gate that is nearly open, through a state that keeps
    nothing, or of a part of the tokens, with their rows of the target's head. Rows were trained for the token of
    their own place and propose the next one, so that the head decides."""
    config, _ = trained()
    config |= dict(architectures=["Qwen3DSparkModel"], block_size=ROWS, markov_rank=MARKOV_RANK)
    config |= dict(markov_head_type="vanilla" if kind == REDUCED else kind)
    added = {**dspark.added_tensors(config), **pairs_of_letters(config["vocab_size"])}
    if kind == REDUCED:
        config["draft_vocab_size"] = len(KEPT)
        added["markov_head.markov_w2.weight"] = added["markov_head.markov_w2.weight"][KEPT]
        added["lm_head.weight"] = load_file(TARGET / "model.safetensors")["lm_head.weight"][KEPT]
        added |= vocabulary_tensors(KEPT, config["vocab_size"])
    if kind == "gated":
        added["markov_head.gate_proj.weight"] *= 0.1
        added["markov_head.gate_proj.bias"] = torch.full((MARKOV_RANK,), 4.0)
    if kind == "rnn":
        joint = added["markov_head.joint_proj.weight"].zero_()
        joint[2 * MARKOV_RANK :, MARKOV_RANK : 2 * MARKOV_RANK].fill_diagonal_(0.02)
        added["markov_head.joint_proj.bias"].zero_()
        added["markov_head.markov_w2.weight"] *= 50
    if speculators:
        names = ("architectures", "markov_rank", "markov_head_type", "draft_vocab_size")
        fields = {name: config[name] for name in names if name in config}
        config = speculators_config(config, speculators_model_type="dspark", sample_from_anchor=True, **fields)
    return write_trained(directory, config, added)


def pairs_of_letters(vocab: int) -> dict[str, Tensor]:
    """A Markov head of how often a byte follows another in English."""
    u, s, v = torch.linalg.svd(3 * letter_logprobs(vocab))
    kept = s[:MARKOV_RANK].sqrt()
    w1, w2 = u[:, :MARKOV_RANK] * kept, v[:MARKOV_RANK].T * kept
    return {"markov_head.markov_w1.weight": w1.contiguous(), "markov_head.markov_w2.weight": w2.contiguous()}


def gemma4_draft(directory: Path) -> Path:
    """A DSpark draft of Gemma 4's layers, whose rows say how often a byte is: channel 0 of a row is one number in
    every row, and the head reads it."""
    of_target = json.loads((TARGET / "config.json").read_text())
    sizes = {name: of_target[name] for name in ("hidden_size", "vocab_size")}
    config = gemma4_config(**sizes, markov_rank=MARKOV_RANK, num_target_layers=of_target["num_hidden_layers"])
    config["target_layer_ids"] = [0, of_target["num_hidden_layers"] - 1]
    tensors = gemma4_tensors(config)
    tensors["embed_tokens.weight"][:, 0] = 8.0
    counts = torch.full((config["vocab_size"],), 0.05)
    for byte, count in Counter("\n".join(held_out_prompts()).encode()).items():
        counts[byte] += count
    often = (counts / counts.sum()).log()
    tensors["lm_head.weight"] *= 0.1
    tensors["lm_head.weight"][:, 0] = (often - often.mean()) / config["hidden_size"] ** 0.5
    return write_checkpoint(directory, config, {**tensors, **pairs_of_letters(config["vocab_size"])})


def gemma_norms_and_swigluoai(directory: Path) -> Path:
    """The trained draft, written down for norms that scale by 1 + weight, and for gate * sigmoid(alpha * gate) *
    (up + 1), where silu(gate) * up is what it was trained with: with gates a part of alpha as large and `up` four
    times, it is silu(gate) * (up + 1 / 4)."""
    config, tensors = trained()
    tensors = {name: tensor.float() - float(is_norm(name)) for name, tensor in tensors.items()}
    alpha, times = SWIGLU["swiglu_alpha"], 4
    scales = {"gate_proj": 1 / alpha, "up_proj": times, "down_proj": alpha / times}
    tensors = {name: tensor * scales.get(name.split(".")[-2], 1) for name, tensor in tensors.items()}
    config |= {**SWIGLU, "use_gemma_norm": True, "dtype": "float32", "swiglu_limit": 4.0}
    return write_checkpoint(directory, config, tensors)


def laguna(directory: Path) -> Path:
    """The trained draft with random norms of features and gates, in the class that published drafts name."""
    config, tensors = trained()
    config |= {name: LAGUNA[name] for name in ("architectures", "gating")}
    config |= {"model_type": "laguna", "dtype": "float32"}
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return write_checkpoint(directory, config, {**tensors, **laguna_tensors(config)})


def nvfp4(directory: Path) -> Path:
    """The trained draft and the embedding of its target, in NVFP4."""
    config, tensors = trained()
    config |= {"has_embed_tokens": True, "quantization_config": dict(NVFP4.config)}
    embedding = {"embed_tokens.weight": load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]}
    return write_checkpoint(directory, config, quantise({**tensors, **embedding}, NVFP4))
