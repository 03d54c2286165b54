"""A head cut down to frequent tokens: the file, the rows on every rank, what is refused, and a server with it."""

from __future__ import annotations

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dflash_sglang import cli
from dflash_sglang.checkpoint import token_map
from dflash_sglang.checkpoint.token_map import TokenMapError, read_token_map
from tests.support import sglang_layers as layers
from tests.support.draft_formats import speculators, zlab
from tests.support.engines import greedy_params, serve
from tests.support.fakes import Together
from tests.support.start_up import launch, refusal, refused
from training.pair import held_out_prompts, pair_directories

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
KEPT, NEW_TOKENS = 40, 48
BLANKS = r"\s+(?!\S)|\s+"
PRETOKENIZERS = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + BLANKS,
    "Qwen": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + BLANKS,
    "o200k": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + BLANKS,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held out"
    path.write_text("\n".join(held_out_prompts()))
    return path


@pytest.fixture(scope="module")
def frequent(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the command writes for the trained pair."""
    out = tmp_path_factory.mktemp("map") / "hot.pt"
    arguments = ["--tokenizer", str(TARGET), "--text", str(text), "--size", str(KEPT), "--out", str(out)]
    assert cli.main(["hot-vocab", *arguments]) == 0
    return out


def test_the_command_writes_special_tokens_and_the_most_frequent_ones_of_the_text(
    frequent: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    special = set(AutoTokenizer.from_pretrained(TARGET).all_special_ids)
    tokens = read_token_map(str(frequent)).tolist()
    assert tokens == sorted(tokens) and len(tokens) == KEPT and special <= set(tokens)
    content = text.read_bytes()  # a token is a byte
    rarest = min(content.count(token) for token in set(tokens) - special)
    assert all(content.count(byte) <= rarest for byte in set(content) - set(tokens))
    arguments = ["--tokenizer", str(TARGET), "--text", str(text), "--size", "5000", "--out", str(tmp_path / "x")]
    assert cli.main(["hot-vocab", *arguments]) == 1
    assert "--size 5000: expected at most" in capsys.readouterr().err


@pytest.fixture
def of_lines(tmp_path: Path) -> Path:
    """A tokenizer with tokens that span line breaks."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["a", ".", " ", "\n", "\n\n", ".\n\n"]
    merges = [("\n", "\n"), (".", "\n\n")]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_tokens_that_span_line_breaks_are_counted(of_lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(token_map, "STRETCH", 30)
    tokenizer = AutoTokenizer.from_pretrained(of_lines)
    text = "aa.\n\na\n\na a\n" * 50  # each time five of "a", one of ".\n\n", "\n\n", " " and "\n", in this order

    def most_frequent(count: int) -> tuple[list[int], float]:
        return token_map.most_frequent(tokenizer, token_map.stretches(io.StringIO(text, newline="")), count)

    assert most_frequent(5) == ([0, 5, 4, 2, 3], 1.0)
    assert most_frequent(1) == ([0], pytest.approx(5 / 9))


@pytest.mark.parametrize("pattern", PRETOKENIZERS)
def test_a_text_is_cut_where_tokenizers_cut_it(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Regex, pre_tokenizers

    monkeypatch.setattr(token_map, "STRETCH", 400)
    split = pre_tokenizers.Split(Regex(PRETOKENIZERS[pattern]), "isolated")
    text = "".join(random.Random(1).choices("ab.,/(7é  \n\n\r", k=40_000))
    pieces = list(token_map.stretches(io.StringIO(text, newline="")))
    apart = [word for piece in pieces for word, _ in split.pre_tokenize_str(piece)]
    assert len(pieces) > 20 and apart == [word for word, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "text", ["", "a\nb", "x" * 99, "a\r\nb\r\n" * 40, "  a\n" * 40, "\n" * 70, "ab\n\nc" * 30], ids=repr
)
def test_a_text_is_read_whole_and_in_pieces_of_bounded_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_map, "STRETCH", 16)
    pieces = list(token_map.stretches(io.StringIO(text, newline="")))
    assert "".join(pieces) == text and all(0 < len(piece) <= 32 for piece in pieces)


def test_what_the_command_cannot_read_or_write_is_said_before_it_counts(
    of_lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--text": tmp_path / "text", "--tokenizer": of_lines, "--out": tmp_path / "out"}
    given["--text"].write_text("a.\n\n" * 9)
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text(json.dumps({"model": 3}))
    wrong = [
        ("--text", tmp_path / "latin", "a file of UTF-8 text (UnicodeDecodeError: "),
        ("--text", tmp_path / "none", "a file of UTF-8 text (FileNotFoundError: "),
        ("--tokenizer", tmp_path / "none", "the directory or name of a tokenizer (OSError: "),
        ("--tokenizer", tmp_path / "broken", "the directory or name of a tokenizer ("),
        ("--out", tmp_path / "none" / "x", "a file that can be written (FileNotFoundError: "),
        ("--out", tmp_path, "a file that can be written (IsADirectoryError: "),
    ]
    for number, (option, value, says) in enumerate(wrong):
        if number == 1:  # of the first one, the text, no more is known before it is read
            monkeypatch.setattr(token_map, "most_frequent", lambda *_: pytest.fail("counted"))
        arguments = [str(part) for pair in {**given, option: value}.items() for part in pair]
        assert cli.main(["hot-vocab", *arguments, "--size", "16"]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert said.startswith(f"dflash-sglang hot-vocab: {option} {value}: expected {says}")
    assert not given["--out"].exists()


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (None, "expected a file|expected an existing file"),
        ([3, 9, 3], "expected every token once, found 3 twice"),
        ([0.5], "expected integers in one dimension, found torch.float32"),
        ({"a": 1}, "expected token ids|expected a list of token ids"),
    ],
    ids=str,
)
def test_a_file_that_is_no_token_map_is_refused(tmp_path: Path, saved: Any, says: str) -> None:
    path = tmp_path / "map.pt"
    if saved is not None:
        torch.save(saved, path)
    with pytest.raises(TokenMapError, match=rf"--speculative-token-map='{path}': ({says})"):
        read_token_map(str(path))


@refused("z-lab with --speculative-token-map, or speculators with a head of its own")
@pytest.mark.parametrize(
    ("own_head", "tokens", "says"),
    [
        (True, range(40), "none beside a draft with a head of its own"),
        (False, range(9), "with 9 tokens': expected 16 tokens or more"),
        (False, range(290, 330), "with token ids 290 to 329': expected ids of the target, 0 to 319"),
    ],
    ids=str,
)
def test_a_token_map_that_does_not_fit_ends_start_up(
    tmp_path: Path, own_head: bool, tokens: range, says: str
) -> None:
    torch.save(list(tokens), tmp_path / "map.pt")
    (tmp_path / "draft").mkdir()
    draft = speculators(tmp_path / "draft", ("head", "embedding")) if own_head else zlab(tmp_path / "draft", {})
    problem = refusal(draft, speculative_token_map=str(tmp_path / "map.pt"))
    assert problem.startswith("--speculative-token-map=") and says in problem


def test_a_token_map_that_fits_is_ours_to_serve(tmp_path: Path) -> None:
    torch.save(list(range(290, 320)), tmp_path / "map.pt")
    (tmp_path / "draft").mkdir()
    draft = zlab(tmp_path / "draft", {})
    assert launch(draft, speculative_token_map=str(tmp_path / "map.pt")).__name__ == "DFlashWorker"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kept", [(0, 1, 5, 6, 7, 19), (17, 18, 19), tuple(range(20))], ids=str)
def test_every_rank_proposes_the_likeliest_of_the_kept_tokens(ranks: int, kept: tuple[int, ...]) -> None:
    """On shards that keep no token, too; the lowest id among equals; with the new weights after a refresh."""
    from dflash_sglang.checkpoint import VocabularySpec
    from dflash_sglang.models.head.copies import HotRows
    from dflash_sglang.models.head.draft_head import DraftHead

    layers.start_rank()
    spec = VocabularySpec(None, None, None, 1.0, 1.0, None)
    ids = torch.tensor(kept)
    weights = [torch.randn(20, 8).round() for _ in range(2)]  # rounded: ties occur
    hidden, rows = torch.randn(30, 8).round(), 20 // ranks
    together = Together(ranks)

    def rank(i: int) -> list[Any]:
        lm_head = nn.Linear(8, rows, bias=False)
        lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=rows * i, num_org_elements=rows)
        lm_head.tp_group = together.of(i)
        lm_head.weight.data = weights[0][rows * i : rows * i + rows].clone()
        hot = HotRows(lm_head, ids)
        head = DraftHead(hot, spec, ids)
        found = []
        for weight in weights:
            lm_head.weight.data.copy_(weight[rows * i : rows * i + rows])
            hot.refresh()
            found.append(head.likeliest(hidden, 3))
        return found

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    for of_rank in results:
        for weight, likeliest in zip(weights, of_rank, strict=True):
            logprobs, rows_of_best = (hidden @ weight.T)[:, ids].sort(stable=True, descending=True)
            assert likeliest.ids.tolist() == ids[rows_of_best[:, :3]].tolist()
            torch.testing.assert_close(likeliest.logprobs, logprobs.log_softmax(-1)[:, :3])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.matrix(target="Qwen3", draft="z-lab, --speculative-token-map", kv="model dtype", outcome="works")
def test_a_server_with_a_token_map_is_lossless_and_proposes_kept_tokens_alone(frequent: Path) -> None:
    prompts = [list(prompt.encode()) for prompt in held_out_prompts()[:8]]
    asked = dict(input_ids=prompts, sampling_params=greedy_params(NEW_TOKENS))
    ours = dict(environment={"DFLASH_SGLANG_REQUIRE": "1"})
    outputs, steps = {}, {}
    for name, paths, flags in (
        ("plain", (TARGET,), {}),
        ("whole", (TARGET, DRAFT), ours),
        ("hot", (TARGET, DRAFT), dict(**ours, speculative_token_map=str(frequent))),
    ):
        with serve(*paths, **flags) as server:
            answers = server.generate(**asked)
            if name == "hot":  # the same weights, through the updater that the copy follows
                server.post("/flush_cache?timeout=60")
                server.post("/update_weights_from_disk", model_path=str(TARGET))
                assert server.generate(**asked)[0]["output_ids"] == answers[0]["output_ids"]
            log = server.log_text()
        outputs[name] = [answer["output_ids"] for answer in answers]
        steps[name] = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    assert outputs["whole"] == outputs["hot"] == outputs["plain"]
    assert f"head: {KEPT} tokens (" in log
    kept = set(read_token_map(str(frequent)).tolist())
    assert any(token not in kept for output in outputs["plain"] for token in output)
    assert steps["whole"] < steps["hot"] < len(prompts) * NEW_TOKENS / 2
