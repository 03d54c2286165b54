"""The largest few of long rows."""

from __future__ import annotations

import torch

CHUNK = 4096


def largest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [N, n] of any float dtype -> values and indices [N, count] of the largest, descending.

    They are among the largest of each chunk of a row. A top-k of many short rows is one launch on a GPU and fills
    it; that of a few rows as long as a vocabulary takes several passes over them.
    """
    n = rows.shape[1]
    whole = n - n % CHUNK
    if whole <= CHUNK or count > CHUNK:
        return rows.topk(count, dim=-1)
    values, indices = rows[:, :whole].unflatten(1, (-1, CHUNK)).topk(count, dim=-1, sorted=False)
    indices = indices + torch.arange(0, whole, CHUNK, device=rows.device)[:, None]
    found, places = [values.flatten(1)], [indices.flatten(1)]
    if whole < n:
        values, indices = rows[:, whole:].topk(min(count, n - whole), dim=-1, sorted=False)
        found.append(values)
        places.append(indices + whole)
    values, best = torch.cat(found, dim=1).topk(count, dim=-1)
    return values, torch.cat(places, dim=1).gather(1, best)
