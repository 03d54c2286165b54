"""What a check found: as one object for the JSON output, as text for a terminal, as a picture."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.versions import versions
from dflash_sglang.check.acceptance import LEVEL, Estimate
from dflash_sglang.check.arguments import Settings
from dflash_sglang.check.parting import RANKED, ROUNDING, Parting
from dflash_sglang.check.servers import Facts
from dflash_sglang.check.verdict import DEFECT, FINE, LENGTH, POSITIONS, Judged
from dflash_sglang.checkpoint.in_words import TARGET, TEXT, PairFacts

CONTEXT = 24  # tokens shown before the first difference, and of each output from it on
SHOWN = 5  # first differences that are printed; the JSON output has all, with their text


def findings(
    settings: Settings,
    facts: Facts,
    widths: Mapping[int, int],
    outputs: Sequence[tuple[list[int], list[int]]],
    judged: Judged,
) -> dict[str, Any]:
    """``widths``: verify steps by width; ``outputs``: token ids of each prompt, (with DFLASH, plain).

    The keys `accept_length` and `acceptance_at_position_1_on` make the object a baseline of later checks.
    """
    verdicts, partings, accepted = list(judged.verdicts()), judged.partings, judged.accepted
    poor = any(name != DEFECT for name, _ in verdicts)
    return {
        "command": ["dflash-sglang", *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": dict(versions()),
        "target": settings.pair.target,
        "draft": settings.pair.draft,
        "url": settings.url,
        "worker": "dflash_sglang" if facts.ours else "another than dflash_sglang's",
        "dtype": facts.dtype,
        "flags": [*settings.flags, *settings.draft_flags],
        "chat": settings.chat,
        "max_new_tokens": settings.max_new_tokens,
        "concurrency": settings.concurrency,
        "verdict": verdicts[0][0] if verdicts else FINE,
        "reasons": [reason for _, reason in verdicts],
        "likely_causes": _causes(settings, widths) if poor else [],
        "prompts": len(outputs),
        "equal_outputs": len(outputs) - len(partings),
        "near_ties": sum(one.near_tie for one in partings),
        "largest_near_tie": ROUNDING[facts.dtype],
        "partings": [
            {**dataclasses.asdict(one), **_texts(settings, one, *outputs[one.prompt])} for one in partings
        ],
        "block": facts.block,
        "steps_by_width": dict(widths),
        "verify_steps": accepted.steps,
        LENGTH: round(accepted.length.value, 4),
        f"{LENGTH}_interval": _interval(accepted.length),
        f"{LENGTH}_of_endless_block": round(judged.window.accept_length, 4),
        f"{LENGTH}_at_break_even": None if judged.break_even is None else round(judged.break_even, 4),
        "speed_over_plain": None if judged.speed is None else round(judged.speed, 4),
        POSITIONS: [round(one.value, 4) for one in accepted.positions],
        f"{POSITIONS}_intervals": [_interval(one) for one in accepted.positions],
        f"{LENGTH}_per_prompt": [None if one is None else round(one, 3) for one in accepted.per_request],
        "confidence": LEVEL,
        "baseline": settings.baseline and dataclasses.asdict(settings.baseline),
    }


def _causes(settings: Settings, widths: Mapping[int, int]) -> list[str]:
    pair, spec = settings.pair, settings.pair.spec
    facts = PairFacts(spec, pair.target_layers, pair.vocabulary, spec.quantization or "none")
    longest = max(map(len, settings.prompts)) + settings.max_new_tokens
    narrow = sum(steps for width, steps in widths.items() if width < spec.block_size)
    width = (
        f"width: {narrow} of {sum(widths.values())} steps verified less than the block of {spec.block_size}; "
        'compare drafts at {"width": "block"} in DFLASH_SGLANG_CONFIG'
    )
    return [*([width] if narrow else []), *facts.causes(longest, "at most"), TARGET, TEXT]


def _interval(estimate: Estimate) -> list[float]:
    return [round(estimate.low, 4), round(estimate.high, 4)]


def _texts(settings: Settings, parting: Parting, dflash: list[int], plain: list[int]) -> dict[str, str]:
    before = [*settings.prompts[parting.prompt], *plain[: parting.position]][-CONTEXT:]
    window = slice(parting.position, parting.position + CONTEXT)
    return {
        "text_before": settings.decode(before),
        "plain_text": settings.decode(plain[window]),
        "dflash_text": settings.decode(dflash[window]),
    }


def table(found: Mapping[str, Any]) -> str:
    """Outputs, acceptance, first differences and the verdict. found: as `findings` returns them."""
    low, high = found["accept_length_interval"]
    baseline, shares, partings = found["baseline"], found[POSITIONS], found["partings"]
    compared = f", baseline {baseline['accept_length']:.2f} ({baseline['source']})" if baseline else ""
    speed = "not measured: a running server may have other requests"
    if found["speed_over_plain"] is not None:
        even = found["accept_length_at_break_even"]
        speed = f"{found['speed_over_plain']:.2f} times plain decoding's; break-even at accept length {even:.2f}"
    rows = {
        "outputs equal": f"{found['equal_outputs']} of {found['prompts']} prompts, {found['dtype']}",
        "accept length": f"{found['accept_length']:.2f} (95 %: {low:.2f} to {high:.2f}), "
        f"{found['verify_steps']} verify steps{compared}",
        "speed": speed,
        "position": "".join(f"{position:>5}" for position in range(1, len(shares) + 1)),
        "accepted, %": "".join(f"{100 * share:5.0f}" for share in shares),
    }
    lines = [f"{name:<16}{value}" for name, value in rows.items()]
    lines += [_parting_line(found, one) for one in partings[:SHOWN]]
    if len(partings) > SHOWN:
        lines.append(f"and {len(partings) - SHOWN} more prompts")
    lines += [f"{'verdict':<16}{found['verdict']}", *(f"  {reason}" for reason in found["reasons"])]
    if found["likely_causes"]:
        lines.append("likely causes, in this order:")
        lines += [f"  {number}. {cause}" for number, cause in enumerate(found["likely_causes"], 1)]
    return "\n".join(lines)


def _parting_line(found: Mapping[str, Any], parting: Mapping[str, Any]) -> str:
    where = f"prompt {parting['prompt']}, token {parting['position']}"
    if parting["margin"] is None:
        ended = "with DFLASH" if parting["dflash"] is None else "of plain decoding"
        return f"{where}: a defect: the output {ended} has ended, the other goes on"
    kind = "a near-tie" if parting["near_tie"] else "a defect"
    plain, dflash = (
        f"{parting[name]} (rank {parting[f'{name}_rank'] or f'above {RANKED}'})" for name in ("plain", "dflash")
    )
    return (
        f"{where}: {kind}: plain {plain}, DFLASH {dflash}, margin {parting['margin']:.2g}; "
        f"{found['dtype']} explains {found['largest_near_tie']:g}"
    )


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write acceptance by position with its interval, beside the baseline's, to `path`, as PNG.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    shares = found[POSITIONS]
    low, high = zip(*found[f"{POSITIONS}_intervals"], strict=True)
    positions = range(1, len(shares) + 1)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.fill_between(positions, low, high, alpha=0.2, label="95 % over prompts")
    axis.plot(positions, shares, marker="D", label=f"{Path(found['draft']).name}: {found['accept_length']:.2f}")
    if baseline := found["baseline"]:
        of = baseline["positions"][: len(shares)]
        axis.plot(positions[: len(of)], of, "k--", label=f"baseline: {baseline['accept_length']:.2f}")
    axis.set(xlabel="proposal of the block", ylabel="steps that accepted it", ylim=(0, 1))
    axis.set_title(f"{found['verdict']}: target {Path(found['target']).name}", loc="left")
    axis.legend(title="accept length")
    axis.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
