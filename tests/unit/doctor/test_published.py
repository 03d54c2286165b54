"""33 published drafts through the doctor, which asks start-up: who serves each, what is read from its config.json.

`support/published` has one JSON file a draft: its config.json, the sizes of its target's, and what they mean
(`expect`). `completeness` says whether the config is verbatim, `filled` names the fields that no source gave. The
weights of a checkpoint are a file with the right header and without data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec, read_config
from dflash_sglang.checkpoint.files import tensor_facts
from dflash_sglang.checkpoint.own_modules import own_modules
from dflash_sglang.checkpoint.shapes import dense_shapes
from tests.support.mutants import Facts, write_header
from tests.support.start_up import hook_configs

PUBLISHED = Path(__file__).parents[2] / "support" / "published"
FILES = {path.stem: path for path in sorted(PUBLISHED.glob("*.json"))}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "published-drafts.md"
WORKERS = {"ours": "this package", "foreign": "built-in worker (`{says}`)", "refused": "refused (`{says}`)"}
OUTCOMES = {"ours": (0, "dflash_sglang"), "foreign": (0, "built-in"), "refused": (1, None)}
UNSAID = dict.fromkeys(("gates", "value_scale", "conv", "selector", "markov", "domino"))
UNSAID |= dict.fromkeys(("sinks", "bias", "mask_row"), False)


def tensors(config: dict[str, Any], expect: dict[str, Any]) -> dict[str, Facts]:
    """(dtype, shape) by name, of a checkpoint with this config; none where it describes none.

    That the shapes are those of trained checkpoints is shown by `startup/test_presence`.
    """
    try:
        spec = DraftSpec.from_config(config)
    except DraftConfigError:
        return {"norm.weight": ("BF16", (64,))}
    stacked = (".qkv_proj.", ".gate_up_proj.")
    shapes = {name: of for name, of in dense_shapes(spec).items() if not any(one in name for one in stacked)}
    if expect.get("head") == "own":
        rows = spec.vocabulary.draft_vocab_size or spec.vocab_size
        shapes["lm_head.weight"] = (rows, spec.hidden_size)
    if expect.get("embedding") == "own":
        shapes["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    if expect.get("mask_row"):
        shapes["mask_embedding"] = (spec.hidden_size,)
    held = {name: ("BF16", shape) for name, shape in shapes.items()}
    return {**held, "d2t": ("I64", (config["draft_vocab_size"],))} if expect.get("d2t") else held


def read(directory: Path) -> dict[str, Any]:
    """What is read of a draft, in the terms of `expect`."""
    spec = DraftSpec.from_config(read_config(directory))
    own = own_modules(directory, tensor_facts(directory))
    scaling = spec.rope.scaling or {"rope_type": "default"}
    selector = spec.dflash2
    return {
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
        "selector": None if selector is None else [selector.selector_rank, selector.selector_top_k],
        "gates": None if spec.laguna is None else spec.laguna.gates,
        "markov": None if spec.dspark is None else spec.dspark.rank or None,
        "domino": None if spec.domino is None else list(astuple(spec.domino)),
    }


def rope_magnitude(directory: Path) -> float:
    """The factor on cosines and sines, of which the first row has position 0's."""
    from dflash_sglang.models.layers import draft_rope
    from tests.support import sglang_layers as layers

    layers.start_rank()
    return float(draft_rope(DraftSpec.from_config(read_config(directory))).cos_sin_cache[0, 0])


@pytest.mark.parametrize("name", FILES)
def test_a_published_draft_is_read_as_it_was_trained_or_refused(
    name: str, tmp_path: Path, examined: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_configs(monkeypatch)
    published = json.loads(FILES[name].read_text())
    expect = {key: value for key, value in published["expect"].items() if key != "note"}
    outcome, says = expect.pop("outcome"), expect.pop("says", None)
    roles = {role: tmp_path / role for role in ("target", "draft")}
    for role, directory in roles.items():
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(published[role]))
    write_header(roles["draft"] / "model.safetensors", tensors(published["draft"], expect))
    code, said = examined(**{role: str(directory) for role, directory in roles.items()})
    assert (code, said["worker"]) == OUTCOMES[outcome], said
    if outcome != "ours":
        [reason] = [said["why_built_in"]] if outcome == "foreign" else [one["text"] for one in said["refused"]]
        assert says in reason
        return
    assert said["model"]["target_layers"] == expect["target_layer_ids"]
    assert said["memory_per_rank"]["kv_bytes_per_token"] > 0
    magnitude, found = expect.pop("rope_amplitude", 1.0), read(roles["draft"])
    if "draft_vocab_size" not in expect:
        del found["draft_vocab_size"]
    assert found == {**UNSAID, **expect}
    if found["rope"][1] != "default":  # a table of many positions
        assert rope_magnitude(roles["draft"]) == pytest.approx(magnitude, abs=1e-4)


def test_the_page_says_of_every_draft_what_its_file_does() -> None:
    cells = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = {(hub, target): row for hub, target, *row in cells[1:]}
    every = [json.loads(path.read_text()) for path in FILES.values()]
    assert len(every) == 33 and {one["expect"]["outcome"] for one in every} == set(OUTCOMES)
    for published in every:
        expect, (architecture,) = published["expect"], published["draft"]["architectures"]
        kind, block, _, runs_on, read = rows.pop((published["hub"], published["target_name"]))
        assert kind.removesuffix(", speculators") == architecture
        assert block.strip() == str(expect.get("block_size", ""))
        assert runs_on == WORKERS[expect["outcome"]].format(says=expect.get("says")), published["hub"]
        assert read == published["completeness"].replace("trimmed", "fields")
    assert not rows, "of no file"
