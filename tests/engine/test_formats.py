"""Draft formats: each loads to the numbers of a plain-PyTorch reader of the same files, and serves losslessly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import sglang_layers as layers
from tests.support.draft_formats import FORMATS, matrix, speculators_config, vocabulary_tensors
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.support.reference_formats import FormatReference
from tests.support.tiny import write_checkpoint
from training.evaluate import load_pair
from training.pair import held_out_prompts, pair_directories
from training.reference import ReferenceDraft, generate

VOCABULARY, BLOCK = 320, 8
PREFIX = 37  # longer than the window of 16
TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
REQUIRED = {"DFLASH_SGLANG_REQUIRE": "1", CONFIG_ENV: '{"copy": "off"}'}  # steps are the reference loop's


def row(draft: str) -> pytest.MarkDecorator:
    return pytest.mark.matrix(target="Qwen3", draft=draft, kv="model dtype", outcome="works")


# ---- The numbers of each format ------------------------------------------------------------------------------


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(17)
        self.embed_tokens = nn.Embedding(VOCABULARY, 64)
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8


@pytest.fixture(scope="module")
def rank() -> None:
    layers.start_rank()


def loaded(directory: Path, target: nn.Module) -> Any:
    """The served draft of a checkpoint directory, bound to `target`."""
    from dflash_sglang.models.draft import DFlashDraftModel

    with layers.defaults(torch.float32):
        model = DFlashDraftModel(layers.hf_config(directory))
        model.load_weights(load_file(directory / "model.safetensors").items())
    model.bind_target(target, vocab_size=VOCABULARY)
    return model


@layers.cpu_only
@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("name", [pytest.param(name, marks=row(name)) for name in FORMATS])
def test_context_kv_and_proposals_equal_the_reference_reader(tmp_path: Path, name: str) -> None:
    from dflash_sglang.models.context_kv.projection import ContextKV

    directory = FORMATS[name](tmp_path)
    target = Target()
    table, head = target.embed_tokens.weight.detach().clone(), target.lm_head.weight.detach().clone()
    reference, model = FormatReference.load(directory), loaded(directory, target)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(PREFIX, 3 * 64, generator=generator)
    positions = torch.arange(PREFIX + BLOCK)
    slots = 1 + torch.randperm(200, generator=generator)[: len(positions)]

    pool, context = layers.make_pool(model), ContextKV(model)
    context.bind(pool)
    context.write(features, positions[:PREFIX], slots[:PREFIX])
    known = reference.draft.context_kv(features, positions[:PREFIX])
    for layer, kv in enumerate(known):
        for buffer, expected in zip(pool.get_kv_buffer(layer), kv, strict=True):
            torch.testing.assert_close(buffer[slots[:PREFIX]], expected, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        last_token = 41
        block = torch.tensor([last_token] + [model.spec.mask_token_id] * (BLOCK - 1))
        embeds = model.forward_embed(block)
        expected_embeds = reference.embeds(last_token, table)
        torch.testing.assert_close(embeds, expected_embeds)
        attention = layers.PlainAttention(pool, [(slots, PREFIX)], BLOCK)
        hidden = layers.run_draft(model, embeds.clone(), positions[PREFIX:], attention)
        expected_hidden = reference.draft.block(expected_embeds, positions[PREFIX:], known)
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
        expected_logits = reference.logits(expected_hidden[1:], head, VOCABULARY)[:, :VOCABULARY]
        ids, logprobs = model.head.likeliest(hidden[1:], 16)
        expected = expected_logits.log_softmax(-1)
        assert ids[:, 0].tolist() == expected.argmax(-1).tolist()
        torch.testing.assert_close(logprobs, expected.topk(16).values, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logprobs, expected.gather(1, ids), rtol=1e-4, atol=1e-4)
    assert torch.equal(target.embed_tokens.weight, table)
    assert torch.equal(target.lm_head.weight, head)


@layers.cpu_only
@pytest.mark.usefixtures("rank")
def test_weight_updates_reach_a_head_and_a_mask_row_of_the_drafts_own(tmp_path: Path) -> None:
    model = loaded(FORMATS["speculators with a reduced vocabulary"](tmp_path / "head"), Target())
    new = torch.zeros_like(model.lm_head.weight)[: model.lm_head.org_vocab_size]
    new[3] = 1
    model.load_weights([("lm_head.weight", new)])
    assert model.head.likeliest(torch.ones(1, 64), 1).ids.tolist() == [
        [3 * 7]
    ]  # its fourth token: the target's 21
    model = loaded(FORMATS["z-lab with a mask_embedding tensor"](tmp_path / "mask"), Target())
    model.load_weights([("mask_embedding", torch.full((1, 64), 9.0))])
    assert bool((model.forward_embed(torch.tensor([3])) == 9).all())


def test_sinks_of_the_cpu_backend_are_one_more_logit_of_each_head() -> None:
    from dflash_sglang.attention.dense import attend, group_queries

    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, dim, queries = 4, 2, 8, 3
    q = torch.randn(2 * queries, heads, dim, generator=generator)
    k, v = (torch.randn(40, kv_heads, dim, generator=generator) for _ in "kv")
    sinks = torch.tensor([-1.0, 0.0, 1.5, 4.0])
    table = torch.randperm(40, generator=generator).view(2, 20)
    prefixes = [5, 9]
    groups = group_queries(table, torch.tensor([1, 0]), prefixes, [queries] * 2)
    for causal, window in ((True, None), (False, None), (True, 3)):
        out = attend(q, k, v, groups, causal=causal, window_left=window, scale=0.3, sinks=sinks)
        for request, prefix in enumerate(prefixes):
            slots = table[1 - request, : prefix + queries]
            for i in range(queries):
                seen = slots[: prefix + i + 1] if causal else slots
                seen = seen if window is None else seen[-window - 1 :]
                for head in range(heads):
                    query = q[request * queries + i, head]
                    weights = (k[seen, head // 2] @ query * 0.3).exp()
                    expected = weights @ v[seen, head // 2] / (weights.sum() + sinks[head].exp())
                    torch.testing.assert_close(out[request * queries + i, head], expected, rtol=1e-4, atol=1e-5)


# ---- The trained pair in each format -------------------------------------------------------------------------

NEW_TOKENS = 48
PROMPTS = [list(text.encode()) for text in held_out_prompts()[5::20]]


def asked(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    settings = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return dict(input_ids=prompt, sampling_params={**settings, **sampling})


def greedy(server: Server) -> dict[str, Any]:
    """Greedy outputs of the prompts and the verify steps that they took."""
    answers = [server.generate(**asked(prompt)) for prompt in PROMPTS]
    return dict(
        ids=[answer["output_ids"] for answer in answers],
        steps=[answer["meta_info"].get("spec_verify_ct") for answer in answers],
    )


def pair_tensors() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The trained draft's config and tensors, and the target's tensors."""
    config = json.loads((DRAFT / "config.json").read_text())
    return config, load_file(DRAFT / "model.safetensors"), load_file(TARGET / "model.safetensors")


