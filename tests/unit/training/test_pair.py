"""The trained pair: its files, its tokenizer, and C25's reference side (accept length, losslessness)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from training.checkpoints import byte_tokenizer
from training.evaluate import load_pair
from training.known_answers import LEAST_GAP, continuation
from training.objective import block_logits, masks_of
from training.pair import KNOWN_ANSWERS, held_out_prompts, pair_directories
from training.reference import Target, generate, plain_generate

RECORD = json.loads((Path(pair_directories()["draft"]).parent / "record.json").read_text())
SUBSET = slice(2, None, 12)
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    return load_pair()


def test_the_tokenizer_gives_every_text_back_byte_for_byte(pair: tuple[Any, Any, Any]) -> None:
    tokenizer = pair[2]
    for text in (
        "  def f(x) :\r\n\treturn x , y !  ",
        "é, 日本語, 🙂, \x00\x7f",
        "<|not a special",
        *held_out_prompts(),
    ):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    specials = [getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")]
    assert specials == [256, 257, 258, 259]


def test_the_files_are_small_and_in_the_published_layout_without_a_causality_flag() -> None:
    sizes = [f.stat().st_size for d in pair_directories().values() for f in Path(d).iterdir() if f.is_file()]
    assert sum(sizes) == sum(RECORD["bytes"].values()) <= 15_000_000
    target, config = (
        json.loads((Path(pair_directories()[name]) / "config.json").read_text()) for name in ("target", "draft")
    )
    assert (target["architectures"], config["architectures"]) == (["Qwen3ForCausalLM"], ["DFlashDraftModel"])
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["block_size"], config["num_target_layers"]) == (128, 16, 5)
    assert config["dflash_config"] == {"mask_token_id": 259, "target_layer_ids": [0, 2, 4]}
    assert not {"is_causal", "sliding_window_non_causal"} & set(config) and target["vocab_size"] % 64 == 0
    shared = ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings", "eos_token_id")
    assert [config[name] for name in shared] == [target[name] for name in shared]
    lengths = [len(text.encode()) for text in held_out_prompts()]
    assert lengths == sorted(lengths) and len(lengths) >= 64 and (lengths[0], lengths[-1]) == (64, 600)


@pytest.mark.slow
def test_the_reference_has_the_recorded_accept_length_and_plain_greedy_decodings_output(
    pair: tuple[Any, Any, Any],
) -> None:
    target, draft, tokenizer = pair
    prompts = [tokenizer.encode(text) for text in held_out_prompts()[SUBSET]]
    plain = [plain_generate(target, ids, NEW_TOKENS, ignore_eos=True) for ids in prompts]
    for size in (16, 8):
        decoded = [generate(target, draft, ids, NEW_TOKENS, size, ignore_eos=True) for ids in prompts]
        assert [result.ids for result in decoded] == plain
        recorded = RECORD["evaluation"][f"block_{size}"]
        expected = recorded["accept_length_per_prompt"][SUBSET]
        assert fmean(one.mean_accept_length for one in decoded) == pytest.approx(fmean(expected), rel=0.01)
        assert recorded["accept_length"] >= 4.0 and max(n for one in decoded for n in one.accept_lengths) == size
    for limit in (1, 2, 3, 18):
        assert generate(target, draft, prompts[0], limit, ignore_eos=True).ids == plain[0][:limit]


@pytest.mark.slow
def test_the_known_answers_are_plain_greedy_decoding_without_near_ties(pair: tuple[Any, Any, Any]) -> None:
    target, _, tokenizer = pair
    known = [json.loads(line) for line in KNOWN_ANSWERS.read_text().splitlines()]
    assert len(known) >= 10 and {one["question"] for one in known} <= set(held_out_prompts())
    for one in known[::5]:
        answer, gap = continuation(target, tokenizer, one["question"])
        assert answer == one["answer"] and gap > 0.99 * LEAST_GAP


def test_many_blocks_over_a_shared_context_equal_each_block_alone(pair: tuple[Any, Any, Any]) -> None:
    target, draft, _ = pair
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    ids = torch.tensor(list(held_out_prompts()[30].encode())[:200])
    _, features = Target(target, draft.shape.target_layer_ids).forward(ids.tolist(), 0)
    anchors = torch.tensor([[170, 3, 90, 12]])
    with torch.no_grad():
        masks = masks_of(anchors, draft.shape, len(ids))
        [together] = block_logits(draft.model, embed, head, features[None], ids[None], anchors, masks)
        for anchor, logits in zip(anchors[0].tolist(), together, strict=True):
            context = draft.context_kv(features[:anchor], torch.arange(anchor))
            block = embed(torch.tensor([ids[anchor].item()] + [draft.shape.mask_token_id] * 15))
            alone = head(draft.block(block, torch.arange(anchor, anchor + 16), context))[1:]
            torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-4)


def test_a_conversation_is_its_messages_in_the_packaged_template_and_the_training_scripts(
    pair: tuple[Any, Any, Any],
) -> None:
    said = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "    return x"}]
    for tokenizer in (pair[2], byte_tokenizer()):
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert text == "def f(x):\n    return x"
