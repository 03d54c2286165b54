"""A draft's training for any target: objective, masks, accept lengths, checkpoint, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_sglang.bench.forced.record import AcceptanceRecord, tokens_of_texts
from dflash_sglang.checkpoint import DraftSpec, read_config
from training import accept, answers, fit
from training.checkpoints import byte_tokenizer
from training.conversations import Conversations
from training.data import BOS, EOS, MASK, PAD
from training.draft_config import free_token
from training.evaluate import load_pair
from training.features import Text, read
from training.modeling import DraftShape, attention_biases
from training.objective import Objective, block_logits, labels_of, masks_of
from training.pair import held_out_prompts, pair_directories
from training.reference import Target, generate

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LLAMA = (LlamaForCausalLM, LlamaConfig(**SIZES, num_hidden_layers=2))
QWEN3 = (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_hidden_layers=4))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    return load_pair()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with a random Qwen3 target and the answers that it gives."""
    return with_answers(tmp_path, *QWEN3)


def with_answers(folder: Path, kind: Any, config: Any) -> Path:
    torch.manual_seed(0)
    target = kind(config).eval()
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    prompts = [list(text.encode())[:9] for text in held_out_prompts()[:6]]
    ids = torch.tensor(prompts)
    for _ in range(24):
        logits = target(ids).logits[:, -1, :256]  # no byte is a special token
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    pairs = [(prompt, row[9:]) for prompt, row in zip(prompts, ids.tolist(), strict=True)]
    Conversations.of(pairs).save(folder / "answers.npz")
    return folder


def run_fit(folder: Path, *more: str) -> dict[str, Any]:
    options = {"target": "target", "answers": "answers.npz", "held-out": "answers.npz", "out": "draft"}
    given = [word for name, value in options.items() for word in (f"--{name}", str(folder / value))]
    fit.main([*given, "--rows", "4", "--anchors", "4", "--length", "40", "--steps", "30", *more])
    return json.loads((folder / "draft" / "training.json").read_text())


