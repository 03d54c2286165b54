"""Two ranks whose steps are captured, idle ones among them: graphs that gather and reduce, over gloo."""

from __future__ import annotations

import pytest

from dflash_sglang.pair import held_out_prompts
from tests.engine.test_parallel import DRAFT, RANKS, TARGET, ask, continuations
from tests.engine.test_width_ranks import LAYOUTS
from tests.support import recorded_graphs
from tests.support.engines import greedy_params, serve

pytestmark = [pytest.mark.slow, pytest.mark.full]

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[800 * i : 800 * i + 20 + 31 * i]) for i in range(6)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return continuations(TARGET, prompts, NEW_TOKENS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_steps_of_ranks_output_what_plain_decoding_does(layout, prompts, plain, tmp_path):
    arguments = {**RANKS, **LAYOUTS[layout]}
    environment = recorded_graphs.recording(tmp_path)
    with serve(TARGET, DRAFT, environment=environment, tp_size=2, max_total_tokens=4096, **arguments) as server:
        asked = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS)) for prompt in prompts]
        if "dp_size" in arguments:
            asked = [dict(one, routed_dp_rank=int(number > 1)) for number, one in enumerate(asked)]
        drawn = dict(asked[0], sampling_params=greedy_params(NEW_TOKENS, temperature=1.0))
        alone = ask(server, asked[-1:], together=True)  # data-parallel rank 0 has nothing to do
        together = ask(server, [*asked, drawn], together=True)
        log = server.log_text()
    assert [answer["output_ids"] for answer in (*alone, *together[:-1])] == [plain[-1], *plain]
    assert len(together[-1]["output_ids"]) == NEW_TOKENS
    assert "cuda graph: False" not in "".join(line for line in log.splitlines() if "Decode batch" in line)
    drafted, verified = (
        {(one.captured, one.requests) for one in recorded_graphs.replays(tmp_path) if one.role == role}
        for role in ("draft", "target")
    )
    if "dp_size" in arguments:  # rank 0 has no request, then three; rank 1 has one, then four
        assert drafted >= {(1, 1), (4, 4)} and all(requests for _, requests in drafted)
        assert verified >= {(1, 0), (4, 4)} and any(captured > requests > 0 for captured, requests in verified)
    else:
        assert drafted == verified >= {(1, 1), (8, 7)}
