"""Random weights in the shapes of a published target and its block-16 draft: for step time, not for acceptance.

python -m dflash_sglang.bench.random_pair DIRECTORY [--shape NAME] [--head NAME] [--window N] [--layers N]
                                          [--config-only]

writes DIRECTORY/target and DIRECTORY/draft. `--config-only` leaves out the target's weights, for servers with
`--load-format dummy --speculative-draft-load-format auto`. `--window`: every layer of the draft slides over it.
`--head dspark`, a vanilla Markov head, `--head domino` and `--head dflash2` have the sizes of the published ones;
their blocks verify 16 tokens, too.

| shape | target | draft |
|---|---|---|
| qwen3-4b | Qwen3-4B: 36 layers (8.0 GB) | 5 layers (1.1 GB) |
| qwen3-8b | Qwen3-8B: 36 layers (16.4 GB) | 5 layers (2.1 GB) |
| qwen3-30b-a3b | Qwen3-30B-A3B: 48 layers, 128 experts of which 8 are taken (61 GB) | 8 dense layers (1.0 GB) |
| hybrid-9b | Qwen3.5-9B: 24 gated delta nets, 8 layers with full attention (17.9 GB) | 6 layers (2.5 GB) |
| hybrid-27b | Qwen3.5-27B: 48 gated delta nets, 16 layers with full attention (54 GB) | 5 layers (3.5 GB) |
| tiny | 4 layers of width 32 (0.1 MB); for measurements of the host without a GPU | 1 layer |
| small-moe | 6 layers, 16 experts, 4 taken (60 MB); a vocabulary of bytes | 2 layers |
| small-hybrid | 6 gated delta nets, 2 layers with full attention (60 MB); a vocabulary of bytes | 2 layers |

The draft's share of a step follows from the layers: change those of the target and it is another one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_sglang.bench.script import script_parser
from dflash_sglang.checkpoint.draft_spec import DraftSpec
from dflash_sglang.checkpoint.shapes import dense_shapes

BLOCK = 16
COMMON: dict[str, Any] = dict(
    rms_norm_eps=1e-6, max_position_embeddings=40960, torch_dtype="bfloat16", attention_bias=False,
    tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
QWEN3: dict[str, Any] = dict(COMMON, rope_theta=1e6, vocab_size=151936, bos_token_id=151643, eos_token_id=151645)
# Recurrent layers and one of four with full attention, as in the checkpoints of Qwen3.5 and Qwen3.6.
HYBRID: dict[str, Any] = dict(
    COMMON, vocab_size=248320, bos_token_id=248044, eos_token_id=248046, max_position_embeddings=262144,
)  # fmt: skip
DELTA_NETS: dict[str, Any] = dict(
    full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
)  # fmt: skip
# Of published drafts: deepseek-ai's DSpark of Qwen3-4B, the Domino draft of Qwen3-8B, z-lab's of Qwen3.8-27B.
MARKOV_RANK = 256
DOMINO: dict[str, Any] = dict(
    projector_type="domino", gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1, shift_label=True,
)  # fmt: skip
DFLASH2: dict[str, Any] = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
OF_BLOCK: Mapping[str, Mapping[str, Any]] = {"plain": {}, "domino": DOMINO, "dflash2": DFLASH2}
HEADS = (*OF_BLOCK, "dspark")
BYTES: dict[str, Any] = dict(COMMON, rope_theta=1e4, vocab_size=320, bos_token_id=256, eos_token_id=257)
# Of its target's config.json a draft has what every dense decoder has.
DENSE = (
    *COMMON, "rope_theta", "vocab_size", "bos_token_id", "eos_token_id", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Fields of config.json. `target`: beside those of `common`; `draft`: where it differs from the target."""

    common: Mapping[str, Any]
    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    mask_token_id: int


SHAPES: Mapping[str, Shape] = {
    "qwen3-4b": Shape(
        dict(QWEN3, tie_word_embeddings=True),
        dict(
            num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128,
        ),
        draft=dict(num_hidden_layers=5, intermediate_size=9728), mask_token_id=151669,
    ),
    "qwen3-8b": Shape(
        QWEN3,
        dict(
            num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128,
        ),
        draft=dict(num_hidden_layers=5, intermediate_size=12288), mask_token_id=151669,
    ),
    "qwen3-30b-a3b": Shape(
        QWEN3,
        dict(
            num_hidden_layers=48, hidden_size=2048, intermediate_size=6144, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        ),
        draft=dict(num_hidden_layers=8, intermediate_size=6144), mask_token_id=151669,
    ),
    "hybrid-9b": Shape(
        HYBRID,
        dict(
            num_hidden_layers=32, hidden_size=4096, intermediate_size=12288, num_attention_heads=16,
            num_key_value_heads=4, head_dim=256, **DELTA_NETS, linear_num_value_heads=32,
        ),
        dict(
            num_hidden_layers=6, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
            head_dim=128, rope_theta=1e7,
        ),
        mask_token_id=248077,
    ),
    "hybrid-27b": Shape(
        HYBRID,
        dict(
            num_hidden_layers=64, hidden_size=5120, intermediate_size=17408, num_attention_heads=24,
            num_key_value_heads=4, head_dim=256, **DELTA_NETS, linear_num_value_heads=48,
        ),
        dict(
            num_hidden_layers=5, intermediate_size=17408, num_attention_heads=32, num_key_value_heads=8,
            head_dim=128, rope_theta=1e7,
        ),
        mask_token_id=248070,
    ),
    "tiny": Shape(
        BYTES,
        dict(
            num_hidden_layers=4, hidden_size=32, intermediate_size=32, num_attention_heads=1,
            num_key_value_heads=1, head_dim=32,
        ),
        draft=dict(num_hidden_layers=1, intermediate_size=32), mask_token_id=259,
    ),
    "small-moe": Shape(
        BYTES,
        dict(
            num_hidden_layers=6, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
            moe_intermediate_size=256, norm_topk_prob=True, decoder_sparse_step=1,
        ),
        draft=dict(num_hidden_layers=2, intermediate_size=1024), mask_token_id=259,
    ),
    "small-hybrid": Shape(
        BYTES,
        dict(
            num_hidden_layers=8, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
            num_key_value_heads=2, head_dim=64, **{**DELTA_NETS, "linear_num_key_heads": 4},
            linear_num_value_heads=8,
        ),
        draft=dict(num_hidden_layers=2, intermediate_size=1024), mask_token_id=259,
    ),
}  # fmt: skip


