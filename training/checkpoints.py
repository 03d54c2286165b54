"""The two checkpoints as files: configs, byte tokenizer, weights in bf16 under the published names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.data import BOS, EOS, MASK, PAD
from training.modeling import DraftModel

VOCAB = 320
"""256 bytes, four specials, padded to a multiple of 64."""

MAX_POSITIONS = 4096
SPECIALS = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>", MASK: "<|mask|>"}

HIDDEN = 256
"""Of the pair in the package."""

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


def _of_width(hidden: int) -> dict[str, Any]:
    """What both models share. Heads have 64 channels, and two query heads share one key and value."""
    if hidden % 128:
        raise ValueError(f"hidden={hidden}: expected a multiple of 128, two query heads of 64 channels")
    heads = hidden // 64
    return {**_SHARED, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads // 2}


def target_config(hidden: int = HIDDEN) -> Qwen3Config:
    """Five Qwen3 layers with full attention."""
    return Qwen3Config(
        **_of_width(hidden),
        num_hidden_layers=5,
        intermediate_size=3 * hidden,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=["Qwen3ForCausalLM"],
    )


def draft_config(hidden: int = HIDDEN) -> dict[str, Any]:
    """Three layers, sliding but for the last; features from target layers 0, 2 and the last one.

    No causality flag: by the published default the sliding layers are causal and the full one is not.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_of_width(hidden),
        "num_hidden_layers": 3,
        "intermediate_size": 4 * hidden,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 128,
        "max_window_layers": 3,
        "block_size": 16,
        "num_target_layers": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]},
        "use_cache": True,
        "dtype": "bfloat16",
    }


# The target continues text: a conversation is its messages, one after the other.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, id = byte value; decode(encode(text)) == text for any text."""
    symbols = _byte_symbols()
    core = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        pad_token=SPECIALS[PAD],
        mask_token=SPECIALS[MASK],
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The ByteLevel alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def round_to_bf16(model: nn.Module) -> None:
    """Rounds every weight to a bf16 value in place, the dtype unchanged."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def _bf16(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: w.detach().bfloat16().cpu().contiguous() for name, w in model.state_dict().items()}


def save_target(model: Qwen3ForCausalLM, directory: Path) -> None:
    """config.json, generation_config.json, tokenizer files and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = target_config(model.config.hidden_size)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    save_file(_bf16(model), directory / "model.safetensors", metadata={"format": "pt"})


def save_draft(model: DraftModel, config: Mapping[str, Any], directory: Path) -> None:
    """config.json and model.safetensors with the z-lab names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(_bf16(model), directory / "model.safetensors", metadata={"format": "pt"})
