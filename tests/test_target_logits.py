"""The target's logits of verified rows: shards stay where they are until something asks for all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests import sglang_layers as layers
from tests.test_heads import Together

VOCAB, ROWS = 100, 64  # two ranks; the second has 28 rows of padding


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def target(group: Any, rank: int, gathers: bool = True, **settings: Any) -> Any:
    """A model runner whose target has a head sharded over `group`, and SGLang's logits processor."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    processor = object.__new__(LogitsProcessor)
    nn.Module.__init__(processor)
    defaults = dict(
        do_tensor_parallel_all_gather=gathers,
        do_tensor_parallel_all_gather_dp_attn=False,
        use_tp_lm_head_all_to_all=False,
        use_attn_tp_group=False,
        use_fp32_lm_head=False,
        use_fp32_lm_head_output=False,
        final_logit_softcapping=None,
    )
    for name, value in {**defaults, **settings}.items():
        setattr(processor, name, value)

    def gather(shard: torch.Tensor) -> torch.Tensor:
        out = shard.new_empty(2 * shard.shape[0], shard.shape[1])
        group.all_gather_into_tensor(out, shard)
        return torch.cat(out.chunk(2), dim=1)

    processor._logits_gatherer = gather
    processor._get_logits = lambda hidden, lm_head, metadata: processor.do_tensor_parallel_all_gather
    model = nn.Module()
    model.logits_processor = processor
    model.lm_head = nn.Linear(4, ROWS, bias=False)
    model.lm_head.tp_group = group
    model.lm_head.shard_indices = SimpleNamespace(
        org_vocab_start_index=rank * ROWS, num_org_elements=min(ROWS, VOCAB - rank * ROWS)
    )
    return SimpleNamespace(model=model, model_config=SimpleNamespace(vocab_size=VOCAB), dtype=torch.bfloat16)


def test_two_ranks_find_the_best_tokens_and_the_whole_logits_in_their_shards():
    from dflash_sglang.verify.logits import TargetLogits

    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[0, [3, 99]] = 7.0  # a tie: the lower id
    padded = nn.functional.pad(logits, (0, 2 * ROWS - VOCAB), value=99.0)  # padding that would win
    together = Together(2)

    def of_rank(rank: int) -> tuple[list[int], torch.Tensor]:
        of_target = TargetLogits(target(together.of(rank), rank))
        shard = padded[:, rank * ROWS :][:, :ROWS].contiguous()
        return of_target.best(shard).tolist(), of_target.whole(shard)

    with ThreadPoolExecutor(2) as pool:
        for best, whole in pool.map(of_rank, range(2)):
            assert best == logits.argmax(-1).tolist()
            assert torch.equal(whole, logits) and whole.dtype == torch.float32


def test_a_verify_leaves_out_the_gather_that_a_prefill_does_also_after_an_error():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dflash_sglang.verify.logits import TargetLogits

    runner = target(SimpleNamespace(world_size=2, rank_in_group=0), 0)
    TargetLogits(runner)
    processor = runner.model.logits_processor
    for mode, gathers in (
        (ForwardMode.TARGET_VERIFY, False),
        (ForwardMode.EXTEND, True),
        (ForwardMode.IDLE, True),
    ):
        assert processor._get_logits(None, None, SimpleNamespace(forward_mode=mode)) is gathers
    with pytest.raises(TypeError):
        processor._get_logits(None, None, SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY), "unknown")
    assert processor.do_tensor_parallel_all_gather is True


@pytest.mark.parametrize(
    "setting",
    [dict(gathers=False), dict(do_tensor_parallel_all_gather_dp_attn=True), dict(use_tp_lm_head_all_to_all=True)],
    ids=lambda setting: next(iter(setting)),
)
def test_whole_logits_stay_as_they_are(setting):
    """Of one rank, of a head that data-parallel ranks share, and after SGLang's all-to-all."""
    from dflash_sglang.verify.logits import TargetLogits

    runner = target(None, 0, **setting)
    own = runner.model.logits_processor._get_logits
    of_target = TargetLogits(runner)
    assert runner.model.logits_processor._get_logits is own
    logits = torch.randn(3, VOCAB)
    assert of_target.whole(logits) is logits
    assert of_target.best(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("setting", ["final_logit_softcapping", "use_fp32_lm_head", "use_fp32_lm_head_output"])
def test_logits_that_are_wider_than_the_model_are_gathered_in_full_precision(setting):
    from dflash_sglang.verify.logits import TargetLogits

    logits = torch.randn(2, 2 * ROWS)[:, :VOCAB]
    padded = nn.functional.pad(logits, (0, 2 * ROWS - VOCAB))
    together = Together(2)

    def of_rank(rank: int) -> torch.Tensor:
        of_target = TargetLogits(target(together.of(rank), rank, **{setting: 30.0}))
        return of_target.whole(padded[:, rank * ROWS :][:, :ROWS].contiguous())

    with ThreadPoolExecutor(2) as pool:
        for whole in pool.map(of_rank, range(2)):
            assert torch.equal(whole, logits)
