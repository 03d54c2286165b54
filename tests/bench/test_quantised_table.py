"""The table of docs/results/quantised-drafts.md from a report, complete or not."""

from __future__ import annotations

import json

import pytest

from bench.quantised_table import HEAD, main, rows


def test_a_row_per_scheme_has_its_figures_or_says_what_is_missing():
    measured = {"context_kv": "sliced (Fp8LinearMethod: why), one write for all layers"}
    report = {
        "figures": {
            "fp8-static": {**measured, "accept_length_over_bf16": 0.9912, "step_time_over_bf16": 1.0449},
            "awq": {"context_kv": None, "accept_length_over_bf16": 1.0, "step_time_over_bf16": 0.5},
        },
        "launches": {
            "bf16": {
                "kernels": ["bmm", "copy", "_fused_kv_norm_rope_write_kernel"],
                "layers": 4,
                "context_kv": "stacked (no qkv_proj is quantised)",
            },
            "fp8-static": {
                "kernels": ["RMSNormKernel", *["quant", "gemm", "copy"] * 3, "_fused_kv_norm_rope_write_kernel"],
                "layers": 3,
                "context_kv": "sliced (..)",
            },
            "gptq": {"failed": "out of memory"},
        },
        "failed": {"gptq": "the server ended"},
    }
    assert list(rows(report)) == [
        "| bf16 | stacked | 1 | 0.50 | 1 |",
        "| fp8-static | sliced | 0.991 | 3.00 | 1.045 |",
        "| gptq | not measured | not served | not measured | not served |",
        "| awq | not measured | 1.000 | not measured | 0.500 |",
    ]


def test_the_table_of_a_report_is_printed_and_help_is_given(monkeypatch, tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"figures": {}, "launches": {}, "failed": {"gptq": "the server ended"}}))
    monkeypatch.setattr("sys.argv", ["quantised_table", str(report)])
    main()
    assert capsys.readouterr().out == f"{HEAD}\n| gptq | not measured | not served | not measured | not served |\n"
    monkeypatch.setattr("sys.argv", ["quantised_table", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and "from a report of bench.quantised" in capsys.readouterr().out