def likeliest_tokens(count: int) -> list[int]:
    """The bytes that the held-out prompts hold most of, and the lowest others up to `count`, ascending."""
    frequent = [byte for byte, _ in Counter(b for text in held_out_prompts() for b in text.encode()).most_common()]
    others = [i for i in range(VOCABULARY) if i not in frequent]
    return sorted((frequent + others)[:count])


def exported(directory: Path, kept: list[int] | None = None) -> Path:
    """The trained draft in the speculators format, with copies of the target's head and embedding."""
    config, tensors, of_target = pair_tensors()
    tensors["embed_tokens.weight"] = of_target["model.embed_tokens.weight"].clone()
    ids = list(range(VOCABULARY)) if kept is None else kept
    tensors["lm_head.weight"] = of_target["lm_head.weight"][ids].clone()
    if kept is not None:
        tensors |= vocabulary_tensors(kept, VOCABULARY)
    layer_ids = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    written = speculators_config(config, draft_vocab_size=len(ids), aux_hidden_state_layer_ids=layer_ids)
    return write_checkpoint(directory, written, tensors)


def with_fields(directory: Path) -> Path:
    """The trained draft in z-lab's format: the target's row of the mask in a file, sinks that cost it many steps,
    other ones for each head and layer, and scaled and capped logits, of which the greedy token knows nothing."""
    config, tensors, of_target = pair_tensors()
    config["dflash_config"] |= dict(
        attention_sink_bias=True, output_multiplier=0.5, final_logit_softcapping=30.0, input_embedding_scale=1.0
    )
    for i in range(config["num_hidden_layers"]):
        tensors[f"layers.{i}.self_attn.attention_sink_bias"] = 9.0 + i - torch.arange(4.0)
    write_checkpoint(directory, config, tensors)
    row = of_target["model.embed_tokens.weight"][259].clone()
    torch.save({"embedding": row, "mask_token_id": 259, "per_position": False}, directory / "mask_embedding.pt")
    return directory


