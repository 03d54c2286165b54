"""Steps that verify trees: a best-first tree for each request, and its accepted path moved to the front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Paths
from dflash_sglang.kernels.block.grow_tree import Tree, grow_tree
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.kernels.block.place_nodes import Places, place_nodes
from dflash_sglang.verify.rows import VerifyRows

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.drafting.rings import DraftRings


class Trees:
    """Trees of N nodes of as many requests as a step can have, in buffers that keep their place: a captured graph
    finds the trees of its replay there. Before the first step they are chains."""

    def __init__(self, nodes: int, requests: int, block_size: int, device: str) -> None:
        """block_size: tokens of the longest path, at most."""
        self.nodes, self.requests, self._block_size = nodes, requests, block_size
        node = torch.arange(nodes, device=device)
        depth = node.clamp(max=block_size - 1)

        def of_requests(row: torch.Tensor) -> torch.Tensor:
            return row.expand(requests, nodes).contiguous()

        self.tree = Tree(
            of_requests((node - 1).int()),
            of_requests(depth.int()),
            of_requests((torch.ones_like(node) << (node + 1)) - 1),
            of_requests(-node.float()),
        )
        self.rows = Rows(*(torch.zeros(requests * nodes, dtype=torch.int64, device=device) for _ in range(3)))
        self._path = torch.zeros((3, requests * block_size), dtype=torch.int64, device=device)

    def of(self, bs: int) -> Tree:
        """The trees of the first requests."""
        return Tree(*(tensor[:bs] for tensor in self.tree))

    def paths(self, slots: torch.Tensor) -> Paths:
        """For the accept of bs trees whose nodes have these slots [bs * N]."""
        bs = len(slots) // self.nodes
        nodes, sources, targets = self._path[:, : bs * self._block_size]
        return Paths(self.of(bs), slots.view(bs, self.nodes), nodes.view(bs, -1), sources, targets)


class TreeVerify:
    """Grows the trees of a step from the likeliest tokens of each position."""

    def __init__(
        self,
        target: ModelRunner,
        draft: ModelRunner,
        block_size: int,
        rings: DraftRings | None = None,
        history: torch.Tensor | None = None,
    ) -> None:
        """Both name slots alike, or the draft has them in rings. Their pools can move them
        (`attention.trees.why_no_trees`). history [slots] int32: the tokens of slots, which move with them."""
        self._runner, self._block_size = target, block_size
        self._target_pool, self._draft_pool = target.token_to_kv_pool, draft.token_to_kv_pool
        self._rings, self._history = rings, history
        self._table = target.req_to_token_pool.req_to_token
        self._trees: dict[int, Trees] = {}

    def add(self, nodes: int, requests: int) -> Trees:
        """The buffers of trees of so many nodes, for at most so many requests."""
        self._trees[nodes] = Trees(nodes, requests, self._block_size, self._runner.device)
        return self._trees[nodes]

    def choose(self, block: Block, proposals: Proposals, nodes: int) -> VerifyRows:
        """The rows of each request's likeliest tree.

        Raises ValueError for proposals without the likeliest tokens of each position.
        """
        if proposals.best is None:
            raise ValueError(
                f"a step of trees of {block.batch_size} requests: expected the likeliest tokens of each position, "
                "found none. Set width.trees to [] for this draft."
            )
        trees, bs = self._trees[nodes], block.batch_size
        rows = Rows(*(buffer[: bs * nodes] for buffer in trees.rows))
        ids, positions, slots = (tensor.view(bs, nodes) for tensor in rows)
        tree = trees.of(bs)
        grow_tree(proposals.tokens[:, 0], proposals.best, ids, tree)
        places = Places(positions, slots, ids, self._history)
        place_nodes(tree.depths, block.prefix_lens, block.requests, self._table, places)
        if self._rings is not None:
            self._rings.assign(block.requests, block.prefix_lens, slots)
        return VerifyRows(rows, nodes, self._block_size, paths=trees.paths(rows.slots))

    def move_paths(self, paths: Paths) -> None:
        """Bring keys and values of accepted nodes to the front of their request's slots, in both pools, once both
        have been written."""
        targets, sources = paths.targets, paths.sources
        self._target_pool.move_kv_cache(targets, sources)
        if self._history is not None:
            self._history[targets] = self._history[sources]
        if self._rings is not None:
            targets, sources = self._rings.named(targets), self._rings.named(sources)
        self._draft_pool.move_kv_cache(targets, sources)
