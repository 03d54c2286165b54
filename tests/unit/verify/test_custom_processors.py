"""The request that the custom logit processor of each row finds. What it reads besides: `test_request_fields`."""

from __future__ import annotations

import copy
import dataclasses
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


def test_what_a_request_says_of_its_length_fits_the_outputs_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_sglang.verify import custom_processors

    seen: list[Any] = []
    monkeypatch.setattr(
        custom_processors, "apply_custom_logit_processor", lambda logits, info: seen.extend(info.custom_params)
    )
    monkeypatch.setattr(
        dataclasses, "replace", lambda info, **changes: SimpleNamespace(**{**vars(info), **changes})
    )
    req = request(2, [7])
    info = SimpleNamespace(
        has_custom_logit_processor=True,
        custom_params=[{"__req__": req}],
        temperatures=torch.ones(1, 1),
        custom_logit_processor={},
    )
    batch: Any = SimpleNamespace(reqs=[req], req_pool_indices=torch.tensor([3]), sampling_info=info)
    processors = custom_processors.CustomProcessors(5, BLOCK, "cpu")
    processors.note(batch, torch.tensor([[8, 9, 0]]), torch.tensor([2]))
    processors.apply(torch.zeros(BLOCK, 30), batch, torch.tensor([[9, 20, 21, 22]]), torch.tensor([4]))
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
