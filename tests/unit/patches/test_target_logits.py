"""The target's logits of verified rows: shards stay where they are until something asks for more.

SGLang's own logits processor makes them, over a head without its model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support import sglang_layers as layers
from tests.support.fakes import Together

VOCAB, ROWS = 100, 64  # two ranks; the second has 28 rows of padding
HIDDEN, CAPTURED = 8, 6


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def make_processor(cls: Any = None, **settings: Any) -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    cls = LogitsProcessor if cls is None else cls
    processor = object.__new__(cls)
    nn.Module.__init__(processor)
    defaults = dict(
        vocab_size=VOCAB,
        do_tensor_parallel_all_gather=False,
        do_tensor_parallel_all_gather_dp_attn=False,
        use_tp_lm_head_all_to_all=False,
        use_attn_tp_group=False,
        use_fp32_lm_head=False,
        use_fp32_lm_head_output=False,
        final_logit_softcapping=None,
        logit_scale=None,
        rl_on_policy_target=None,
        defer_verify_gather=False,
    )
    for name, value in {**defaults, **settings}.items():
        setattr(processor, name, value)
    return processor


def make_head(rows: int, dtype: torch.dtype) -> nn.Module:
    head = nn.Linear(HIDDEN, rows, bias=False, dtype=dtype)
    head.weight.requires_grad_(False)
    return head


def target(lm_head: nn.Module, processor: Any) -> Any:
    """A model runner whose target has this head."""
    model = nn.Module()
    model.logits_processor, model.lm_head = processor, lm_head
    return SimpleNamespace(model=model, model_config=SimpleNamespace(vocab_size=VOCAB), dtype=torch.bfloat16)


def sharded(group: Any, rank: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """The model runner of a rank whose head is sharded over `group`."""
    head = make_head(ROWS, dtype)
    head.tp_group = group
    head.shard_indices = SimpleNamespace(
        org_vocab_start_index=rank * ROWS, num_org_elements=min(ROWS, VOCAB - rank * ROWS)
    )

    def gather(shard: Tensor) -> Tensor:
        out = shard.new_empty(2 * shard.shape[0], shard.shape[1])
        group.all_gather_into_tensor(out, shard)
        return torch.cat(out.chunk(2), dim=1)

    settings = {"do_tensor_parallel_all_gather": True, "_logits_gatherer": gather, **settings}
    return target(head, make_processor(**settings))


def logits_of(runner: Any, hidden: Tensor, buffer: Tensor | None, mode: str = "TARGET_VERIFY") -> Tensor:
    """What SGLang's processor gives in a forward; buffer: of a captured graph."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    metadata = SimpleNamespace(forward_mode=ForwardMode[mode], next_token_logits_buffer=buffer)
    return runner.model.logits_processor._get_logits(hidden, runner.model.lm_head, metadata)


def make_buffer() -> Tensor:
    """As SGLang's graphs have it: the first rows of what the largest graph needs."""
    return torch.full((CAPTURED + 4, VOCAB), 7.0)[:CAPTURED]


def random_rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(CAPTURED, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("live", [CAPTURED, 4])
def test_a_verify_gives_each_rank_its_shard_and_ranks_find_best_tokens_and_whole_rows_in_them(live, dtype):
    from dflash_sglang.verify.target_logits import TargetLogits

    hidden, together = random_rows(dtype), Together(2)
    hidden[2] = 0  # all logits are equal
    weights = torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = torch.cat([hidden @ weight.T for weight in weights], dim=1)[:live, :VOCAB].float()
    weights[1, VOCAB - ROWS :] = 100 * hidden[0]  # padding that would win

    def of_rank(rank: int) -> tuple[list[int], Tensor]:
        runner = sharded(together.of(rank), rank, dtype)
        runner.model.lm_head.weight.copy_(weights[rank])
        of_target = TargetLogits(runner)
        shard = logits_of(runner, hidden, make_buffer())[:live]
        assert shard.shape == (live, ROWS)
        return of_target.best(shard).tolist(), of_target.whole(shard)

    with ThreadPoolExecutor(2) as pool:
        for best, whole in pool.map(of_rank, range(2)):
            assert best == expected.argmax(-1).tolist() and best[2] == 0
            assert torch.equal(whole, expected) and whole.dtype == torch.float32


def test_a_verify_alone_leaves_out_the_gather():
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dflash_sglang.verify.target_logits import TargetLogits

    class Recorded(LogitsProcessor):
        def _get_logits(self, hidden_states: Any, lm_head: Any, metadata: Any) -> bool:
            return self.do_tensor_parallel_all_gather

    runner = sharded(SimpleNamespace(world_size=2, rank_in_group=0), 0)
    processor = runner.model.logits_processor
    processor.__class__ = Recorded
    TargetLogits(runner)
    for mode, gathers in (("TARGET_VERIFY", False), ("EXTEND", True), ("IDLE", True)):
        metadata = SimpleNamespace(forward_mode=ForwardMode[mode], next_token_logits_buffer=None)
        assert processor._get_logits(None, None, metadata) is gathers


@pytest.mark.parametrize("setting", ["final_logit_softcapping", "use_fp32_lm_head", "use_fp32_lm_head_output"])
def test_logits_that_are_wider_than_the_model_are_gathered_in_full_precision(setting):
    from dflash_sglang.verify.target_logits import TargetLogits

    logits = torch.randn(2, 2 * ROWS)[:, :VOCAB]
    padded = nn.functional.pad(logits, (0, 2 * ROWS - VOCAB))
    together = Together(2)

    def of_rank(rank: int) -> Tensor:
        of_target = TargetLogits(sharded(together.of(rank), rank, **{setting: 30.0}))
        return of_target.whole(padded[:, rank * ROWS :][:, :ROWS].contiguous())

    with ThreadPoolExecutor(2) as pool:
        for whole in pool.map(of_rank, range(2)):
            assert torch.equal(whole, logits) and whole.is_contiguous()


def test_logits_are_sanitised_before_they_are_adjusted_where_sglang_is_told_to(monkeypatch):
    """SGLANG_SANITIZE_NAN_LOGITS"""
    from sglang.srt.environ import envs

    from dflash_sglang.verify import verifier

    under_test = object.__new__(verifier.Verifier)
    for name in ("tail", "acceptor", "adjustments", "target_tokens", "by_kernels"):
        setattr(under_test, f"_{name}", mock.MagicMock())
    under_test._recurrent, under_test._sanitizes = None, True
    logits = torch.tensor([[float("nan"), 1.0, -3.0]])
    under_test._logits = mock.MagicMock(whole=lambda _: logits)
    under_test._forward = lambda *_: mock.MagicMock()
    under_test._adjustments.apply = lambda logits, *_: logits.add_(torch.tensor([[0.0, 0.0, 5.0]]))
    info = dict(is_all_greedy=True, acc_additive_penalties=None, sampling_mask_batch_indices=None)
    info |= dict(sampling_seed=None, logit_bias=None, has_custom_logit_processor=False)
    batch = SimpleNamespace(sampling_info=SimpleNamespace(**info), has_grammar=False, return_logprob=False)
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        under_test.verify(batch, mock.MagicMock(), mock.MagicMock(), mock.MagicMock(ragged=None), None)
    assert logits[0, 1:].tolist() == [1.0, 2.0] and logits[0, 0] < -1e29
