"""What the doctor lets pass serves: the memory that it says, and plain decoding's output from odd drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_sglang.checkpoint import DraftSpec, read_config
from dflash_sglang.checkpoint.files import tensor_facts
from dflash_sglang.doctor import sizes
from tests.support.engines import greedy, serve
from tests.support.mutants import mutants
from training.pair import KNOWN_ANSWERS, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TOKENS = 4096
ODD = ("draft sliding_window 1", "draft dflash_config.target_layer_ids [4, 2, 0]")


@pytest.mark.parametrize("name", ODD)
def test_a_mutant_that_passes_decodes_as_the_target_in_the_memory_that_was_said(name: str, tmp_path: Path) -> None:
    [mutant] = [mutant for mutant in mutants() if mutant.name == name]
    mutant.write(tmp_path)
    spec = DraftSpec.from_config(read_config(tmp_path))
    known = [json.loads(line) for line in KNOWN_ANSWERS.read_text().splitlines()[:2]]
    with serve(Path(pair_directories()["target"]), tmp_path, max_total_tokens=TOKENS) as server:
        answers = greedy(server, [list(one["question"].encode()) for one in known], 64)
        assert answers == [list(one["answer"].encode()) for one in known]  # a token is a byte
        line = re.search(r"draft: weights ([0-9.]+) GB, KV ([0-9.]+) GB for 4096 tokens", server.log_text())
    assert line is not None
    weights = sizes.draft_weights(spec, tensor_facts(tmp_path), 1, served=4, in_fp8=False)
    weights += sizes.rope_table_bytes(spec, positions=4096)
    kv = sizes.kv_bytes_per_token(spec, 1, element=4) * TOKENS
    assert [float(said) for said in line.groups()] == pytest.approx([weights / 2**30, kv / 2**30], abs=6e-4)
