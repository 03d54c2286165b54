"""`dflash_sglang.bench.random_pair`: random checkpoints in published shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from dflash_sglang.bench import random_pair
from dflash_sglang.checkpoint.files import tensor_facts


@pytest.mark.parametrize("name, model", [
    ("small-moe", "Qwen3MoeForCausalLM"), ("hybrid-9b", "Qwen3_5ForCausalLM"),
])  # fmt: skip
def test_a_random_pair_has_the_tensors_that_its_config_names(name, model, tmp_path, monkeypatch) -> None:
    """Experts, and gated delta nets of a small size."""
    shape = random_pair.SHAPES[name]
    if name == "hybrid-9b":
        small = dict(hidden_size=64, intermediate_size=96, linear_num_key_heads=2, linear_num_value_heads=4)
        shape = replace(shape, common={**shape.common, "vocab_size": 64}, target={**shape.target, **small})
        monkeypatch.setitem(random_pair.SHAPES, name, shape)
    directories = random_pair.write_pair(tmp_path, name, layers=4)
    _, found = getattr(transformers, model).from_pretrained(directories["target"], output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    draft = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert draft["num_target_layers"] == 4 and "num_experts" not in draft
    ids = random_pair.draft_config(shape, random_pair.target_config(shape, None))["dflash_config"][
        "target_layer_ids"
    ]
    assert ids == {"small-moe": [1, 2, 3], "hybrid-9b": [1, 8, 15, 22, 29]}[name]
    features = len(draft["dflash_config"]["target_layer_ids"])
    facts = tensor_facts(tmp_path / "draft")
    assert facts["fc.weight"].shape == (draft["hidden_size"], features * draft["hidden_size"])
    only = random_pair.write_pair(tmp_path / "only", name, config_only=True)
    assert tensor_facts(Path(only["target"])) == {}
