"""Steps that verify trees."""

from __future__ import annotations

from typing import Any

from tests.support.hooks.widths import take_a_second
from tests.support.scheduler_hooks import note
from tests.support.seam import around


def trees() -> None:
    """With widths: trees are as likely as all chains."""
    _allow(lambda trees, kinds: kinds + 4 * trees)


def always_trees() -> None:
    """Steps verify trees wherever they can."""
    _allow(lambda trees, kinds: trees or kinds)


def _allow(among: Any) -> None:
    """among: (the kinds of steps that are trees, all kinds) -> those that the policy chooses from."""

    def drawn_from(allowed: Any, self: Any, *load: Any) -> list[int]:
        kinds = allowed(self, *load)
        return among([kind for kind in kinds if self.kinds[kind].nodes], kinds)

    around("kinds", drawn_from)
    take_a_second()


def grown() -> None:
    """Of every request's tree, its tokens, parents and accepted nodes go to grown.jsonl."""
    chosen: list[Any] = []

    def noting(choose: Any, self: Any, batch: Any, *arguments: Any) -> Any:
        rows = choose(self, batch, *arguments)
        chosen[:] = [req.rid for req in batch.reqs], rows.by_request(rows.rows.ids).clone()
        return rows

    def then_note(move: Any, self: Any, paths: Any) -> None:
        move(self, paths)
        columns = (of.tolist() for of in (chosen[1], paths.tree.parents, paths.nodes))
        note("grown.jsonl", *zip(chosen[0], *columns, strict=True))

    around("tree", noting)
    around("paths", then_note)
