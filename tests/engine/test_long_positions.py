"""A draft behind a server beyond the positions that its config names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engines import greedy_params, serve
from training.pair import held_out_prompts, pair_directories


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.matrix(target="Qwen3", draft="z-lab, of fewer positions than the target", outcome="works")
def test_a_draft_of_fewer_positions_than_the_target_proposes_as_well_beyond_them(tmp_path):
    """The config's max_position_embeddings is no bound of the tables: acceptance does not notice a lower one."""
    pair = {name: Path(directory) for name, directory in pair_directories().items()}
    short = tmp_path / "draft"
    short.mkdir()
    config = json.loads((pair["draft"] / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (short / "model.safetensors").symlink_to(pair["draft"] / "model.safetensors")
    prompt = list("\n".join(held_out_prompts()).encode())[:900]
    answers = []
    for draft in (pair["draft"], short):
        with serve(pair["target"], draft, environment={"DFLASH_SGLANG_REQUIRE": "1"}) as server:
            answer = server.generate(input_ids=prompt, sampling_params=greedy_params(60))
            answers.append((answer["output_ids"], answer["meta_info"]["spec_verify_ct"]))
    assert answers[0] == answers[1]
    assert answers[1][1] < 20
