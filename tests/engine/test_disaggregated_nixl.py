"""Prefill and decode on different servers over the real nixl, which moves host memory here: float32 on the CPU.

Needs the `nixl` package. The GPU part is `tests/gpu/test_disaggregated_gpu.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_disaggregated import DRAFT, RANKS, TARGET, asked, output_and_steps
from tests.support import scheduler_hooks
from tests.support.disaggregated import Refused, decode_beside, serve_apart
from tests.support.engines import serve

pytest.importorskip("nixl", reason="needs the package nixl, which moves KV between the servers")

pytestmark = [pytest.mark.slow, pytest.mark.full]

RANKS_OF_DECODE = 2


def digested() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Requests whose rows are told, and one whose rows are told otherwise."""
    requests = [dict(request, rid=f"row-{number}") for number, request in enumerate(asked())]
    return requests, dict(requests[0], rid=scheduler_hooks.PLANTED)


def test_output_steps_and_rows_are_those_of_one_server_and_a_decode_server_without_the_draft_is_refused(tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "dram,digests")
    flags: dict[str, Any] = dict(page_size=16, chunked_prefill_size=64)
    requests, planted = digested()
    with serve(TARGET, DRAFT, **flags) as one:
        expected = [output_and_steps(one.generate(**request)) for request in requests]
    with serve_apart(TARGET, DRAFT, tmp_path, backend="nixl", environment=environment, **flags) as apart:
        assert [output_and_steps(answer) for answer in apart.ask_all(requests)] == expected
        bare = scheduler_hooks.hooked(tmp_path, "dram", DFLASH_SGLANG_REQUIRE="0")
        with decode_beside(apart, TARGET, None, environment=bare) as without:
            for answer in without.ask_both(**asked()[0]):
                assert isinstance(answer, Refused) and answer.status == 500
                assert "DFLASH: 10 KV buffers on the decode server, 16 on the prefill server" in str(answer)
        assert output_and_steps(apart.ask(**planted)) == expected[0]
        apart.assert_idle()
    strays = scheduler_hooks.strays(tmp_path)
    assert strays == {**{one["rid"]: 0 for one in requests}, planted["rid"]: 2}  # the target's, the draft's


def test_a_prefill_server_hands_over_heads_to_more_ranks_than_its_own(tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "dram,digests")
    requests, planted = digested()
    flags: dict[str, Any] = dict(backend="nixl", environment=environment, decode=dict(tp_size=RANKS_OF_DECODE))
    flags |= RANKS
    with serve_apart(TARGET, DRAFT, tmp_path, **flags) as apart:
        assert len(apart.ask_all(requests)) == len(requests)
        apart.ask(**planted)
        apart.assert_idle()
    strays = scheduler_hooks.strays(tmp_path)
    # What is planted stands in the last head of each rank: the target's, the draft's.
    assert strays == {**{one["rid"]: 0 for one in requests}, planted["rid"]: 2 * RANKS_OF_DECODE}
