"""Penalties at every verified row, against SGLang's own penalizers fed one output token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB, ROWS = 9, 10
PARAMETERS = st.fixed_dictionaries(
    dict(
        frequency_penalty=st.sampled_from([0.0, 0.5, -1.25]),
        presence_penalty=st.sampled_from([0.0, 0.75, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
        min_new_tokens=st.sampled_from([0, 3, 6]),
    )
)
TOKENS = st.integers(0, VOCAB - 1)


def request(parameters: dict[str, Any], prompt: int, outputs: list[int]) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(stop_token_ids={2}, **parameters),
        origin_input_ids=[1] * prompt,
        output_ids=list(outputs),
        eos_token_ids={4},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5),
    )


def batch_of(reqs: list[Any], slots: list[int]) -> Any:
    from dflash_sglang.verify.adjustments import is_penalised

    prepared = torch.zeros(len(reqs), VOCAB) if any(map(is_penalised, reqs)) else None
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices_cpu=torch.tensor(slots),
        seq_lens=torch.tensor([len(r.origin_input_ids) + len(r.output_ids) for r in reqs]),
        decoding_reqs=None,
        forward_mode=SimpleNamespace(is_mixed=lambda: False),
        sampling_info=SimpleNamespace(acc_additive_penalties=prepared, acc_scaling_penalties=None),
    )


def reference(logits: torch.Tensor, req: Any, outputs: list[int]) -> torch.Tensor:
    """logits [vocab] of one decode step of SGLang after `outputs`."""
    from sglang.srt.sampling import penaltylib

    batch = type("Batch", (), {"reqs": [req], "device": "cpu"})()  # weakly referenced
    penalizers = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, penalizers)
    for token in outputs:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    additive = torch.zeros(1, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    row = logits + additive[0]
    return row if scaling is None else torch.where(row < 0, row * scaling[0], row / scaling[0])


@settings(deadline=None, max_examples=60)
@given(data=st.data(), block=st.integers(2, 6), seed=st.integers(0, 99))
def test_every_row_is_penalised_by_the_output_tokens_before_it(data, block, seed):
    """Two steps of a batch, with a request that has been retracted and one that has no penalty; of chains, or of
    ragged rows."""
    from dflash_sglang.verify.adjustments import Penalties

    reqs = [
        request(data.draw(PARAMETERS), data.draw(st.integers(1, 5)), data.draw(st.lists(TOKENS, max_size=3)))
        for _ in range(3)
    ]
    slots = [5, 2, 7]
    penalties = Penalties(ROWS, VOCAB, "cpu")
    generator = torch.Generator().manual_seed(seed)

    batch = batch_of(reqs, slots)
    penalties.begin(batch)
    penalties.before_prefill(batch)
    info = batch.sampling_info
    if info.acc_scaling_penalties is not None:
        logits = torch.randn(3, VOCAB, generator=generator)
        prefill = logits + info.acc_additive_penalties
        scaling = info.acc_scaling_penalties
        prefill = torch.where(prefill < 0, prefill * scaling, prefill / scaling)
        for row, raw, req in zip(prefill, logits, reqs, strict=True):
            torch.testing.assert_close(row, reference(raw, req, req.output_ids))
    outputs = [[*req.output_ids, data.draw(TOKENS)] for req in reqs]
    penalised = penalties.penalised(batch)
    if penalised is not None:
        penalties.count(penalised, torch.tensor([out[-1:] for out in outputs]), torch.ones(3, dtype=torch.long))

    for _ in range(2):
        tokens = torch.tensor(
            [[out[-1], *data.draw(st.lists(TOKENS, min_size=block - 1, max_size=block - 1))] for out in outputs]
        )
        prefix_lens = torch.tensor(
            [len(req.origin_input_ids) + len(out) - 1 for req, out in zip(reqs, outputs, strict=True)]
        )
        lens = data.draw(st.none() | st.lists(st.integers(1, block), min_size=3, max_size=3))
        rows = [(b, k) for b in range(3) for k in range(block if lens is None else lens[b])]
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        got = logits.clone()
        penalised = penalties.penalised(batch)
        if penalised is not None:
            penalties.apply(got, penalised, tokens, prefix_lens, places(lens, block) if lens else chains(3, block))
        for row, (b, k) in enumerate(rows):
            expected = reference(logits[row], reqs[b], outputs[b] + tokens[b, 1 : k + 1].tolist())
            torch.testing.assert_close(got[row], expected, msg=f"request {b}, row {k}")
        commit = [data.draw(st.integers(1, block)) for _ in reqs]
        ids = torch.randint(VOCAB, (3, block), generator=generator)
        if penalised is not None:
            penalties.count(penalised, ids, torch.tensor(commit))
        outputs = [out + ids[b, : commit[b]].tolist() for b, out in enumerate(outputs)]


def chains(requests: int, block: int) -> Any:
    """Where the rows of whole blocks are."""
    return places([block] * requests, block, ragged=False)


def places(lens: list[int], block: int, ragged: bool = True) -> Any:
    """Where the rows of blocks are of which each request verifies so many."""
    from dflash_sglang.drafting.block import Rows
    from dflash_sglang.kernels.block.accept import Ragged
    from dflash_sglang.verify.rows import VerifyRows

    starts = torch.tensor([0, *lens]).cumsum(0).int()
    ids = torch.zeros(sum(lens))
    of = Ragged(starts, torch.tensor(lens, dtype=torch.int32), block) if ragged else None
    return VerifyRows(Rows(ids, ids, ids), Any, block, block, ragged=of).places(len(lens), block)


PENALISED = dict(frequency_penalty=1.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)


def test_a_row_given_to_another_request_forbids_the_tokens_that_end_that_one_alone():
    """Retracted and started again in another row of `req_to_token`, too; ids that are no tokens are nobody's."""
    from dflash_sglang.verify.adjustments import Penalties

    penalties = Penalties(ROWS, VOCAB, "cpu")
    first, second = (request(dict(PENALISED, min_new_tokens=9), 3, []) for _ in range(2))
    first.sampling_params.stop_token_ids = {1, 2, 3}
    second.sampling_params.stop_token_ids = {7, -1, VOCAB}
    for req, slot, ends in ((first, 4, [1, 2, 3, 4, 5]), (second, 4, [4, 5, 7]), (first, 6, [1, 2, 3, 4, 5])):
        batch = batch_of([req], [slot])
        penalties.begin(batch)
        logits = torch.zeros(2, VOCAB)
        penalties.apply(
            logits, penalties.penalised(batch), torch.tensor([[0, 0]]), torch.tensor([2]), chains(1, 2)
        )
        assert logits[0].isneginf().nonzero().flatten().tolist() == ends
    both = batch_of([second, first], [4, 6])
    logits = torch.zeros(4, VOCAB)
    penalties.apply(
        logits, penalties.penalised(both), torch.tensor([[0, 0], [0, 0]]), torch.tensor([2, 2]), chains(2, 2)
    )
    assert [row.isneginf().sum().item() for row in logits] == [3, 3, 5, 5]


def test_every_request_of_a_large_batch_is_penalised():
    """A few at a time: what is copied besides the logits does not grow with the batch."""
    from dflash_sglang.verify import adjustments as module

    number, block = 3 * module.AT_ONCE + 1, 4
    reqs = [request(dict(PENALISED, repetition_penalty=1.5), 2, [i % VOCAB, 3]) for i in range(number)]
    batch, table = batch_of(reqs, list(range(1, number + 1))), module.Penalties(number + 1, VOCAB, "cpu")
    table.begin(batch)
    logits, tokens = torch.randn(number * block, VOCAB), torch.randint(VOCAB, (number, block))
    got = logits.clone()
    table.apply(got, table.penalised(batch), tokens, torch.full((number,), 4), chains(number, block))
    for b, req in enumerate(reqs):
        for k in range(block):
            expected = reference(logits[b * block + k], req, [*req.output_ids, *tokens[b, 1 : k + 1].tolist()])
            torch.testing.assert_close(got[b * block + k], expected)
