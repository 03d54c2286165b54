"""Prefills in graphs of the whole forward, as this package asks for, against a server without graphs of them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.settings.plugin_config import REQUIRE_ENV
from tests.engine.test_width_serving import DRAFT, TARGET, ask, request
from tests.gpu.test_width_gpu import assert_plain_decodings
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CHUNK, SLOTS = 1024, 2  # tokens of a prefill at most; requests of a graph, of which SGLang has one for 512 tokens
FLAGS: dict[str, Any] = dict(max_running_requests=16, chunked_prefill_size=CHUNK, **ON_DEVICE)


def test_whole_forwards_prefill_as_without_graphs():
    """Alone and in batches of as many requests as a graph has slots, more, or fewer; of prompts that share what is
    cached, are cached as a whole but for a token, or take several prefills."""
    texts = [list(text.encode()) for text in held_out_prompts()[:10]]
    long = [token for text in held_out_prompts() for token in text.encode()][: 2 * CHUNK + 77]
    asked = [request(text, 16) for text in texts]
    shared = [request([*texts[0], *text], 16) for text in texts[1:5]]
    with serve(TARGET, environment=DEVICE_ENVIRONMENT, cuda_graph_backend_prefill="disabled", **FLAGS) as plain:
        environment = {**DEVICE_ENVIRONMENT, REQUIRE_ENV: "1"}
        with serve(TARGET, DRAFT, environment=environment, attention_backend="fa3", **FLAGS) as ours:
            log = ours.log_text()
            assert "prefill graphs: of the whole forward" in log
            assert "Capture target prefill CUDA graph begin. backend=full, num_tokens=[2, 4, 8," in log
            waves = asked[:1], asked, asked, shared, [request(long, 16)], [request(long[:-5], 16), *asked[:2]]
            for number, wave in enumerate(waves):
                print("wave", number)
                assert_plain_decodings(plain, wave, ask(ours, wave))
            prefills = [line for line in ours.log_text().splitlines() if "Prefill batch" in line]
            graphs = sum("cuda graph: True" in line for line in prefills)
            print(f"{graphs} of {len(prefills)} prefills in graphs")
            assert 4 <= graphs < len(prefills), "one request, a chunk at a time; and more than a graph has slots"
