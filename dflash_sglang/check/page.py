"""One HTML file, complete in itself: verdict, acceptance by position as a curve and a table, first differences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dflash_sglang.check.table import parting_line, speed_line
from dflash_sglang.check.verdict import FINE, GOOD

SHOWN = 20  # first differences
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 50, 20, 15, 40  # of the curve, in pixels
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: right; }
th { border-bottom: 1px solid #999; } td:first-child, th:first-child { text-align: left; }
pre { background: #f4f4f4; padding: 0.7em; white-space: pre-wrap; overflow-wrap: anywhere; }
.good { color: #186a2d; } .weak { color: #850; } .bad { color: #a11; } svg text { font-size: 12px; fill: #444; }
"""


def page(found: Mapping[str, Any]) -> str:
    """The findings as HTML. Texts are escaped, and nothing is loaded from elsewhere."""
    low, high = found["accept_length_interval"]
    baseline = found["baseline"]
    facts = {
        "target": found["target"],
        "draft": found["draft"],
        "server": found["url"] or "launched by this command",
        "worker": found["worker"],
        "dtype": found["dtype"],
        "prompts": f"{found['prompts']}, {found['max_new_tokens']} new tokens, greedy, "
        f"{found['concurrency']} at a time",
        "outputs equal": f"{found['equal_outputs']} of {found['prompts']}; "
        f"of the others {found['near_ties']} near-ties",
        "accept length": f"{found['accept_length']:.2f} (95 %: {low:.2f} to {high:.2f})",
        "speed": speed_line(found),
        "verify steps": found["verify_steps"],
        "baseline": f"{baseline['accept_length']:.2f} ({baseline['source']})" if baseline else "none",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "date": found["date"],
        "command": " ".join(found["command"]),
    }
    good = "good" if found["verdict"] == FINE else "weak" if found["verdict"] in GOOD else "bad"
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>dflash-sglang check</title>',
        f"<style>{STYLE}</style></head>",
        f'<body><h1>Verdict: <span class="{good}">{escape(found["verdict"])}</span></h1>',
        _items("ul", found["reasons"]),
        "<h2>Likely causes, in this order</h2>" if found["likely_causes"] else "",
        _items("ol", found["likely_causes"]),
        "<h2>What was run</h2>",
        _rows([], [(name, str(value)) for name, value in facts.items()]),
        "<h2>Acceptance by position</h2>",
        "<p>Share of the verify steps that accepted at least so many proposals. "
        "The band is the 95 % confidence interval over prompts.</p>",
        curve(found),
        _positions(found),
        f"<h2>First differences</h2>{_partings(found)}" if found["partings"] else "",
        "</body></html>",
    ])  # fmt: skip


def curve(found: Mapping[str, Any]) -> str:
    """Acceptance by position as SVG: a line in its interval's band, and the baseline's, dashed."""
    shares = found["acceptance_at_position_1_on"]
    intervals = found["acceptance_at_position_1_on_intervals"]
    baseline = (found["baseline"] or {"positions": []})["positions"][: len(shares)]

    def at(position: int, share: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (position - 1) / max(len(shares) - 1, 1)
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - share):.1f}"

    def points(values: Sequence[float]) -> list[str]:
        return [at(position, share) for position, share in enumerate(values, 1)]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="acceptance by position">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(1, share).split(",")
        parts.append(f'<path d="M{x},{y} H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4">{share:.0%}</text>')
    for position in range(1, len(shares) + 1):
        x, y = at(position, 0).split(",")
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" dy="16">{position}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">proposal of the block</text>')
    band = points([high for _, high in intervals]) + points([low for low, _ in intervals])[::-1]
    parts.append(f'<polygon points="{" ".join(band)}" fill="#2a6fb0" opacity="0.2"/>')
    parts.append(f'<polyline points="{" ".join(points(shares))}" fill="none" stroke="#2a6fb0" stroke-width="2"/>')
    if baseline:
        line = " ".join(points(baseline))
        parts.append(f'<polyline points="{line}" fill="none" stroke="#444" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP + 12}" text-anchor="end">dashed: baseline</text>')
    return "".join([*parts, "</svg>"])


def _positions(found: Mapping[str, Any]) -> str:
    baseline = (found["baseline"] or {"positions": []})["positions"]
    shares, intervals = found["acceptance_at_position_1_on"], found["acceptance_at_position_1_on_intervals"]
    rows = [
        (
            str(position),
            f"{share:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{baseline[position - 1]:.1%}" if position <= len(baseline) else "",
        )
        for position, (share, (low, high)) in enumerate(zip(shares, intervals, strict=True), 1)
    ]
    return _rows(["proposal", "accepted", "95 % interval", "baseline"], rows)


def _partings(found: Mapping[str, Any]) -> str:
    parts = []
    for one in found["partings"][:SHOWN]:
        parts.append(f"<h3>{escape(parting_line(found, one))}</h3>")
        for name, key in (("before", "text_before"), ("plain", "plain_text"), ("DFLASH", "dflash_text")):
            parts.append(f"<p>{name}</p><pre>{escape(json.dumps(one[key], ensure_ascii=False))}</pre>")
    if len(found["partings"]) > SHOWN:
        parts.append(f"<p>and {len(found['partings']) - SHOWN} more prompts</p>")
    return "\n".join(parts)


def _items(tag: str, items: Sequence[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(item)}</li>' for item in items)}</{tag}>" if items else ""


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    cells += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"
