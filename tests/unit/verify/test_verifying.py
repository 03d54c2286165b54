"""Attention backends that cannot verify a target exactly are refused once they exist."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dflash_sglang.startup.facts import StartupError


class WrapperDispatch(Enum):
    """FlashInfer's backend in SGLang has a pair of wrappers, for one of these reasons."""

    SLIDING_WINDOW = auto()
    CROSS_ATTENTION = auto()


def flashinfer(reason: WrapperDispatch | None) -> Any:
    return SimpleNamespace(dispatch_reason=reason)


def bound(backend: Any, requests: int = 48, chunk: int | None = 512, ranks: int = 1, **flags: bool) -> None:
    """As the worker binds the target's backend to its verifier, for blocks of 16."""
    from dflash_sglang.verify import verifier

    under_test = object.__new__(verifier.Verifier)
    given = dict(enable_return_routed_experts=False, enable_return_indexer_topk=False) | flags
    under_test._runner = SimpleNamespace(
        attn_backend=backend, max_running_requests=requests, server_args=SimpleNamespace(**given)
    )
    under_test._worker, under_test._block_size = SimpleNamespace(model_runner=under_test._runner), 16
    under_test._runner.model_config = SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier.RecurrentStates, "from_target", lambda *_: None)
        patch.setattr(verifier, "get_parallel", lambda: SimpleNamespace(attn_dp_size=ranks))
        patch.setattr(verifier, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=chunk))
        under_test.bind_attention_backends()


@pytest.mark.matrix(
    target="with sliding layers, on flashinfer",
    draft="any",
    kv="any",
    outcome="refused",
    message="--attention-backend='flashinfer': expected triton or fa3 for a target with sliding layers",
)
def test_sliding_layers_of_a_target_are_refused_on_flashinfer() -> None:
    from sglang.srt.layers.attention import flashinfer_backend

    assert flashinfer_backend.WrapperDispatch.SLIDING_WINDOW.name == WrapperDispatch.SLIDING_WINDOW.name
    with pytest.raises(StartupError, match="--attention-backend='flashinfer'.*Set --attention-backend triton"):
        bound(flashinfer(WrapperDispatch.SLIDING_WINDOW))
    bound(flashinfer(None))
    bound(SimpleNamespace())


def test_of_a_pair_of_backends_the_one_that_verifies_counts() -> None:
    def pair(decode: Any) -> Any:
        return SimpleNamespace(_select_backend=lambda mode: mode.is_target_verify() and decode)

    bound(pair(SimpleNamespace()))
    with pytest.raises(StartupError):
        bound(pair(flashinfer(WrapperDispatch.SLIDING_WINDOW)))


@pytest.mark.parametrize("reported", ["routed-experts", "indexer-topk"])
def test_what_layers_choose_is_reported_where_sglang_has_rows_for_a_verify(reported: str) -> None:
    flag = {f"enable_return_{reported.replace('-', '_')}": True}
    rows = f"expected at least 768 with --enable-return-{reported}: .* Set --chunked-"
    for case, says in (
        (flag, f"--chunked-prefill-size=512: {rows}"),
        (dict(flag, chunk=None), f"--chunked-prefill-size=None: {rows}"),
        (dict(flag, chunk=768), None),
        (dict(flag, requests=32), None),
        ({}, None),
        (dict(flag, chunk=768, ranks=2), "--enable-return-routed-experts=True: expected unset with DFLASH and"),
    ):
        if says is None or ("ranks" in case and reported != "routed-experts"):
            bound(SimpleNamespace(), **case)
            continue
        with pytest.raises(StartupError, match=says):
            bound(SimpleNamespace(), **case)


@pytest.mark.parametrize("ragged", [False, True])
def test_ragged_steps_are_verified_as_wide_as_the_backend_that_verifies_them(
    monkeypatch: pytest.MonkeyPatch, ragged: bool
) -> None:
    """Theirs is of the widest blocks, however wide a step's are: TensorRT-LLM's MLA counts keys by it."""
    from dflash_sglang.drafting.block import Rows
    from dflash_sglang.drafting.proposals import Proposals
    from dflash_sglang.kernels.block.accept import Ragged
    from dflash_sglang.verify import verifier
    from dflash_sglang.verify.rows import VerifyRows

    asked: list[Any] = []

    def prepare_for_verify(verify_input: Any, *args: Any, **kwargs: Any) -> tuple[None, bool]:
        asked.append(verify_input)
        return None, False

    monkeypatch.setattr(verifier.DFlashVerifyInput, "prepare_for_verify", prepare_for_verify)
    monkeypatch.setattr(verifier, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    under_test = object.__new__(verifier.Verifier)
    under_test._worker = SimpleNamespace(forward_batch_generation=lambda **_: None)  # type: ignore[assignment]
    under_test._tail = SimpleNamespace(writes_context=False)  # type: ignore[assignment]
    of_a_block = ("prefix_lens", "requests", "kv_len_bounds", "prefix_bounds_sum", "loc_plan")
    ids = torch.zeros((1, 8), dtype=torch.int64)
    rows = Rows(ids.view(-1), ids.view(-1), ids.view(-1))
    block: Any = SimpleNamespace(size=8, rows=rows, **dict.fromkeys(of_a_block))
    of = VerifyRows.of_block(block, Proposals.certain(ids))
    if ragged:
        layout, starts = cast(Any, "layout"), torch.zeros(2, dtype=torch.int32)
        of = VerifyRows(rows, 16, 16, layout, Ragged(starts, starts[:1], 16))
    under_test._forward(SimpleNamespace(), block, of)  # type: ignore[arg-type]
    (verify_input,) = asked
    assert (verify_input.draft_token_num, verify_input.ragged_verify_layout) == (
        (16, "layout") if ragged else (8, None)
    )
