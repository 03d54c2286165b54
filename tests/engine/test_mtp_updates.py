"""Weights of a target replaced while its own multi-token-prediction layers draft: the layers follow."""

from __future__ import annotations

import urllib.error
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor

from dflash_sglang.demo.server import Server
from tests.engine.test_mtp import NEW_TOKENS, checkpoint, noted, ours, prompts
from tests.engine.test_weight_update import changed_copy
from tests.support.engines import greedy, greedy_params, serve
from tests.zoo.step3p5 import LAYERS, Reference

pytestmark = pytest.mark.slow

PROMPT = prompts()[4]


def blocks_that_differ(server: Server, records: Path, rid: str, of: Reference, output: list[int]) -> list[bool]:
    """Asks for the output; of each block, whether its proposals are not this reference's."""
    server.post("/flush_cache?timeout=60")
    answer = server.generate(input_ids=PROMPT, rid=rid, sampling_params=greedy_params(NEW_TOKENS))
    assert answer["output_ids"] == output
    text = torch.tensor(PROMPT + output)
    blocks = [block for block in noted(records) if block.rid == rid and block.prefix < len(text)]
    assert len(blocks) > NEW_TOKENS // 4
    return [
        block.likeliest != of.propose(text[: block.prefix + 1], torch.tensor(block.chosen))[0].tolist()
        for block in blocks
    ]


def send(server: Server, tensors: dict[str, Tensor], selector: str) -> str:
    """The error, if the update is refused. Without all of its tensors, SGLang's target ends the server."""
    payload, said = b64encode(MultiprocessingSerializer.serialize(list(tensors.items()))).decode(), ""
    server.post("/begin_weight_update", selector=selector)
    try:
        server.post("/update_weights_from_tensor", serialized_named_tensors=[payload], selector=selector)
    except urllib.error.HTTPError as error:
        said = error.read().decode()
    server.post("/end_weight_update")
    return said


def test_the_layers_follow_the_target(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)

    def disturbed(name: str, tensor: Tensor) -> Tensor:
        return tensor + 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    other = changed_copy(checkpoint(), tmp_path / "other", disturbed)
    outputs = []
    for target in (checkpoint(), other):
        with serve(target) as plain:
            outputs += greedy(plain, [PROMPT], NEW_TOKENS)
    assert outputs[0] != outputs[1]
    torch.multiprocessing.set_sharing_strategy("file_system")  # a server that is not our child can open it
    with ours(tmp_path, "mtp") as (server, records):
        before, after = Reference(checkpoint()), Reference(other)
        assert not any(blocks_that_differ(server, records, "text before", before, outputs[0]))
        server.post("/flush_cache?timeout=60")
        server.post("/update_weights_from_disk", model_path=str(other))
        assert not any(blocks_that_differ(server, records, "text from disk", after, outputs[1]))
        tensors = load_file(checkpoint() / "model.safetensors")
        server.post("/flush_cache?timeout=60")
        assert send(server, tensors, "all") == ""
        assert not any(blocks_that_differ(server, records, "text by tensors", before, outputs[0]))
        name = f"model.layers.{LAYERS}.eh_proj.weight"
        refused = send(server, {name: tensors[name][:1].contiguous()}, "draft")
        assert f"tensor {name!r} of shape (1, " in refused
        assert not any(blocks_that_differ(server, records, "text as before", before, outputs[0]))
