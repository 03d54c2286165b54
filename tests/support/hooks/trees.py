"""Steps that verify trees."""

from __future__ import annotations

from typing import Any

from tests.support.hooks.widths import take_a_second
from tests.support.scheduler_hooks import note
from tests.support.seam import around, decide_every_step


def trees() -> None:
    """With widths: trees are as likely as all chains."""
    _allow(lambda of, kinds: kinds + 4 * [kind for kind in kinds if of[kind].nodes])


def always_trees() -> None:
    """Steps verify trees wherever they can, and elsewhere chains of whole blocks, which say why."""
    _allow(
        lambda of, kinds: (
            [kind for kind in kinds if of[kind].nodes] or [kind for kind in kinds if not of[kind].ragged]
        )
    )


def _allow(among: Any) -> None:
    """among: (all kinds of steps, numbers of those that may be) -> numbers that the policy chooses from."""
    decide_every_step()
    around("kinds", lambda allowed, self, *load: among(self.kinds, allowed(self, *load)))
    take_a_second()


def grown() -> None:
    """Of every request's tree, its tokens, parents and accepted nodes go to grown.jsonl."""
    chosen: list[Any] = []

    def noting(verify: Any, self: Any, batch: Any, block: Any, proposals: Any, of: Any, *arguments: Any) -> Any:
        if of.paths is not None:
            chosen[:] = [req.rid for req in batch.reqs], of.by_request(of.rows.ids).clone()
        return verify(self, batch, block, proposals, of, *arguments)

    def then_note(move: Any, self: Any, paths: Any) -> None:
        move(self, paths)
        columns = (of.tolist() for of in (chosen[1], paths.tree.parents, paths.nodes))
        note("grown.jsonl", *zip(chosen[0], *columns, strict=True))

    around("verify", noting)
    around("paths", then_note)
