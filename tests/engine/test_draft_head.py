"""Servers that draft by an fp8 copy of the head."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_weight_update import changed_copy, update_draft
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, kept, serve
from training.pair import held_out_prompts, pair_directories

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
NEW_TOKENS = 48
MIB = 1 << 20


def asked_for(**settings: Any) -> dict[str, str]:
    return {"DFLASH_SGLANG_REQUIRE": "1", CONFIG_ENV: json.dumps({"draft_head": "fp8", **settings})}


def decode(server: Server) -> tuple[list[list[int]], int]:
    """(outputs, verify steps) of some prompts, on an empty cache."""
    server.post("/flush_cache?timeout=60")
    prompts = [list(prompt.encode()) for prompt in held_out_prompts()[:8]]
    answers = server.generate(input_ids=prompts, sampling_params=greedy_params(NEW_TOKENS))
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    return [answer["output_ids"] for answer in answers], steps


def head_line(server: Server) -> str:
    found = re.search(r"worker active:\n(?:  .*\n)*  head: (.*)", server.log_text())
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def flipped_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with the rows of its head in another order: another output, and a head that no draft knows."""
    directory = tmp_path_factory.mktemp("target") / "flipped"
    return changed_copy(TARGET, directory, lambda name, t: t.flip(0) if name == "lm_head.weight" else t)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.matrix(target="Qwen3", draft="z-lab, draft_head fp8", kv="model dtype", outcome="works")
def test_a_server_with_an_fp8_head_is_lossless_and_drafts_by_the_copy_of_its_present_weights(
    tmp_path: Path, flipped_head: Path
) -> None:
    from dflash_sglang.kernels.head.fp8_linear import fp8_linear_torch, quantise_rows

    with kept(TARGET) as plain:
        expected, _ = decode(plain)
    with serve(flipped_head) as plain:
        flipped, _ = decode(plain)
    recording = scheduler_hooks.hooked(tmp_path, "features")

    def drafts_by_the_copy_of(target: Path) -> None:
        _, rows, logits = scheduler_hooks.borrowed(tmp_path)
        (tmp_path / "borrowed").unlink()  # and is written anew at the next step
        weight = load_file(target / "model.safetensors")["lm_head.weight"].float()
        assert torch.allclose(logits, fp8_linear_torch(rows, *quantise_rows(weight)), atol=1e-4)
        assert not torch.allclose(logits, rows @ weight.T, atol=1e-3)

    with serve(TARGET, DRAFT, environment={**asked_for(), **recording}) as server:
        outputs, steps = decode(server)
        assert outputs == expected
        assert steps < len(outputs) * NEW_TOKENS / 3
        drafts_by_the_copy_of(TARGET)
        for target, result in ((flipped_head, flipped), (TARGET, expected)):
            server.post("/flush_cache?timeout=60")
            server.post("/update_weights_from_disk", model_path=str(target))
            assert decode(server)[0] == result
            drafts_by_the_copy_of(target)
        assert decode(server) == (outputs, steps)
        assert head_line(server) == f"fp8 (draft_head asks for it, {320 * (256 + 4) / MIB:.1f} MiB)"


@pytest.mark.full
@pytest.mark.slow
def test_the_copy_of_a_head_of_the_drafts_own_follows_its_updates(tmp_path: Path) -> None:
    own = load_file(TARGET / "model.safetensors")["lm_head.weight"]
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    tensors = {**load_file(DRAFT / "model.safetensors"), "lm_head.weight": own.clone()}
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    with serve(TARGET, draft, environment=asked_for()) as server:
        outputs, steps = decode(server)
        assert steps < len(outputs) * NEW_TOKENS / 3
        update_draft(server, {"lm_head.weight": own.flip(0).contiguous()})
        assert decode(server)[0] == outputs
        assert decode(server)[1] > 2 * steps
        server.post("/flush_cache?timeout=60")
        update_draft(server, {"lm_head.weight": own})
        assert decode(server) == (outputs, steps)
        assert "  own_modules: head of 320 tokens\n" in server.log_text() and head_line(server).startswith("fp8 (")


@pytest.mark.full
@pytest.mark.slow
def test_two_ranks_draft_by_the_fp8_rows_of_a_token_map(tmp_path: Path) -> None:
    tokens = sorted({*range(32, 127), 10, 256, 257, 258, 259})
    torch.save(tokens, tmp_path / "map.pt")
    with kept(TARGET) as plain:
        expected, _ = decode(plain)
    flags = dict(tp_size=2, speculative_token_map=str(tmp_path / "map.pt"))
    with serve(TARGET, DRAFT, environment=asked_for(), **flags) as server:
        outputs, steps = decode(server)
        line = head_line(server)
    assert outputs == expected and steps < len(outputs) * NEW_TOKENS / 3
    assert line.startswith(f"{len(tokens)} tokens ({tmp_path / 'map.pt'}), fp8 (draft_head asks for it")
