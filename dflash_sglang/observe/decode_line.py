"""The line of the log that stands below SGLang's decode line."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_sglang.observe.counts import Shape, Totals

POSITIONS = 8  # that the line shows


def decode_line(steps: Totals, shapes: Mapping[Shape, int]) -> str:
    """`DFlash decode, ...`: what the steps since the last line did. shapes: how many of them had each shape."""
    tried = int((steps.verified[:POSITIONS] > 0).sum())
    chances = steps.accepted[:tried] / steps.verified[:tried]
    widths: dict[int, int] = {}
    for shape, count in shapes.items():
        widths[shape.width] = widths.get(shape.width, 0) + count
    return (
        f"DFlash decode, #steps: {steps.steps}, accept len: {steps.accept_length:.2f}, "
        f"accept rate: {steps.accept_rate:.2f}, "
        f"by position: {' '.join(f'{chance:.2f}' for chance in chances) or 'none verified'}, "
        f"rows per token: {steps.rows / steps.committed:.2f}, "
        f"width: {' '.join(f'{width}x{count}' for width, count in sorted(widths.items()))}"
    )
