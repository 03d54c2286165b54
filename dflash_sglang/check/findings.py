"""What a check found, as one object: for the JSON output, the table and the picture."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_sglang.check.acceptance import LEVEL, Estimate
from dflash_sglang.check.arguments import Settings
from dflash_sglang.check.baseline import LENGTH, POSITIONS
from dflash_sglang.check.causes import likely_causes
from dflash_sglang.check.parting import ROUNDING, Parting
from dflash_sglang.check.servers import Facts
from dflash_sglang.check.verdict import Judged, verdict

CONTEXT = 24  # tokens shown before the first difference, and of each output from it on


def findings(
    settings: Settings,
    facts: Facts,
    widths: Mapping[int, int],
    outputs: Sequence[tuple[list[int], list[int]]],
    judged: Judged,
    command: Sequence[str],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """``widths``: verify steps by width; ``outputs``: token ids of each prompt, (with DFLASH, plain).

    The keys `accept_length` and `acceptance_at_position_1_on` make the object a baseline of later checks.
    """
    found, partings, accepted = verdict(judged), judged.partings, judged.accepted
    longest = max(len(ids) for ids in settings.prompts) + settings.max_new_tokens
    causes = likely_causes(settings.pair.spec, longest, widths)
    return {
        "command": list(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": dict(versions),
        "target": settings.pair.target,
        "draft": settings.pair.draft,
        "url": settings.url,
        "worker": "dflash_sglang" if facts.ours else "another than dflash_sglang's",
        "dtype": facts.dtype,
        "flags": [*settings.flags, *settings.draft_flags],
        "chat": settings.chat,
        "max_new_tokens": settings.max_new_tokens,
        "concurrency": settings.concurrency,
        "verdict": found.name,
        "reasons": list(found.reasons),
        "likely_causes": list(causes) if found.poor_acceptance else [],
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
