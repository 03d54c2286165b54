"""`dflash-sglang doctor`: its page, its JSON, its exit codes and its time, on the packaged pair."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dflash_sglang import hooks
from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.cli import main
from dflash_sglang.doctor import run, sizes, tokens
from dflash_sglang.sglang_names.probe import SGLangMismatchError
from tests.support.tiny import draft_config
from training.pair import pair_directories

PAIR = pair_directories()
ROOT = Path(__file__).parents[3]
# Processor time of the page over that of importing what it reads SGLang's configs with. On two cores where that
# import takes 5 s, 1.5 of it is less than 8 s.
IMPORTS = 1.5


# Prints the doctor's JSON of a launch without plugins, its page, and the seconds of both imports and page.
PROCESS = """
import os, sys, time
import sglang.srt.configs.model_config
imports = time.process_time()
from dflash_sglang.cli import main
if os.fork() == 0:
    os.environ["SGLANG_PLUGINS"] = "none"
    main([*sys.argv[1:], "--json"])
    sys.stdout.flush()
    os._exit(0)
os.wait()
print("-" * 9)
code = main([*sys.argv[1:], "--max-total-tokens", "20000"])
print("-" * 9, code, imports, time.process_time(), sep="\\n")
"""


@pytest.mark.slow
def test_the_page_has_what_would_run_and_takes_little_longer_than_importing_sglang() -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DFLASH_", "SGLANG_"))}
    roles = [f"--{role}={path}" for role, path in PAIR.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, "doctor", *roles],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=300,
    )
    without_plugins, page, figures = done.stdout.split("-" * 9 + "\n")
    code, imports, seconds = map(float, figures.split())
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in page.splitlines() if "  " in line)
    assert code == 0 and page.splitlines()[0].endswith(" doctor: fine"), done.stderr
    assert rows["layers"] == "0-1 sliding(128) causal, 2 full not causal"
    assert rows["block"] == "16 (trained 16)" and rows["target layers"] == "[0, 2, 4]"
    assert rows["widths"].startswith("[1, 2, 4, 6, 8, 12, 16], ragged where attention can; ")
    assert rows["mask token"] == "259 '<|mask|>'" and rows["patches"].endswith(", all fit")
    assert "0.029 GB for 20000 tokens, 1536 bytes a token" in rows["memory of a rank"]
    assert seconds < IMPORTS * imports
    [refusal] = json.loads(without_plugins)["refused"]
    assert refusal["text"].startswith("SGLANG_PLUGINS='none': expected dflash_sglang ")


def test_every_problem_is_listed_at_once_and_the_exit_code_is_1(examined: Any) -> None:
    code, said = examined("--tp=3", "--speculative-dflash-block-size=17", "--enable-mis")
    assert code == 1 and said["worker"] is None and said["model"]["block"] == 16
    assert [refusal["field"] for refusal in said["refused"]] == [
        "--enable-mis", "--speculative-dflash-block-size", "draft config num_attention_heads",
        "draft config intermediate_size", "draft config num_key_value_heads",
    ]  # fmt: skip
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/reference/doctor.md").read_text(), re.MULTILINE))
    assert documented >= said.keys()


@pytest.mark.parametrize(("flags", "variable", "field", "text"), [
    ((), ("DFLASH_SGLANG_CONFIG", "{"), "DFLASH_SGLANG_CONFIG", "DFLASH_SGLANG_CONFIG='{' is not JSON"),
    ((), None, "sglang", "patch: another source"),
    (("--device=cpu",), ("DFLASH_SGLANG_CONFIG", ""), "--device", "--device='cpu': expected a GPU"),
])  # fmt: skip
def test_what_ends_a_launch_where_sglang_looks_for_a_device_is_refused(
    flags: Any, variable: Any, field: str, text: str, examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_sglang.sglang_names import launcher
    from dflash_sglang.startup import device_check

    monkeypatch.setattr(device_check, "current_platform", SimpleNamespace(device_name="cuda"))
    hook = functools.partial(hooks.handle_missing_default_values, launcher.handle_missing_default_values)
    monkeypatch.setattr(launcher, "handle_missing_default_values", hook)
    if variable is None:
        monkeypatch.setattr(hooks, "verify", mock.Mock(side_effect=SGLangMismatchError("patch: another source")))
    else:
        monkeypatch.setenv(*variable)
    code, said = examined(*flags)
    [refusal] = said["refused"]
    assert (code, said["worker"], refusal["field"]) == (1, None, field) and refusal["text"].startswith(text)
    assert said["versions"]["sglang"]


def test_a_draft_in_rings_takes_what_its_requests_need_whatever_the_target_has(
    examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"draft_kv": "auto"}')
    window, more = "--speculative-draft-window-size=64", ["--max-running-requests=4", "--max-total-tokens=20000"]
    for flags, rings in (([window, *more], 20), ([window, more[0]], 20), ([window], 64), (more, None)):
        memory = examined(*flags)[1]["memory_per_rank"]
        assert memory["rings"] == rings, flags
        tokens = 20000 if rings is None else rings * memory["ring_tokens"]
        assert memory["kv_bytes"] == tokens * memory["kv_bytes_per_token"]
    assert memory["ring_tokens"] is None
    assert examined(window, "--enable-hierarchical-cache")[1]["memory_per_rank"]["rings"] is None


SWAPPED = "expected a target, and it is a DFLASH draft. Target and draft are swapped"
BOTH = "expected another checkpoint than the draft, and both are the same."
NOT_THERE = "expected a directory, or a downloaded "
NO_DOWNLOAD = "doctor downloads nothing: give a directory, or download it first."
UNREADABLE: list[tuple[list[str], dict[str, str], str]] = [  # flags, changed roles, what is said
    (["--context-length", "99999"], {}, "--context-length 99999: expected at most the context of "),
    (["--no-such-flag", "3"], {}, "unrecognized arguments: --no-such-flag 3$"),
    (["--speculative-algorithm=EAGLE"], {}, "--speculative-algorithm EAGLE: expected DFLASH"),
    ([], {"draft": PAIR["target"], "target": PAIR["draft"]}, f"--target {PAIR['draft']}: {SWAPPED}"),
    ([], {"target": PAIR["draft"]}, f"--target {PAIR['draft']}: {BOTH}"),
    ([], {"draft": "/no/such"}, rf"--draft /no/such: {NOT_THERE}.*\(OSError: no such directory\). Correct it.$"),
    ([], {"draft": "nobody/such"}, f"--draft nobody/such: {NOT_THERE}.*{NO_DOWNLOAD}$"),
]


def test_what_cannot_be_read_is_named_and_the_exit_code_is_2(examined: Any) -> None:
    for flags, roles, expected in UNREADABLE:
        code, said = examined(*flags, **roles)
        assert code == 2 and re.match(expected, said["unreadable"]), (flags, roles, said)
    for old, now, value in (  # flags of model cards that SGLang has renamed
        ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy", "extra_buffer"),
        ("--speculative-dflash-draft-window-size", "--speculative-draft-window-size", "1024"),
    ):
        code, said = examined(f"{old}={value}")
        assert code == 2 and said["unreadable"].endswith(f"{value}. {old} is now {now}")
        assert examined(now, value)[0] == 0


def test_launches_that_decode_nothing_and_flags_and_settings_that_cannot_be_are_refused(
    examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in (
        "--is-embedding", "--encoder-only", "--enable-return-aux-hidden-states", "--tp-size=0",
        "--max-total-tokens=0",
    ):  # fmt: skip
        code, said = examined(flag)
        assert code == 1 and [refusal["field"] for refusal in said["refused"]] == [flag.partition("=")[0]], flag
    assert said["refused"][0]["text"] == "--max-total-tokens=0: expected an integer >= 1. Correct it."
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"draft_head": "fp8"}')
    code, said = examined("--dtype=float32")
    assert code == 1 and said["refused"][0]["text"].startswith("DFLASH_SGLANG_CONFIG: draft_head='fp8': expected ")
    assert examined("--dtype=bfloat16")[0] == 0


def test_a_pasted_command_line_is_read(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ["/usr/bin/python3", "-m", "sglang.launch_server"]
    for words in (["sglang", "serve"], module[2:], module):
        assert examined(*words)[0] == 0, words
    asked: list[Any] = []
    monkeypatch.setattr(run, "doctor", lambda options, flags: asked.append((options.target, flags)) or 0)
    assert main(["doctor", *module, "--model", "T", "--draft", "D"]) == 0
    assert asked == [("T", module)]


def test_a_draft_of_another_worker_is_fine_and_says_why_unless_this_one_is_required(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(Path(PAIR["draft"], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "projector_type": "eagle"}))
    code, said = examined(draft=str(tmp_path))
    assert (code, said["worker"], said["model"]) == (0, "built-in", None)
    assert said["why_built_in"].startswith("draft config projector_type='eagle': ")
    monkeypatch.setenv("DFLASH_SGLANG_REQUIRE", "1")
    code, said = examined(draft=str(tmp_path))
    [refusal] = said["refused"]
    assert code == 1 and refusal["text"].startswith("DFLASH_SGLANG_REQUIRE=1: draft config projector_type")


def test_what_makes_drafts_accept_little_is_suspicious(examined: Any, tmp_path: Path) -> None:
    config = json.loads(Path(PAIR["draft"], "config.json").read_text())
    changed = {"vocab_size": 400, "max_position_embeddings": 1024}
    changed["dflash_config"] = {**config["dflash_config"], "mask_token_id": 97, "target_layer_ids": [2, 0, 4]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    (tmp_path / "model.safetensors").symlink_to(Path(PAIR["draft"], "model.safetensors"))
    tokens_of_target = json.loads(Path(PAIR["target"], "tokenizer.json").read_text())
    tokens_of_target["added_tokens"][0]["content"] = "<|other|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens_of_target))
    code, said = examined(draft=str(tmp_path))
    assert code == 0 and said["vocabulary"]["differing"] == 1
    assert [line.split(":")[0] for line in said["suspicious"]] == [
        "draft config target_layer_ids=[2, 0, 4]",
        "draft config vocab_size=400",
        "tokenizers differ in 1 token ids",
        "draft config mask_token_id=97",
        "--context-length 4096",
    ]


# ---- Sizes -------------------------------------------------------------------------------------------------


def test_break_even_is_what_a_step_reads_over_what_a_plain_one_reads() -> None:
    """An embedding that is looked up is not read; of a mixture the experts of all tokens are."""

    def target(**rows: int) -> dict[str, TensorFacts]:
        names = {"table": "model.embed_tokens.", "up": "layers.0.up_proj.", "expert": "layers.0.experts.0."}
        return {names.get(name, "lm_head.") + "weight": TensorFacts("BF16", (of, 10)) for name, of in rows.items()}

    experts = sizes.Experts(2, 8)
    for rows, of, draft, head, block, plain, verify in (
        (dict(table=1000, up=400, head=100), None, 1000, 2000, 16, 10_000, 10_000),
        (dict(table=1000, up=400), None, 0, 20_000, 16, 28_000, 28_000),
        (dict(expert=800, head=50), experts, 0, 0, 4, 1000 + 4000, 1000 + int(16_000 * (1 - 0.75**4))),
    ):
        even = sizes.break_even(target(**rows), of, draft=draft, head=head, block=block)
        assert even is not None and (even.plain_bytes, even.verify_bytes) == (plain, verify)
        assert even.accept_length == pytest.approx((verify + draft + head) / plain, abs=1e-3)
    for unknown in ({}, target(expert=800, head=50)):
        assert sizes.break_even(unknown, None, draft=0, head=0, block=4) is None


def test_a_rank_has_its_share_of_the_layers_and_a_table_in_nvfp4_counts_as_the_dense_one() -> None:
    spec = DraftSpec.from_config(draft_config())
    held = {
        "layers.0.self_attn.k_proj.weight": TensorFacts("F32", (32, 10)),  # 2 heads
        "fc.weight": TensorFacts("F32", (8, 10)), "d2t": TensorFacts("I64", (320,)),
    }  # fmt: skip
    for ranks, keys in ((1, 640), (2, 320), (4, 320)):
        assert sizes.draft_weights(spec, held, ranks, served=2, in_fp8=False) == keys + 160
        assert sizes.kv_bytes_per_token(spec, ranks, element=2) == 2 * 2 * max(1, 2 // ranks) * 16 * 2
    parts = {"": ("U8", (320, 16)), "_scale": ("F8_E4M3", (320, 2)), "_scale_2": ("F32", ())}
    packed = {f"markov_head.markov_w2.weight{part}": TensorFacts(*facts) for part, facts in parts.items()}
    assert sizes.draft_weights(spec, packed, 1, served=2, in_fp8=False) == 320 * 32 * 2


# ---- Tokens ------------------------------------------------------------------------------------------------


def tokenizer(directory: Path, vocabulary: object, added: dict[str, int]) -> Path:
    directory.mkdir()
    entries = [{"id": i, "content": content} for content, i in added.items()]
    saved = {"model": {"vocab": vocabulary}, "added_tokens": entries}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    return directory


def test_tokens_that_differ_are_counted_and_shown(tmp_path: Path) -> None:
    target = tokenizer(tmp_path / "target", {"a": 0, "b": 1, "c": 2}, {"<mask>": 3})
    draft = tokenizer(tmp_path / "draft", [["a", 0.0], ["x", -1.0]], {"<mask>": 3})
    found = tokens.compare(target, draft, 3)
    assert found.differing == 2 and found.first == ("1: 'b', draft 'x'", "2: 'c', draft None")
    assert found.mask_token == "<mask>" and not found.mask_is_ordinary
    assert tokens.compare(target, target, 1) == tokens.Vocabularies(0, None, (), "b", True)

    for text in ("", "[]", '{"model": {"vocab": 5}}', '{"model": {"vocab": {"a": "b"}}}'):
        (draft / "tokenizer.json").write_text(text)
        found = tokens.compare(target, draft, 3)
        assert found.differing is None and found.why_not is not None and found.mask_token == "<mask>", text