@pytest.mark.parametrize("kind", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_few_steps_lower_the_loss_and_the_checkpoint_is_read_as_published_ones_are(
    tmp_path: Path, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_answers(tmp_path, *kind)
    first = run_fit(folder, "--steps", "1")
    last = run_fit(folder, "--rate", "0.1", "--shards", "2", "--turns", "5")
    assert last["loss"] < 0.95 * first["loss"] and last["blocks"] == 30 * 4 * 4  # the mean of all steps
    assert '"mask_token": 259, "text": "<|mask|>"' in capsys.readouterr().out
    spec = DraftSpec.from_config(read_config(folder / "draft"))
    assert (spec.block_size, spec.mask_token_id, len(spec.layers)) == (16, MASK, 5)
    assert list(spec.target_layer_ids) == [1]
    accept.main(
        [
            *("--target", str(folder / "target"), "--draft", str(folder / "draft"), "--length", "40"),
            *("--held-out", str(folder / "answers.npz"), "--records", str(folder), "--out", str(folder / "found")),
        ]
    )
    found = json.loads((folder / "found").read_text())["sets"]["answers"]
    random, trained = (facts["held_out"]["answers"]["accept_length"]["16"] for facts in (first, last))
    assert random < 1.1 and trained > 1.4  # by weights that were not rounded to bf16
    assert found["accept_length"]["16"] == pytest.approx(trained, rel=0.1)


def test_the_loss_is_what_its_definition_says_and_positions_after_a_departure_do_not_count(
    pair: tuple[Any, Any, Any],
) -> None:
    target, draft, _ = pair
    prompt = list(held_out_prompts()[9].encode())[:30]
    ids = torch.tensor([[*prompt, *generate(target, draft, prompt, 60, ignore_eos=True).ids]])
    ids[0, 56] = 35  # a departure from what the target chooses
    features, best = read(target, draft.shape.target_layer_ids, ids)
    lengths, anchors = torch.tensor([90]), torch.tensor([[35, 50, 80]])
    labels, valid = labels_of(ids, best, lengths, anchors, 16)
    for a, anchor in enumerate(anchors[0].tolist()):
        good = True
        for k in range(1, 16):
            good = good and anchor + k < 90
            assert valid[0, a, k - 1] == good
            if good:
                assert labels[0, a, k - 1] == best[0, anchor + k - 1]
                good = bool(ids[0, anchor + k] == best[0, anchor + k - 1])
    objective, masks = Objective(draft.model, target), masks_of(anchors, draft.shape, 90)
    loss, length = objective(features, ids, best, lengths, anchors, masks)
    logits = block_logits(draft.model, objective.embed, objective.head, features, ids, anchors, masks)
    losses = -logits.detach().log_softmax(-1).gather(-1, labels[..., None])[0, ..., 0]
    total, weights, runs = 0.0, 0.0, 0
    for a in range(3):
        chance, right = 1.0, True
        for k in range(int(valid[0, a].sum())):
            weight = math.exp(-k / 7) * (0.2 + 0.8 * chance)
            total, weights = total + weight * float(losses[a, k]), weights + weight
            chance *= math.exp(-float(losses[a, k]))
            right = right and bool(logits[0, a, k].argmax() == labels[0, a, k])
            runs += right
    assert [int(of.sum()) for of in valid[0]] == [15, 6, 9]
    assert float(loss) == pytest.approx(total / weights, rel=1e-4) and float(length) == pytest.approx(1 + runs / 3)
    own, masks, far = anchors[:, 1:2], masks_of(anchors[:, 1:2], draft.shape, 90), best.clone()
    far[0, 56:] = 5
    expected, _ = objective(features, ids, best, lengths, own, masks)
    assert torch.equal(objective(features, ids, far, lengths, own, masks)[0], expected)
    far[0, 55] += 1
    assert objective(features, ids, far, lengths, own, masks)[0] != expected


def test_the_counted_steps_are_the_decoding_loops(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    target, draft, tokenizer = pair
    prompts = [tokenizer.encode(text) for text in held_out_prompts()[3:30:9]]
    outs = [generate(target, draft, prompt, 60, 16, ignore_eos=True) for prompt in prompts]
    held = Conversations.of([(prompt, out.ids) for prompt, out in zip(prompts, outs, strict=True)])
    record = accept.proposals(draft.model, target, held, ranks=accept.RANKS)
    accepted = (record.ranks == 0).cumprod(axis=1).sum(axis=1)
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        steps = accept.steps_of(accepted[record.prompts == i], 16)
        assert steps[:-1] == out.accept_lengths[:-1] and steps[-1] <= out.accept_lengths[-1]
        assert record.tokens[record.prompts == i].tolist() == out.ids[:-1]
        context = draft.context_kv(
            Target(target, draft.shape.target_layer_ids).forward(prompt, 0)[1], torch.arange(len(prompt))
        )
        block = torch.tensor([out.ids[0]] + [MASK] * 15)
        hidden = draft.block(
            target.get_input_embeddings()(block), torch.arange(len(prompt), len(prompt) + 16), context
        )
        expected = target.get_output_embeddings()(hidden[1:]).log_softmax(-1).amax(-1)
        first = torch.from_numpy(record.logprobs[np.flatnonzero(record.prompts == i)[0], :, 0]).float()
        torch.testing.assert_close(first, expected.detach(), rtol=2e-3, atol=2e-3)
    facts = accept.facts_of(record)
    assert facts["tokens"] == 3 * 59 and facts["accept_length"][16] == round(3 * 59 / facts["steps"], 4)
    assert facts["acceptance_by_position"][0] >= facts["acceptance_by_position"][-1]
    path = tmp_path / "record.npz"
    np.savez_compressed(path, **record._asdict())
    again = AcceptanceRecord.load(path, 16)
    assert again.accepted.tolist() == accepted.tolist() and len(tokens_of_texts(path, again)) == 3 * 59


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_are_the_references_biases(kind: str, causal: bool) -> None:
    config = json.loads((Path(pair_directories()["draft"]) / "config.json").read_text())
    shape = DraftShape.from_config(
        {**config, "layer_types": [kind] * 3, "is_causal": causal, "sliding_window": 7, "block_size": 5}
    )
    anchors = torch.tensor([[3, 11, 30], [1, 2, 29]])
    for row, own in enumerate(anchors):
        positions = (own[:, None] + torch.arange(5)).flatten()
        expected = attention_biases(shape, torch.arange(32), positions, own.repeat_interleave(5))
        for mask, bias in zip(masks_of(anchors, shape, 32), expected, strict=True):
            assert torch.equal(mask[row, 0], bias)


def test_a_targets_features_are_the_references_whatever_text_lies_beside(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    texts = [tokenizer.encode(held_out_prompts()[i]) for i in (8, 1, 5)]
    text = Text(target, draft.shape.target_layer_ids, Conversations.of([(t[:20], t[20:]) for t in texts]), 80)
    features, ids, best, lengths = text.rows(torch.arange(3))
    for row, whole in enumerate(texts):
        cut = whole[:80]
        predictions, expected = Target(target, draft.shape.target_layer_ids).forward(cut, 0)
        assert lengths[row] == len(cut) and ids[row, : len(cut)].tolist() == cut
        assert best[row, : len(cut)].tolist() == predictions and text.span[row] == len(cut) - 21
        torch.testing.assert_close(features[row, : len(cut)], expected, rtol=1e-3, atol=1e-3)


def test_the_default_mask_token_is_a_special_one_of_no_other_use() -> None:
    class Tokenizer:
        mask_token_id, chat_template = None, "<|im_start|>{{ messages }}<|im_end|>"
        bos_token_id, eos_token_id, pad_token_id = 1, 2, 3
        added_tokens_decoder: dict[int, Any] = {}

    class Token:
        def __init__(self, content: str, special: bool = True) -> None:
            self.content, self.special = content, special

    of_text, used, beyond = Token("<tool>", False), Token("<|im_start|>"), Token("<|beyond|>")
    Tokenizer.added_tokens_decoder = {1: Token("<s>"), 3: Token("<pad>"), 8: of_text, 9: used, 320: beyond}
    target = QWEN3[0](QWEN3[1])
    with pytest.raises(SystemExit, match="--mask-token is absent: expected a special token"):
        free_token(target, Tokenizer())
    Tokenizer.added_tokens_decoder |= {5: Token("<|a|>"), 6: Token("<|b|>")}
    assert free_token(target, Tokenizer()) == 6


REFUSED = {
    "--mask-token 320: expected 0 to 319": ("--mask-token", "320"),
    f"--mask-token {EOS}: it is the target's eos_token_id": ("--mask-token", str(EOS)),
    f"--mask-token {PAD}: it is the target's pad_token_id": ("--mask-token", str(PAD)),
    "--rows 0: expected more than 0": ("--rows", "0"),
    "none of 6 conversations has two tokens of answer: expected some within --length 10": ("--length", "10"),
    r"--answers .*gone.npz: expected an .npz file of ids, lengths, prompts": ("--answers", "gone.npz"),
    r"--held-out .*model.safetensors: expected an .npz file": ("--held-out", "target/model.safetensors"),
    r"--config gone.json: expected a draft's config.json": ("--config", "gone.json"),
    r"--target gone: expected a causal LM that transformers reads": ("--target", "gone"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_of_fit_is_refused_in_a_line(made: Path, said: str) -> None:
    option, value = REFUSED[said]
    with pytest.raises(SystemExit, match=said) as refused:
        run_fit(made, option, str(made / value) if option in ("--answers", "--held-out") else value)
    assert "\n" not in str(refused.value) and not (made / "draft").exists()


def test_a_mask_token_that_text_has_a_config_of_another_width_and_other_targets_are_refused(made: Path) -> None:
    often = Conversations.load(made / "answers.npz", "").ids
    token, count = int(often[0]), int((often == often[0]).sum())
    with pytest.raises(SystemExit, match=rf"--mask-token {token}: --answers .*answers.npz has it {count} times"):
        run_fit(made, "--mask-token", str(token))
    pair_config = Path(pair_directories()["draft"]) / "config.json"
    with pytest.raises(SystemExit, match=r"hidden_size 256: expected 64, of the target"):
        run_fit(made, "--config", str(pair_config))
    (made / "less.json").write_text(json.dumps({**json.loads(pair_config.read_text()), "block_size": None}))
    with pytest.raises(SystemExit, match=r"--config .*less.json: expected .* \(ValueError: block_size is absent"):
        run_fit(made, "--config", str(made / "less.json"))
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=320)).save_pretrained(made / "other")
    with pytest.raises(SystemExit, match="--target .*other: GPT2LMHeadModel has no `model.layers`, expected"):
        run_fit(made, "--target", str(made / "other"))
    more = np.asarray([400], np.int32)
    np.savez(made / "more.npz", ids=more, lengths=more // 400, prompts=more // 400)
    with pytest.raises(SystemExit, match="token 400: expected tokens below 320"):
        run_fit(made, "--answers", str(made / "more.npz"))


def test_a_draft_of_another_target_or_without_files_is_refused(made: Path) -> None:
    given = ["--target", str(made / "target"), "--held-out", str(made / "answers.npz"), "--draft"]
    with pytest.raises(SystemExit, match=r"hidden_size 256, target_layer_ids \[0, 2, 4\]: expected 64 and layers"):
        accept.main([*given, pair_directories()["draft"]])
    with pytest.raises(SystemExit, match=r"--draft .*target: expected config.json and \*.safetensors of a DFlash"):
        accept.main([*given, str(made / "target")])


def test_bad_prompts_are_refused_before_an_engine_starts(made: Path) -> None:
    prompts, given = made / "prompts", ["--target", str(made / "target"), "--out", str(made / "new.npz")]
    prompts.mkdir()
    given += ["--prompts", str(prompts)]
    with pytest.raises(
        SystemExit, match=r"--prompts .*prompts: expected lines in \*.jsonl files there, found none"
    ):
        answers.main(given)
    for bad in ("no JSON", '"text"', '{"begin": "a"}'):
        (prompts / "a.jsonl").write_text('{"prompt": "b"}\n' + bad + "\n")
        with pytest.raises(SystemExit, match="--prompts .*a.jsonl:2: .*: expected a JSON object with `prompt`"):
            answers.main(given)
    (prompts / "a.jsonl").write_text(json.dumps({"prompt": "long " * 40}))
    with pytest.raises(
        SystemExit, match="'long long .* has 200 tokens: expected at most 156, the target's context"
    ):
        answers.main([*given, "--tokens", "100"])
    (made / "target" / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match="--target .*target: it has no chat template, expected one"):
        answers.main(given)
