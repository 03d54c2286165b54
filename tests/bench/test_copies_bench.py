"""`bench.copies`: what its texts are, and what a draft is said to know of them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bench import copies
from dflash_sglang.bench.forced.record import AcceptanceRecord, tokens_of_texts

PROMPT, ANSWER = 300, 90


def test_edits_of_a_text_make_its_revision() -> None:
    lines = [f"line {at}, word{at}\n" for at in range(60)]
    changes = copies.changed(lines, ["other\n"], random.Random(4))
    text = "".join(lines)
    edits = "".join(copies.as_edits(lines, changes)).split("<<<<<<< SEARCH\n")[1:]
    assert 4 <= len(edits) == len(changes) <= 5
    for edit in edits:
        search, replace = edit.removesuffix(">>>>>>> REPLACE\n\n").split("=======\n")
        assert text.count(search) == 1
        text = text.replace(search, replace)
    assert text == "".join(copies.rewritten(lines, changes)) != "".join(lines)


def test_the_draft_is_better_where_a_text_repeats_itself_and_servers_read_the_file(tmp_path: Path) -> None:
    before, after = copies.text_of("edits", 3, PROMPT, ANSWER)
    assert (before, after) == copies.text_of("edits", 3, PROMPT, ANSWER)  # the same every time
    assert len(before) <= PROMPT and len(after) == ANSWER
    texts = copies.Texts(copies.KINDS, PROMPT, ANSWER, range(1000, 100_000))
    lengths: dict[str, list[float]] = {}
    for inside in ("better", "alike"):
        shares = texts.write(tmp_path / "texts.npz", inside)
        assert shares["rewrite"] > 0.7 and shares["edits"] > 0.4 and max(shares["code"], shares["prose"]) < 0.2
        record = AcceptanceRecord.load(tmp_path / "texts.npz", 16)
        again = np.concatenate([copies.repeats(text) for text in texts.tokens])
        lengths[inside] = [float(record.accepted[again].mean()), float(record.accepted[~again].mean())]
        tokens = tokens_of_texts(tmp_path / "texts.npz", record)
        assert tokens.tolist() == [token for text in texts.tokens for token in text]
    assert lengths["better"][0] > 1.3 * lengths["better"][1]
    assert lengths["alike"][0] == pytest.approx(lengths["alike"][1], rel=0.1)
    for number, prompt in enumerate(prompt for prompts in texts.prompts.values() for prompt in prompts):
        assert prompt[0] == number and texts.tokens[number][: len(prompt)] == prompt
