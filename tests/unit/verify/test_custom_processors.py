"""Custom logit processors: the request that each row's processor finds, also in batches of prefill and decode."""

from __future__ import annotations

import copy
import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BLOCK = 4


def request(prompt: int, outputs: list[int]) -> Any:
    return SimpleNamespace(
        origin_input_ids=[1] * prompt,
        output_ids=array("q", outputs),
        seqlen=prompt + len(outputs),
        output_ids_through_stop=array("q", outputs),
        rid="its own",
    )


def batch_of(reqs: list[Any], decoding: list[Any] | None, **info: Any) -> Any:
    """In slots 3, 2, ...; with the lengths that the device has."""
    params = [{"__req__": req, "budget": i} for i, req in enumerate(reqs)]
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.arange(3, 3 - len(reqs), -1),
        decoding_reqs=decoding,
        forward_mode=SimpleNamespace(is_mixed=lambda: decoding is not None),
        sampling_info=SimpleNamespace(has_custom_logit_processor=True, custom_params=params, **info),
    )


@pytest.fixture
def processors() -> Any:
    from dflash_sglang.verify.custom_processors import CustomProcessors

    return CustomProcessors(5, BLOCK, "cpu")


def test_in_a_mixed_batch_a_decoding_request_has_what_the_step_in_flight_commits(processors: Any) -> None:
    prefilling, decoding, known = request(6, []), request(2, [7]), request(2, [7, 8])
    batch = batch_of([prefilling, decoding, known], [decoding, known])
    given = batch.sampling_info.custom_params
    # The step in flight committed 8 and 9 of one, and of the other what the host knows by now.
    processors.note(batch, torch.tensor([[0, 0, 0], [8, 9, 5], [7, 8, 5]]), torch.tensor([1, 2, 2]))
    batch.seq_lens = torch.tensor([4, 5, 4])
    processors.before_prefill(batch)
    found = batch.sampling_info.custom_params
    assert found[0] is given[0], "its prompt is not whole yet"
    assert [list(params["__req__"].output_ids) for params in found[1:]] == [[7, 8, 9], [7, 8]]
    assert [params["budget"] for params in found] == [0, 1, 2]
    assert given[1]["__req__"] is decoding and list(decoding.output_ids) == [7]


@pytest.mark.parametrize("mixed", [False, True])
def test_other_batches_are_left_as_they_are(processors: Any, mixed: bool) -> None:
    req = request(3, [7])
    batch = batch_of([req], [req] if mixed else None)
    batch.sampling_info.has_custom_logit_processor = not mixed
    given = batch.sampling_info.custom_params
    processors.before_prefill(batch)
    assert batch.sampling_info.custom_params is given


def test_what_a_request_says_of_its_length_fits_the_outputs_of_the_row(
    processors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from dflash_sglang.verify import custom_processors

    seen: list[Any] = []
    monkeypatch.setattr(
        custom_processors, "apply_custom_logit_processor", lambda logits, info: seen.extend(info.custom_params)
    )
    monkeypatch.setattr(
        dataclasses, "replace", lambda info, **changes: SimpleNamespace(**{**vars(info), **changes})
    )
    req = request(2, [7])
    batch = batch_of([req], None, temperatures=torch.ones(1, 1), custom_logit_processor={})
    processors.note(batch, torch.tensor([[8, 9, 0]]), torch.tensor([2]))
    tokens = torch.tensor([[9, 20, 21, 22]])
    processors.apply(torch.zeros(BLOCK, 30), batch, tokens, torch.tensor([4]))
    rows = [params["__req__"] for params in seen]
    outputs = [[7, 8, 9], [7, 8, 9, 20], [7, 8, 9, 20, 21], [7, 8, 9, 20, 21, 22]]
    assert [list(row.output_ids) for row in rows] == outputs
    assert [list(row.output_ids_through_stop) for row in rows] == outputs
    assert [row.seqlen for row in rows] == [5, 6, 7, 8] and {row.rid for row in rows} == {"its own"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])
def test_a_copy_of_a_rows_request_has_the_rows_outputs_and_what_was_kept_in_it(copied: Any) -> None:
    from dflash_sglang.verify.custom_processors import RequestAtRow

    row = RequestAtRow(request(2, [7]), [7, 8])
    row.kept = "state"
    other = copied(row)
    assert (list(other.output_ids), other.seqlen, other.kept, other.rid) == ([7, 8], 4, "state", "its own")
    other.output_ids.append(9)
    assert list(row.output_ids) == ([7, 8, 9] if copied is copy.copy else [7, 8])
    with pytest.raises(AttributeError, match="no_such"):
        _ = other.no_such
