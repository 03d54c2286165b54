"""Attention backends that verify trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_sglang.attention.verifying import verifying

if TYPE_CHECKING:
    from dflash_sglang.kernels.block.grow_tree import Tree


def serve_trees(backend: Any, tree: Tree) -> None:
    """From here on, this backend's verify forwards attend as trees. Call it before its graphs are captured.

    Request i of a forward is row i of `tree`: buffers of [most requests, nodes] that keep their place. The batch's
    `seq_lens` are the prefixes. Node j has the slot of position prefix + j, and `out_cache_loc` [bs * nodes] names
    it. A node sees its prefix, its ancestors and itself.
    """
    own: Any = verifying(backend)
    own.serve_trees(tree)
