"""`dflash-sglang check` on the packaged pair: a sound draft, one with swapped layer ids, and a wrong output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.check import run
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from dflash_sglang.demo.server import Client
from tests.support import engines
from training.pair import KNOWN_ANSWERS, RECORD, held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = map(Path, pair_directories().values())
SWAPPED = [4, 2, 0]
OPTIONS = ["--target", str(TARGET), "--json", "--skip-server-warmup"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`prompts.json`, `baseline.json` and `draft`, a copy with swapped layer ids."""
    directory = tmp_path_factory.mktemp("check")
    (directory / "prompts.json").write_text(json.dumps(held_out_prompts()[::5]))
    record = json.loads(RECORD.read_text())["evaluation"]["block_16"]
    (directory / "baseline.json").write_text(json.dumps(record))
    config = json.loads((shutil.copytree(DRAFT, directory / "draft") / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = SWAPPED
    (directory / "draft" / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[ExitStack, list[Client]]]:
    """The plain server of the module's first check, for those after it."""
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, kept: tuple[ExitStack, list[Client]]) -> None:
    stack, servers = kept
    launched = run.plain_server

    @contextmanager
    def plain_server(*arguments: Any) -> Iterator[Client]:
        if not servers:
            servers.append(stack.enter_context(launched(*arguments)))
        yield servers[0]

    monkeypatch.setattr(run, "plain_server", plain_server)
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def checked(files: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """(exit code, findings) of the command."""
    picture = files / "check.png"
    code = main(["check", *OPTIONS, "--png", str(picture), *options])
    assert picture.stat().st_size > 10_000
    return code, json.loads(capsys.readouterr().out)


def test_a_running_server_whose_draft_has_swapped_layer_ids_is_found_out(files, capsys):
    with engines.serve(TARGET, files / "draft", max_total_tokens=6000) as server:
        given = ["--prompts", f"{files}/prompts.json", "--baseline", f"{files}/baseline.json", "--url", server.url]
        code, found = checked(files, capsys, "--draft", f"{files}/draft", "--max-new-tokens", "48", *given)
        assert main(["check", "--target", str(TARGET), "--draft", str(DRAFT), *given]) == 2
        assert f"--draft {DRAFT}: expected {files / 'draft'}" in capsys.readouterr().err
    assert code == 1 and found["verdict"] == "below baseline"
    assert found["equal_outputs"] == found["prompts"] == 16 and found["partings"] == []
    assert 1.2 < found["accept_length"] < 1.75
    assert found["reasons"][0].endswith("below the baseline's 5.94")
    assert found["likely_causes"][0].startswith("target_layer_ids=[4, 2, 0] of 5: ")
    assert "do not ascend" in found["likely_causes"][0]
    assert set(found["steps_by_width"]) == {"16"} and found["worker"] == "dflash_sglang"


def test_the_packaged_pair_is_fine_and_as_good_as_its_record(files, capsys):
    given = ["--prompts", f"{files}/prompts.json", "--baseline", f"{files}/baseline.json"]
    code, found = checked(files, capsys, "--draft", str(DRAFT), *given)
    # Where the machine does other things as well, answers may take longer than plain decoding's.
    slow = found["accept_length_interval"][1] < found["accept_length"] / found["speed_over_plain"]
    assert code == 0 and found["verdict"] == ("weak on these prompts" if slow else "fine")
    assert len(found["reasons"]) == slow and bool(found["likely_causes"]) == slow
    assert all("is below break-even" in reason for reason in found["reasons"])
    assert found["equal_outputs"] == found["prompts"] == 16 and found["dtype"] == "float32"
    record = json.loads((files / "baseline.json").read_text())
    assert found["accept_length"] == pytest.approx(record["accept_length"], rel=0.02)
    low, high = found["accept_length_interval"]
    assert low < found["accept_length"] < high and high - low < 3
    assert found["acceptance_at_position_1_on"] == pytest.approx(record["acceptance_at_position_1_on"], abs=0.05)
    assert found["accept_length_per_prompt"] == pytest.approx(record["accept_length_per_prompt"][::5], abs=0.01)


class Tampered(Client):
    """Answers with the known continuations, two of them changed: in a token and in all from one on."""

    def __init__(self, answers: list[list[int]], changes: dict[int, list[int]]):
        super().__init__("http://tampered")
        self.answers = [changes.get(number, ids) for number, ids in enumerate(answers)]

    def get(self, path: str) -> Any:
        return {"dtype": "float32", "speculative_num_draft_tokens": 16, "internal_states": []}

    def generate(self, **request: Any) -> Any:
        count = len(request["input_ids"])
        first, self.answers = self.answers[:count], self.answers[count:]
        return [{"output_ids": ids, "meta_info": {"spec_correct_drafts_histogram": [1, 1, 9]}} for ids in first]


def test_a_wrong_token_is_a_defect_with_its_margin_and_rank(files, kept, monkeypatch, capsys):
    known = [json.loads(line) for line in KNOWN_ANSWERS.read_text().splitlines()[:10]]
    prompts, answers = ([list(one[key].encode()) for one in known] for key in ("question", "answer"))
    (files / "known.json").write_text(json.dumps(prompts))
    changed = {2: [*answers[2][:5], ord("~"), *answers[2][6:]], 9: [*answers[9][:9], 300, 300]}

    @contextmanager
    def tampered(*_: Any) -> Iterator[Client]:
        yield Tampered(answers, changed)

    monkeypatch.setattr(run, "dflash_server", tampered)
    options = ["--draft", str(DRAFT), "--prompts", str(files / "known.json"), "--max-new-tokens", "64"]
    code, found = checked(files, capsys, *options)
    assert code == 1 and found["verdict"] == "defect" and found["equal_outputs"] == 8
    assert found["reasons"][0].endswith("by more than rounding: 2, the first of prompt 2 at token 5")
    one, other = found["partings"]
    assert (one["prompt"], one["position"], one["plain"], one["dflash"]) == (2, 5, answers[2][5], ord("~"))
    assert one["plain_rank"] == 1 and one["dflash_rank"] != 1 and not one["near_tie"]
    asked = {"temperature": 0, "max_new_tokens": 1}
    ids = prompts[2] + answers[2][:5]
    after = kept[1][0].generate(input_ids=ids, sampling_params=asked, return_logprob=True, top_logprobs_num=320)
    logprobs = {token: logprob for logprob, token, _ in after["meta_info"]["output_top_logprobs"][0]}
    assert one["margin"] == pytest.approx(logprobs[answers[2][5]] - logprobs[ord("~")], abs=1e-3)
    assert one["text_before"].endswith(bytes(ids[-10:]).decode())
    assert one["plain_text"].startswith(chr(answers[2][5])) and one["dflash_text"].startswith("~")
    assert (other["position"], other["dflash"], other["dflash_rank"], other["near_tie"]) == (9, 300, None, False)
