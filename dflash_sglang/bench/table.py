"""`bench.md`: the medians of a run as Markdown tables, each with what it was measured on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN

COLUMNS = (
    "at a time", "server", "output tok/s", "tok/s per user", "first token, ms", "a token, ms",
    "accept length", "cached", "widths of steps", "tok/s over plain", "tok/s over built-in",
)  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    """All tables of a `document.document`, one per set of prompts, input length and temperature."""
    versions, settings = document["versions"], document["settings"]
    where = "CPU" if versions["gpu"] == "none" else versions["gpu"].replace("\n", "; ")
    parts = [
        "# DFLASH, measured",
        f"{where}; dflash_sglang {versions['dflash_sglang']}, SGLang {versions['sglang']}, torch "
        f"{versions['torch']}; {document['date']}.",
        f"Target `{document['target']}`, draft `{document['draft']}`; at most {settings['output']} tokens out; "
        f"servers {'up together, by turns' if settings['together'] else 'one after the other'}, "
        f"{_rounds(settings['rounds'])}; {_acceptance(settings)}.",
    ]
    if document["incomplete"]:
        parts.append(f"Incomplete: {document['incomplete'].splitlines()[0]}")
    for group, figures in groups(document).items():
        parts += [f"## {group}", _rows(COLUMNS, [_row(figure, figures) for figure in figures])]
    parts.append(SPREAD if settings["rounds"] > 1 else FIGURES)
    if document["acceptance"]:
        parts += ["## Acceptance by position", acceptance(document["acceptance"])]
    parts += [f"{one['kind'].replace('_', '-')}: not run, {one['reason']}." for one in document["skipped"]]
    if outputs := document["outputs"]:
        parts += [
            f"Greedy outputs of {outputs['new_tokens']} tokens equal to those without speculation, {server}: "
            f"{equal} of {outputs['prompts']}." + ("" if settings["dtype"] == "float32" else ROUNDING)
            for server, equal in outputs["equal_to_plain"].items()
        ]
    parts += [*map(step_table, document["profile"]), "## Verdict, by requests at a time", *verdicts(document)]
    return "\n\n".join(parts) + "\n"


WITHIN = "~"  # marks a ratio
FIGURES = (
    "Times: the median and, after the slash, the 99th percentile of the requests. "
    "Cached: the share of the prompts' tokens that the prefix cache held; a prompt asked again is held whole."
)
SPREAD = (
    f"{FIGURES} In brackets: the slowest and the fastest round. "
    f"{WITHIN}: the rounds of both servers overlap, so the ratio may be chance."
)
ROUNDING = " In 16-bit types a block's forward rounds differently from a single token's; near-ties may fall apart."


AGAINST = {PLAIN: "no speculation", BUILT_IN: "the built-in worker"}


def verdicts(document: Mapping[str, Any]) -> list[str]:
    """In words, for each table: at which loads ours is faster than the others, and by how much."""
    out = []
    for title, figures in groups(document).items():
        for server in dict.fromkeys(figure["server"] for figure in figures if figure["kind"] == OURS):
            for kind, name in AGAINST.items():
                loads: dict[str, list[str]] = {}
                for figure in figures:
                    if figure["server"] == server and (other := counterpart(figure, figures, kind)) is not None:
                        times = f"{ratio(figure, other):.2f} times the tokens/s at {figure['concurrency']}"
                        loads.setdefault(_compared(figure, other), []).append(times)
                if loads:
                    said = "; ".join(f"{word}: {', '.join(of)}" for word, of in loads.items())
                    out.append(f"{title}, {server} against {name}: {said}.")
    if not out:
        return ["Nothing to compare: this package's server and another one have no load in common."]
    return [*out, "One round: any difference may be chance."] if document["settings"]["rounds"] == 1 else out


def _compared(figure: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if _overlap(figure, other):
        return "not told apart"
    return "faster" if ratio(figure, other) > 1 else "slower"


def _overlap(figure: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the rounds of two servers overlap; a single round of each tells nothing of that."""
    (least, most), (other_least, other_most) = spread(figure), spread(other)
    return len(figure["rounds"]) > 1 and least <= other_most and other_least <= most


