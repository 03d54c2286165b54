"""33 published drafts through the launcher: who serves each, and what is read from its config.json.

`support/published` has one JSON file a draft: its config.json, the sizes of its target's, and what they mean
(`expect`). `completeness` says whether the config is verbatim, `filled` names the fields that no source gave. The
weights of a checkpoint are a file with the right header and without data.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang import hooks
from dflash_sglang.checkpoint import DraftSpec, read_config
from dflash_sglang.checkpoint.families import Foreign
from dflash_sglang.checkpoint.own_modules import own_modules
from dflash_sglang.startup.decisions import check_startup
from dflash_sglang.startup.facts import StartupError, TargetFacts
from tests.support.start_up import hook_configs

DIRECTORY = Path(__file__).parents[2] / "support" / "published"
PUBLISHED = {path.stem: path for path in sorted(DIRECTORY.glob("*.json"))}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "published-drafts.md"
WORKERS = {"ours": "this package", "foreign": "built-in worker (`{says}`)", "refused": "refused (`{says}`)"}


def launch(directory: Path, published: dict[str, Any]) -> Foreign | None:
    """What the launcher's hook decides, on SGLang's own server arguments and its own reading of the target."""
    from sglang.srt.server_args import prepare_server_args

    for role in ("target", "draft"):
        (directory / role).mkdir()
        (directory / role / "config.json").write_text(json.dumps(published[role]))
    write_header(directory / "draft" / "model.safetensors", tensors(published["draft"], published["expect"]))
    paths = ["--model-path", str(directory / "target"), "--speculative-draft-model-path", str(directory / "draft")]
    flags = ["--speculative-algorithm", "DFLASH", "--device", "cuda", "--skip-tokenizer-init"]
    server_args = prepare_server_args([*paths, *flags])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "_resolved", server_args)
        hook_configs(patch)
        return check_startup(server_args)


def tensors(config: dict[str, Any], expect: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) by name, of a checkpoint with this config."""
    shape = {**config, **config.get("transformer_layer_config", {})}
    hidden, mlp, heads, kv = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = shape["head_dim"] if "head_dim" in shape else hidden // heads
    of_gemma4 = config["architectures"] == ["Gemma4DSparkModel"]
    if of_gemma4:
        kv, dim = shape["num_global_key_value_heads"], shape["global_head_dim"]
    nested = config.get("dflash_config", {})
    ids = nested.get("target_layer_ids") or config.get("target_layer_ids") or config["aux_hidden_state_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(ids) * hidden)}
    shapes |= {"norm.weight": (hidden,), "hidden_norm.weight": (hidden,)}
    matrices = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv * dim, hidden),
        "self_attn.v_proj": (kv * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    if of_gemma4:
        del matrices["self_attn.v_proj"]
    for i in range(shape["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}.weight": matrix for name, matrix in matrices.items()}
        shapes |= {f"layers.{i}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
        if of_gemma4:
            shapes |= {f"layers.{i}.{where}_feedforward_layernorm.weight": (hidden,) for where in ("pre", "post")}
            shapes[f"layers.{i}.layer_scalar"] = (1,)
        for name in ("attention_conv", "mlp_conv") if expect.get("conv") else ():
            taps, group = expect["conv"]
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
        if expect.get("gates"):
            shapes[f"layers.{i}.self_attn.g_proj.weight"] = (heads * expect["gates"], hidden)
        if shape.get("attention_bias"):
            shapes |= {f"layers.{i}.{name}.bias": m[:1] for name, m in matrices.items() if "attn" in name}
        if expect.get("sinks"):
            shapes[f"layers.{i}.self_attn.attention_sink_bias"] = (heads,)
    if expect.get("gates"):
        shapes |= {f"aux_hidden_norms.{i}.weight": (hidden,) for i in range(len(ids))}
    if expect.get("selector"):
        rank = expect["selector"][0]
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (shape["vocab_size"], rank)
    if expect.get("markov"):
        scored = config.get("draft_vocab_size") or shape["vocab_size"]
        for name, rows in (("markov_w1", shape["vocab_size"]), ("markov_w2", scored)):
            shapes[f"markov_head.{name}.weight"] = (rows, expect["markov"])
    if expect.get("domino"):
        size, rank, _ = expect["domino"]
        shapes["prefix_gru.weight_ih_l0"] = (3 * size, hidden)
        shapes["prefix_gru.weight_hh_l0"] = (3 * size, size)
        shapes["embed_proj.0.weight"] = (rank, hidden + size)
        shapes["embed_proj.2.weight"] = (shape["vocab_size"], rank)
    if expect.get("head") == "own":
        shapes["lm_head.weight"] = (config.get("draft_vocab_size") or shape["vocab_size"], hidden)
    if expect.get("embedding") == "own":
        shapes["embed_tokens.weight"] = (shape["vocab_size"], hidden)
    if expect.get("mask_row"):
        shapes["mask_embedding"] = (hidden,)
    held = {name: ("BF16", size) for name, size in shapes.items()}
    if expect.get("d2t"):
        held["d2t"] = ("I64", (config["draft_vocab_size"],))
    return held


def write_header(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * {"BF16": 2, "I64": 8}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        os.truncate(file.fileno(), 8 + len(encoded) + end)


def read(directory: Path, target: TargetFacts) -> dict[str, Any]:
    """What is read of a draft, in the terms of `expect`."""
    from dflash_sglang.checkpoint.files import tensor_facts

    spec = DraftSpec.from_config(read_config(directory))
    own = own_modules(directory, tensor_facts(directory))
    scaling = spec.rope.scaling or {"rope_type": "default"}
    found: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "layers": [
            [layer.kind.removesuffix("_attention"), "causal" if layer.causal else "block", layer.window]
            for layer in spec.layers
        ],
        "rope": [spec.rope.theta, scaling["rope_type"], scaling.get("factor"), spec.rope.rotary_dim],
        "heads": [spec.num_heads, spec.num_kv_heads, spec.head_dim],
        "head": "target" if own.head is None else "own",
        "embedding": "target" if own.embedding is None else "own",
        "d2t": own.d2t is not None,
        "draft_vocab_size": spec.vocabulary.draft_vocab_size,
        "sinks": spec.attention_sinks,
        "value_scale": spec.attention_value_scale,
        "bias": spec.attention_bias,
        "mask_row": own.mask_embedding is not None,
        "conv": None if spec.convolution is None else list(astuple(spec.convolution)),
        "selector": None,
        "gates": None if spec.laguna is None else spec.laguna.gates,
        "markov": None if spec.dspark is None else spec.dspark.rank or None,
        "domino": None if spec.domino is None else list(astuple(spec.domino)),
    }
    if spec.dflash2 is not None:
        found["selector"] = [spec.dflash2.selector_rank, spec.dflash2.selector_top_k]
    return found


UNSAID = {
    "gates": None,
    "sinks": False,
    "value_scale": None,
    "bias": False,
    "mask_row": False,
    "conv": None,
    "selector": None,
    "markov": None,
    "domino": None,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_draft_is_read_as_it_was_trained_or_refused(name: str, tmp_path: Path) -> None:
    published = json.loads(PUBLISHED[name].read_text())
    expect = {key: value for key, value in published["expect"].items() if key != "note"}
    outcome, says = expect.pop("outcome"), expect.pop("says", None)
    if outcome == "refused":
        with pytest.raises(StartupError) as refusal:
            launch(tmp_path, published)
        assert len(refusal.value.problems) == 1 and says in str(refusal.value)
        return
    worker = launch(tmp_path, published)
    if outcome == "foreign":
        assert worker is not None and says in str(worker)
        return
    assert worker is None
    magnitude = expect.pop("rope_amplitude", 1.0)
    found = read(tmp_path / "draft", TargetFacts.from_config(published["target"]))
    if "draft_vocab_size" not in expect:
        del found["draft_vocab_size"]
    assert found == {**UNSAID, **expect}
    assert rope_magnitude(tmp_path / "draft") == pytest.approx(magnitude, abs=1e-4)


def rope_magnitude(directory: Path) -> float:
    """The factor on cosines and sines, of which the first row has position 0's."""
    from dflash_sglang.models.rope import draft_rope
    from tests.support import sglang_layers as layers

    layers.start_rank()
    return float(draft_rope(DraftSpec.from_config(read_config(directory))).cos_sin_cache[0, 0])


def test_the_page_says_of_every_draft_what_its_file_does() -> None:
    cells = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = {(hub, target): row for hub, target, *row in cells[1:]}
    for published in map(json.loads, (path.read_text() for path in PUBLISHED.values())):
        expect, (architecture,) = published["expect"], published["draft"]["architectures"]
        kind, block, _, runs_on, read = rows.pop((published["hub"], published["target_name"]))
        assert kind.removesuffix(", speculators") == architecture
        assert block.strip() == str(expect.get("block_size", ""))
        assert runs_on == WORKERS[expect["outcome"]].format(says=expect.get("says")), published["hub"]
        assert read == published["completeness"].replace("trimmed", "fields")
    assert not rows, "of no file"


def test_all_of_them_are_here() -> None:
    outcomes = [json.loads(path.read_text())["expect"]["outcome"] for path in PUBLISHED.values()]
    assert len(outcomes) == 33 and set(outcomes) == {"ours", "foreign", "refused"}
