"""The request fields as three servers treat them, as a Markdown table.

python -m tests.support.field_table [--gpu] [--out FILE]

Plain SGLang, the built-in DFLASH worker and this package's, greedy where the field allows it. "as plain": every
answer equals the plain server's; "ignored": every answer is the one without the field; "differs": neither.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench import report
from dflash_sglang.bench.script import script_parser
from tests.engine.test_request_fields import base_requests, essence, pair, table, with_field
from tests.support.engines import BUILT_IN_WORKER, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE, without_the_last_layer

# Filters that leave one token: whatever is drawn, the output is greedy decoding's.
ONE_TOKEN: dict[str, dict[str, Any]] = {
    "top_k": dict(temperature=1.3, top_k=1),
    "top_p": dict(temperature=1.3, top_p=1e-6),
    "min_p": dict(temperature=1.3, min_p=1.0),
}


def requests() -> dict[str, list[dict[str, Any]]]:
    filters = {
        name: [with_field(base, dict(sampling_params=parameters)) for base in base_requests()]
        for name, parameters in ONE_TOKEN.items()
    }
    seeded = {name for name in table() if name.startswith("sampling_seed")}
    return {"": base_requests(), **{k: v for k, v in table().items() if k not in seeded}, **filters}


def answers(draft: Path | None, environment: dict[str, str], **arguments: Any) -> dict[str, list[Any]]:
    """{field: what matters of its answers} of one server."""
    with serve(
        pair()[0],
        draft,
        environment=environment,
        skip_tokenizer_init=None,
        enable_custom_logit_processor=True,
        **arguments,
    ) as server:
        return {name: [essence(server.generate(**one)) for one in asked] for name, asked in requests().items()}


def verdict(name: str, got: dict[str, list[Any]], plain: dict[str, list[Any]]) -> str:
    if got[name] == plain[name]:
        return "as plain"
    return "ignored" if got[name] == got[""] else "differs"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="bfloat16 on a GPU instead of float32 on the CPU")
    parser.add_argument("--out", type=Path, help="of the table and the answers behind it, JSON")
    options = parser.parse_args()
    on_gpu = options.gpu
    arguments = {**ON_DEVICE, "cuda_graph_max_bs_decode": 8} if on_gpu else {}
    environment = DEVICE_ENVIRONMENT if on_gpu else {}
    built_in_worker = {**environment, **BUILT_IN_WORKER}
    plain = answers(None, built_in_worker, disable_overlap_schedule=True, **arguments)
    with tempfile.TemporaryDirectory() as directory:
        draft = without_the_last_layer(Path(directory) / "draft")
        built_in = answers(draft, built_in_worker, **arguments)
        ours = answers(draft, {**environment, "DFLASH_SGLANG_REQUIRE": "1"}, **arguments)
    print("| field | plain SGLang | built-in DFLASH | this package |\n|---|---|---|---|")
    rows = {}
    for name in requests():
        if name:
            effect = "acts" if plain[name] != plain[""] else "as greedy" if name in ONE_TOKEN else "no effect"
            rows[name] = [effect, verdict(name, built_in, plain), verdict(name, ours, plain)]
            print("|", " | ".join([name, *rows[name]]), "|")
    exact = sum(of_ours == "as plain" for _, _, of_ours in rows.values())
    claims = [
        report.claim("fields that this package serves as plain", exact, f"= {len(rows)}", exact == len(rows))
    ]
    figures = {"columns": ["plain SGLang", "built-in DFLASH", "this package"], "fields": rows}
    raw = {"plain": plain, "built_in": built_in, "ours": ours}
    report.finish("tests.support.field_table", options.out, claims, figures=figures, answers=raw)


if __name__ == "__main__":
    main()