def matrix(*shape: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def target_config(shape: Shape, layers: int | None) -> dict[str, Any]:
    if "num_experts" in shape.target:
        kind = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[])
    elif "full_attention_interval" in shape.target:
        kind = dict(model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"])
    else:
        kind = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    count = layers or shape.target["num_hidden_layers"]
    return {**shape.common, **shape.target, **kind, "num_hidden_layers": count}


def draft_config(
    shape: Shape, target: Mapping[str, Any], head: str = "plain", window: int | None = None
) -> dict[str, Any]:
    """Features of five layers of the target, evenly apart, the first and the last two not among them."""
    dense = {key: value for key, value in target.items() if key in DENSE}
    layers, own = target["num_hidden_layers"], shape.draft["num_hidden_layers"]
    features = min(5, layers - 3)
    of_block = {
        "target_layer_ids": [1 + i * (layers - 4) // max(1, features - 1) for i in range(features)],
        "mask_token_id": shape.mask_token_id,
    }
    config = {
        **dense,
        **shape.draft,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": layers,
        "block_size": BLOCK,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * own,
    }
    if window is not None:
        config |= dict(sliding_window=window, use_sliding_window=True)
    if head == "dspark":  # its anchor's row proposes, too
        of_head = dict(markov_head_type="vanilla", markov_rank=MARKOV_RANK, block_size=BLOCK - 1)
        return {**config, **of_block, **of_head, "architectures": ["Qwen3DSparkModel"]}
    if head == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
    return {**config, "dflash_config": {**of_block, **OF_BLOCK[head]}}


def save(directory: Path, tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def target_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of transformers' class for this config, each expert's by itself, as checkpoints have them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes: dict[str, Sequence[int]] = {}
    for name, tensor in model.state_dict().items():
        layer, stacked, part = name.partition(".experts.")
        if not stacked:
            shapes[name] = tensor.shape
            continue
        experts, rows, columns = tensor.shape
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, one in itertools.product(range(experts), parts):
            shapes[f"{layer}.experts.{expert}.{one}.weight"] = (rows // len(parts), columns)
    return {name: ones(*shape) if len(shape) == 1 else matrix(*shape) for name, shape in shapes.items()}


def draft_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    spec = DraftSpec.from_config(config)
    assert spec.target_layer_ids is not None
    shapes = dense_shapes(spec)
    stacked = ("qkv_proj.weight", "gate_up_proj.weight")  # of tensors that are there, too
    return {
        name: ones(*shape) if len(shape) == 1 else matrix(*shape)
        for name, shape in shapes.items()
        if not name.endswith(stacked)
    }


def write_words(directory: Path, vocabulary: int) -> None:
    """A tokenizer of as many words, `w0`, `w1`, ..., for clients that count and show text."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocabulary)}, "unk_token": "w0"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_pair(
    directory: Path,
    name: str,
    layers: int | None = None,
    config_only: bool = False,
    head: str = "plain",
    window: int | None = None,
) -> dict[str, str]:
    """Writes a pair of the shape `name`; the directories by `target` and `draft`."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    target = target_config(shape, layers)
    save(directory / "target", {} if config_only else target_tensors(target), target)
    write_words(directory / "target", shape.common["vocab_size"])
    draft = draft_config(shape, target, head, window)
    # Last, and its config.json after its weights: where that is, the pair is complete.
    save(directory / "draft", draft_tensors(draft), draft)
    return {role: str(directory / role) for role in ("target", "draft")}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the target; the shape's own by default")
    parser.add_argument("--config-only", action="store_true", help="no weights of the target")
    parser.add_argument("--head", choices=HEADS, default="plain", help="of the draft")
    parser.add_argument("--window", type=int, help="that every layer of the draft slides over")
    options = parser.parse_args()
    write_pair(options.directory, options.shape, options.layers, options.config_only, options.head, options.window)


if __name__ == "__main__":
    main()
