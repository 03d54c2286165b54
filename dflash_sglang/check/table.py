"""The findings of a check as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = 5  # first differences that are printed; the JSON output has all, with their text


def table(found: Mapping[str, Any]) -> str:
    """Outputs, acceptance, first differences and the verdict."""
    low, high = found["accept_length_interval"]
    baseline = found["baseline"]
    compared = f", baseline {baseline['accept_length']:.2f} ({baseline['source']})" if baseline else ""
    lines = [
        f"{'outputs equal':<16}{found['equal_outputs']} of {found['prompts']} prompts, {found['dtype']}",
        f"{'accept length':<16}{found['accept_length']:.2f} (95 %: {low:.2f} to {high:.2f}), "
        f"{found['verify_steps']} verify steps{compared}",
        f"{'speed':<16}{speed_line(found)}",
        *position_lines(found),
    ]
    lines += [parting_line(found, one) for one in found["partings"][:SHOWN]]
    if len(found["partings"]) > SHOWN:
        lines.append(f"and {len(found['partings']) - SHOWN} more prompts")
    lines.append(f"{'verdict':<16}{found['verdict']}")
    lines += [f"  {reason}" for reason in found["reasons"]]
    if found["likely_causes"]:
        lines.append("likely causes, in this order:")
        lines += [f"  {number}. {cause}" for number, cause in enumerate(found["likely_causes"], 1)]
    return "\n".join(lines)


def speed_line(found: Mapping[str, Any]) -> str:
    """How fast the answers were, and the accept length from which on that is faster than plain decoding."""
    if found["speed_over_plain"] is None:
        return "not measured: a running server may have other requests"
    even = found["accept_length_at_break_even"]
    return f"{found['speed_over_plain']:.2f} times plain decoding's; break-even at accept length {even:.2f}"


def position_lines(found: Mapping[str, Any]) -> list[str]:
    """Positions of a block, and the share of the steps that accepted so many proposals."""
    shares = found["acceptance_at_position_1_on"]
    return [
        f"{'position':<16}" + "".join(f"{position:>5}" for position in range(1, len(shares) + 1)),
        f"{'accepted, %':<16}" + "".join(f"{100 * share:5.0f}" for share in shares),
    ]


def parting_line(found: Mapping[str, Any], parting: Mapping[str, Any]) -> str:
    """Where one prompt's outputs part, and what that is."""
    where = f"prompt {parting['prompt']}, token {parting['position']}"
    if parting["margin"] is None:
        ended = "with DFLASH" if parting["dflash"] is None else "of plain decoding"
        return f"{where}: a defect: the output {ended} has ended, the other goes on"
    kind = "a near-tie" if parting["near_tie"] else "a defect"
    return (
        f"{where}: {kind}: plain {parting['plain']} (rank {_rank(parting['plain_rank'])}), "
        f"DFLASH {parting['dflash']} (rank {_rank(parting['dflash_rank'])}), margin {parting['margin']:.2g}; "
        f"{found['dtype']} explains {found['largest_near_tie']:g}"
    )


def _rank(rank: int | None) -> str:
    return "above 20" if rank is None else str(rank)
