"""`bench.png`: throughput against concurrency, and the speed that one user sees against throughput."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MISSING = "bench.png is not drawn: matplotlib is not installed (pip install 'dflash_sglang[bench]')"
STYLE = {
    "plain": ("0.5", "o"),
    "built_in": ("tab:orange", "s"),
    "ours": ("tab:blue", "D"),
    "fixed": ("tab:green", "^"),
}
DASHES = ("-", "--", ":", "-.")
LABEL = 0.06  # height of a label, of the axis
MARGIN = 0.12  # beside the outermost points, of the axis


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def subject(document: Mapping[str, Any]) -> str:
    """The hardware and the models of a document."""
    gpu = document["versions"]["gpu"]
    where = "CPU" if gpu == "none" else gpu.replace("\n", "; ")
    return f"{where}; target {Path(document['target']).name}, draft {Path(document['draft']).name}"


def draw(panels: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, subject: str) -> None:
    """Draw two pictures for each panel below their subject, with the lines' names beside the axes.

    panels: figures of a document by title, such as `table.groups` gives. Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2 * len(panels)), layout="constrained")
    figure.suptitle(subject, fontsize="medium")
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (title, figures), (left, right) in zip(panels.items(), axes, strict=True):
        drawn: list[str] = []  # widths of one kind differ in their lines
        for server in dict.fromkeys(one["server"] for one in figures):
            points = [one for one in figures if one["server"] == server]
            kind = points[0]["kind"]
            color, marker = STYLE[kind]
            look = dict(
                label=server, color=color, marker=marker, linestyle=DASHES[drawn.count(kind) % len(DASHES)]
            )
            drawn.append(kind)
            rates = [one["median"]["output_tokens_per_second"] for one in points]
            left.plot([one["concurrency"] for one in points], rates, **look)
            right.plot(rates, [one["median"]["user_tokens_per_second"] for one in points], **look)
        concurrency = sorted({one["concurrency"] for one in figures})
        left.set_xscale("log", base=2)
        left.set_xticks(concurrency, [str(at) for at in concurrency])
        left.set_title(title, loc="left")
        left.set(xlabel="requests at a time", ylabel="output tokens/s")
        right.set(xlabel="output tokens/s", ylabel="tokens/s per user")
        left.margins(x=MARGIN)
        right.set_xlim(0, right.get_xlim()[1])
        for axis in (left, right):
            axis.set_ylim(0, axis.get_ylim()[1] * (1 + MARGIN / 2))
            axis.grid(alpha=0.3)
            _name_ends(axis)
    figure.savefig(path, dpi=150)


def _name_ends(axis: Any) -> None:
    """Writes each line's name in the right margin, at the height of its last point."""
    lines = axis.get_lines()
    top = axis.get_ylim()[1]
    heights = apart([line.get_ydata()[-1] / top for line in lines])
    for line, height in zip(lines, heights, strict=True):
        place = dict(xy=(1.02, height), xycoords="axes fraction", va="center", annotation_clip=False)
        axis.annotate(line.get_label(), color=line.get_color(), **place)


def apart(heights: Sequence[float]) -> list[float]:
    """Heights of labels, of the axis: as given, the lower ones first, each at least a line of text above the
    one below it."""
    out = list(heights)
    lowest = 0.0
    for i in sorted(range(len(out)), key=out.__getitem__):
        out[i] = max(out[i], lowest)
        lowest = out[i] + LABEL
    return out