def reference_steps(draft: Path) -> list[int]:
    """Verify steps of the reference loop, which embeds with the whole target's table."""
    target, _, _ = load_pair()
    reference = FormatReference.load(draft).draft
    return [
        len(generate(target, reference, prompt, NEW_TOKENS, ignore_eos=True).accept_lengths) for prompt in PROMPTS
    ]


def target_without_a_mask_row(directory: Path) -> Path:
    """The trained target, its embedding of the mask token lost."""
    tensors = load_file(TARGET / "model.safetensors")
    tensors["model.embed_tokens.weight"][259] = 0.7
    return write_checkpoint(directory, json.loads((TARGET / "config.json").read_text()), tensors)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    with serve(TARGET) as server:
        return greedy(server)


@pytest.fixture(scope="module")
def zlab() -> dict[str, Any]:
    with serve(TARGET, DRAFT, environment=REQUIRED) as server:
        return greedy(server)


def decoded(target: Path, draft: Path, **flags: Any) -> tuple[dict[str, Any], int, str]:
    """Greedy outputs, steps of samples, and the log of a launch."""
    with serve(target, draft, **{"environment": REQUIRED, **flags}) as server:
        result = greedy(server)
        sampled = [server.generate(**asked(prompt, temperature=0.3)) for prompt in PROMPTS]
        return result, sum(answer["meta_info"]["spec_verify_ct"] for answer in sampled), server.log_text()


@pytest.mark.full
@pytest.mark.slow
@row("speculators with its own head and embedding")
@row("speculators with a reduced vocabulary")
def test_speculators_exports_of_the_pair_decode_in_the_same_steps(plain, zlab, tmp_path: Path) -> None:
    result, _, log = decoded(TARGET, exported(tmp_path / "full"))
    assert result == {"ids": plain["ids"], "steps": zlab["steps"]}
    assert "target_layers: [0, 2, 4]" in log
    assert "own_modules: head of 320 tokens, embedding of 320 tokens" in log
    reduced = exported(tmp_path / "reduced", likeliest_tokens(200))  # on two ranks, greedy and drawn
    environment = {**REQUIRED, CONFIG_ENV: json.dumps({"copy": "off", "proposals": "drawn"})}
    ranks = dict(tp_size=2, disable_custom_all_reduce=True)
    result, steps, log = decoded(TARGET, reduced, environment=environment, **ranks)
    assert "own_modules: head of 200 tokens, embedding of 320 tokens" in log
    assert result["ids"] == plain["ids"] and sum(result["steps"]) <= 1.03 * sum(zlab["steps"])
    assert len(PROMPTS) * NEW_TOKENS >= 3 * steps