def groups(document: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The figures by the title of their table, in it by concurrency."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for figure in document["figures"]:
        length = "" if figure["input"] is None else f", {figure['input']} tokens in"
        sampling = "greedy" if figure["temperature"] == 0 else f"temperature {figure['temperature']:g}"
        found.setdefault(f"{figure['prompts']}{length}, {sampling}", []).append(figure)
    return {title: sorted(figures, key=lambda one: one["concurrency"]) for title, figures in found.items()}


def counterpart(
    figure: Mapping[str, Any], figures: Iterable[Mapping[str, Any]], kind: str
) -> Mapping[str, Any] | None:
    """The figure of the server of a kind under the same load, of the same width where both have one."""
    for other in figures:
        same_load = all(other[key] == figure[key] for key in ("prompts", "concurrency", "input", "temperature"))
        widths = {other["width"], figure["width"]} - {None}
        if same_load and other["kind"] == kind and len(widths) < 2:
            return other
    return None


def ratio(figure: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Median output tokens per second over those of another server."""
    return figure["median"]["output_tokens_per_second"] / other["median"]["output_tokens_per_second"]


def acceptance(found: Sequence[Mapping[str, Any]]) -> str:
    """The share of the verified proposals at each position that were accepted, with all before them."""
    most = max(len(one["verified"]) for one in found)
    rows = []
    for one in found:
        shares = [f"{of / tried:.0%}" for of, tried in zip(one["accepted"], one["verified"], strict=True)]
        rows.append([one["prompts"], one["server"], *shares, *[""] * (most - len(shares))])
    return _rows(("prompts", "server", *map(str, range(1, most + 1))), rows)


def step_table(step: Mapping[str, Any]) -> str:
    """A profiled step: where its time goes, and what runs outside of its graphs."""
    share = lambda ms: f"{ms / step['step_ms']:.1%}"  # noqa: E731
    kernels = step["kernels"]
    rows = [
        ("verify graph", step["verify_ms"], kernels["verify"]),
        ("draft graph", step["draft_ms"], kernels["draft"]),
        ("other graphs", step["other_graphs_ms"], kernels["other_graphs"]),
        ("outside of graphs", step["outside_ms"], kernels["outside"]),
        ("gaps within graphs", step["gaps_in_graphs_ms"], 0),
        ("gaps between launches", step["gaps_ms"] - step["gaps_in_graphs_ms"], 0),
    ]
    split = _rows(
        ("part of a step", "ms", "share", "kernels"),
        [(name, f"{ms:.3f}", share(ms), f"{count:.1f}" if count else "") for name, ms, count in rows],
    )
    title = f"## A step of {step['server']}, {step['concurrency']} at a time"
    facts = f"{step['step_ms']:.3f} ms, average of {step['steps']} steps; the GPU is idle for {step['idle']:.1%}."
    parts = [title, facts, split]
    if step["outside_kernels"]:
        outside = [(f"`{name[:90]}`", f"{count:.1f}", f"{us:.1f}") for name, count, us in step["outside_kernels"]]
        parts.append(_rows(("outside of graphs", "launches a step", "us a step"), outside))
    return "\n\n".join(parts)


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"medians of {count} rounds"


def _acceptance(settings: Mapping[str, Any]) -> str:
    if settings["accept_length"] is None:
        return "accept lengths are the draft's own"
    return f"accept length forced to {settings['accept_length']:g}: speed only, the output means nothing"


def _row(figure: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> list[str]:
    median, kind = figure["median"], figure["kind"]
    ratios = ["" if kind in (PLAIN, of) else _ratio(figure, figures, of) for of in (PLAIN, BUILT_IN)]
    rate = f"{median['output_tokens_per_second']:.1f}"
    if len(figure["rounds"]) > 1:
        rate += " [{:.1f}, {:.1f}]".format(*spread(figure))
    return [
        str(figure["concurrency"]),
        figure["server"],
        rate,
        f"{median['user_tokens_per_second']:.1f}",
        f"{median['ttft_ms']:.1f} / {median['ttft_p99_ms']:.1f}",
        f"{median['tpot_ms']:.2f} / {median['tpot_p99_ms']:.2f}",
        "" if kind == PLAIN else f"{median['accept_length']:.2f}",
        f"{median['cached_share']:.0%}",
        _widths(figure),
        *ratios,
    ]


def spread(figure: Mapping[str, Any]) -> tuple[float, float]:
    """Output tokens per second of the slowest and of the fastest round."""
    rates = [one["output_tokens_per_second"] for one in figure["rounds"]]
    return min(rates), max(rates)


def _ratio(figure: Mapping[str, Any], figures: Sequence[Mapping[str, Any]], kind: str) -> str:
    other = counterpart(figure, figures, kind)
    if other is None:
        return ""
    return f"{ratio(figure, other):.3f}{f' {WITHIN}' if _overlap(figure, other) else ''}"


def _widths(figure: Mapping[str, Any]) -> str:
    """The share of steps at each width, or the width of all."""
    steps = figure.get("widths")
    if steps is None:
        return "" if figure["width"] is None else str(figure["width"])
    total = sum(steps.values())
    shares = sorted(((int(width), count / total) for width, count in steps.items() if count), reverse=True)
    return ", ".join(f"{width}: {share:.0%}" for width, share in shares)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
