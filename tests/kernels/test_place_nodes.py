"""Positions and slots of nodes: both twins read them off the tree and the request's row of slots."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.kernels.block import place_nodes as kernels


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("nodes", [2, 16, 33, 64])
def test_a_node_has_the_position_of_its_depth_and_the_slot_of_its_number(device, twin, nodes, kept):
    table = (10_000 + torch.arange(6 * 200, dtype=torch.int32)).view(6, 200).to(device)
    prefixes, requests = [0, 7, 130], [4, 1, 5]
    depths = torch.randint(0, 15, (3, nodes), generator=torch.Generator().manual_seed(nodes), dtype=torch.int32)
    ids = torch.arange(3 * nodes, device=device).view(3, nodes)
    history = torch.full((12_000,), -1, dtype=torch.int32, device=device)
    places = (torch.full((3, nodes), -7, device=device) for _ in range(2))
    out = kernels.Places(*places, ids, history if kept else None)
    lens, rows = (torch.tensor(values, device=device) for values in (prefixes, requests))
    getattr(kernels, f"place_nodes_{twin}")(depths.to(device), lens, rows, table, out)
    for request, (prefix, row) in enumerate(zip(prefixes, requests, strict=True)):
        assert out.positions[request].tolist() == [prefix + depth for depth in depths[request].tolist()]
        assert out.slots[request].tolist() == [10_000 + 200 * row + prefix + node for node in range(nodes)]
    assert (history[out.slots] == (ids if kept else -1)).all()
    assert (history >= 0).sum() == kept * ids.numel()
