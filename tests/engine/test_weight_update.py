"""Weights replaced while serving: target and draft, on disk and as tensors (C22 on the engine)."""

from __future__ import annotations

import shutil
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer

from dflash_sglang.demo.server import Server
from tests.support.engines import serve
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
PROMPTS = [list(text.encode()) for text in held_out_prompts()[:6]]
NEW_TOKENS = 40


def changed_copy(checkpoint: Path, directory: Path, change: Any) -> Path:
    """A checkpoint whose tensors are `change(name, tensor)`."""
    shutil.copytree(checkpoint, directory)
    for file in directory.glob("*.safetensors"):
        save_file({k: change(k, v).contiguous() for k, v in load_file(file).items()}, file, {"format": "pt"})
    return directory


def decode(server: Server) -> tuple[list[list[int]], int]:
    """(outputs, verify steps) of the prompts, on an empty cache."""
    server.post("/flush_cache?timeout=60")
    sampling = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    answers = server.generate(input_ids=PROMPTS, sampling_params=sampling)
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    return [answer["output_ids"] for answer in answers], steps


def update_draft(server: Server, tensors: dict[str, torch.Tensor]) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")  # a server that is not our child can open it
    payload = b64encode(MultiprocessingSerializer.serialize(list(tensors.items()))).decode()
    server.post("/begin_weight_update", selector="draft")
    server.post("/update_weights_from_tensor", serialized_named_tensors=[payload], selector="draft")
    server.post("/end_weight_update")


@pytest.fixture(scope="module")
def other_target(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(5)

    def disturb(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + 0.3 * tensor.std() * noise

    return changed_copy(TARGET, tmp_path_factory.mktemp("target") / "other", disturb)


def test_updates_reach_target_context_kv_and_block_alike(other_target):
    with serve(other_target) as plain:
        others, _ = decode(plain)
    trained = {name: tensor for file in DRAFT.glob("*.safetensors") for name, tensor in load_file(file).items()}
    unrelated = {name: tensor.flip(0).contiguous() for name, tensor in trained.items()}
    with serve(TARGET, DRAFT, environment={"DFLASH_SGLANG_REQUIRE": "1"}) as server:
        outputs, steps = decode(server)
        assert others != outputs
        assert steps < len(PROMPTS) * NEW_TOKENS / 3

        update_draft(server, unrelated)
        assert decode(server)[0] == outputs, "a draft never changes the output"
        assert decode(server)[1] > 3 * steps
        update_draft(server, trained)
        assert decode(server) == (outputs, steps), "context KV and block have the new weights, both"

        # An update flushes the cache of a server that runs nothing: wait until it knows that it does not.
        server.post("/flush_cache?timeout=60")
        server.post("/update_weights_from_disk", model_path=str(other_target))
        assert decode(server)[0] == others
        server.post("/flush_cache?timeout=60")
        server.post("/update_weights_from_disk", model_path=str(TARGET))
        assert decode(server) == (outputs, steps), "the draft has kept its weights"
