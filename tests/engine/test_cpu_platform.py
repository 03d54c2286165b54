"""SGLang on the CPU platform decodes as transformers does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.engines import BUILT_IN_WORKER, greedy, serve

PROMPT_LENS = (1, 2, 15, 16, 17, 33, 100, 300, 700)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # What the built-in worker can serve: it neither captures the target's last layer nor finds
    # `sliding_window` in a Qwen3 config without `use_sliding_window`.
    draft = {"use_sliding_window": True, "dflash_config": {"target_layer_ids": [0, 1, 3]}}
    return tiny.make_pair(tmp_path_factory.mktemp("pair"), draft=draft)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    ids = random.Random(0)
    return [[ids.randrange(4, 320) for _ in range(n)] for n in PROMPT_LENS]


@pytest.fixture(scope="module")
def expected(pair: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers, which shares no attention code with the platform."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "speculative, arguments",
    [
        (False, dict(page_size=16, chunked_prefill_size=64, enable_mixed_chunk=True, device=None)),
        (True, dict(chunked_prefill_size=64)),
    ],
    ids=["plain-page16-mixed", "built-in-dflash-overlap"],
)
def test_sglang_on_the_cpu_platform_decodes_as_transformers_does(
    pair: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    speculative: bool,
    arguments: dict[str, Any],
) -> None:
    draft = pair[1] if speculative else None
    with serve(pair[0], draft, environment=BUILT_IN_WORKER, **arguments) as server:
        batched = greedy(server, prompts, NEW_TOKENS)
        singly = [greedy(server, [prompt], NEW_TOKENS)[0] for prompt in prompts[:5]]  # prefix hits
    assert batched == expected
    assert singly == expected[:5]