@pytest.mark.full
@pytest.mark.slow
@row("z-lab with mask_embedding.pt")
@row("z-lab with attention sinks and a value scale")
@row("z-lab with scaled embeddings and scaled, capped logits")
def test_a_mask_row_and_sinks_decode_in_the_steps_of_the_reference_loop(plain, zlab, tmp_path: Path) -> None:
    target, draft = target_without_a_mask_row(tmp_path / "target"), with_fields(tmp_path / "draft")
    expected = reference_steps(draft)
    assert sum(expected) > 1.5 * sum(zlab["steps"])  # the sinks are felt
    result, _, log = decoded(target, draft)
    assert "own_modules: mask row" in log
    assert result == {"ids": plain["ids"], "steps": expected}


class AnchorFirst(ReferenceDraft):
    """The reference of a draft whose anchor's row proposes, too: a block has no row for its last token."""

    def block(self, block_embeds: torch.Tensor, positions: torch.Tensor, *context: Any) -> torch.Tensor:
        return super().block(block_embeds[:-1], positions[:-1], *context)

    def propose(self, hidden: torch.Tensor, head: nn.Module, anchor: int) -> list[int]:
        return head(hidden).argmax(-1).tolist()


@pytest.mark.full
@pytest.mark.slow
@row("DFlash whose anchor's row proposes, the block by a flag")
@row("z-lab with padding behind its own head")
def test_the_anchors_row_proposes_in_the_steps_of_the_reference_loop_and_padding_of_a_head_never(
    plain, tmp_path: Path
) -> None:
    """The trained pair, whose rows propose by the other layout; the target's head with rows that would win."""
    config, tensors, of_target = pair_tensors()
    reference = AnchorFirst(ReferenceDraft.from_weights({**config, "block_size": BLOCK}, tensors).model)
    target, _, _ = load_pair()
    loops = [generate(target, reference, prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    del config["block_size"]
    config["dflash_config"]["query_zero_predicts_next"] = True
    head = of_target["lm_head.weight"]
    tensors["lm_head.weight"] = torch.cat((head, 100 * matrix(64, head.shape[1], 3).to(head)))
    draft = write_checkpoint(tmp_path / "draft", config, tensors)
    result, steps, log = decoded(TARGET, draft, speculative_dflash_block_size=BLOCK)
    assert f"block: {BLOCK} (trained {BLOCK})" in log and "proposals_from: the anchor's row" in log
    assert result == {"ids": plain["ids"], "steps": [len(loop.accept_lengths) for loop in loops]}
    assert steps <= 1.1 * sum(result["steps"])


# ---- On a GPU: pytest -m gpu tests/engine/test_formats.py -----------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
def test_own_modules_in_captured_graphs_accept_as_much_as_the_zlab_draft(tmp_path: Path) -> None:
    flags = dict(cuda_graph_max_bs_decode=8, **ON_DEVICE)
    environment = {**DEVICE_ENVIRONMENT, **REQUIRED}
    with serve(TARGET, DRAFT, environment=environment, **flags) as server:
        of_zlab = sum(greedy(server)["steps"])
    for name, kept in (("full", None), ("reduced", likeliest_tokens(200))):
        with serve(TARGET, exported(tmp_path / name, kept), environment=environment, **flags) as server:
            steps = sum(greedy(server)["steps"])
        print(f"{name}: {steps} steps, z-lab: {of_zlab}")
        assert steps <= 1.06 * of_zlab, name


@pytest.mark.gpu
@pytest.mark.slow
@row("z-lab with attention sinks on fa3 and triton")
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_sinks_and_a_mask_row_on_a_gpu_take_the_steps_of_the_reference_loop(tmp_path: Path, backend: str) -> None:
    target, draft = target_without_a_mask_row(tmp_path / "target"), with_fields(tmp_path / "draft")
    expected = sum(reference_steps(draft))  # in float32; without the sinks they would be fewer by a third
    flags = dict(cuda_graph_max_bs_decode=8, speculative_draft_attention_backend=backend, **ON_DEVICE)
    with serve(target, draft, environment={**DEVICE_ENVIRONMENT, **REQUIRED}, **flags) as server:
        steps = sum(greedy(server)["steps"])
    print(f"{backend}: {steps} steps, reference: {expected}")
    assert abs(steps - expected) <= 0.12 * expected
