"""DFlash2 drafts: the served model against the reference in loops, drawn walks (C16), what is read and refused."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_sglang.config import DraftConfigError, DraftSpec, PluginConfig
from dflash_sglang.families import foreign
from tests import sglang_layers as layers
from tests.int8_quant import dequantised, int8_config, quantised
from tests.reference_dflash2 import ReferenceDFlash2, dflash2_config, dflash2_tensors
from tests.test_sampling import FILTERS, chi_square_bound, sampling_info, target_probs
from tests.tiny import draft_config, write_checkpoint

pytestmark = layers.cpu_only

PREFIXES = (37, 5)  # committed tokens before the first step; the first is longer than the window of 16
MATRIX = dict(target="Qwen3", draft="DFlash2", kv="model dtype")
works = pytest.mark.matrix(**MATRIX, outcome="works")
refused = pytest.mark.matrix(**MATRIX, outcome="refused")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def make_draft(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, quant_config: Any = None
) -> Any:
    """The served model of a DFlash2 config, its weights loaded."""
    from dflash_sglang.models.dflash2 import DFlash2DraftModel

    tensors = dflash2_tensors(config) if tensors is None else tensors
    write_checkpoint(directory, config, tensors)
    with layers.defaults(torch.float32):
        model = DFlash2DraftModel(layers.hf_config(directory), quant_config)
        model.load_weights(tensors.items())
    return model


class Target(nn.Module):
    """A target with an embedding and a head."""

    def __init__(self, vocab: int = 320, hidden: int = 64, scale: float | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(21)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for module in (self.model.embed_tokens, self.lm_head):
            module.weight.data = torch.randn(vocab, hidden, generator=generator)
        if scale is not None:
            self.get_dflash_noise_embedding_scale = lambda: scale


# ---- The model ---------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "as published": ({}, 8),
    "served narrower than trained": ({}, 5),
    "a block of 16, three taps in groups of 4": (
        {"dflash_config": {"block_size": 16, "conv_kernel_size": 3, "conv_group_size": 4}},
        16,
    ),
    "biases, value scale, causal": (
        {"attention_bias": True, "is_causal": True, "dflash_config": {"attention_value_scale": 0.612}},
        8,
    ),
    "no convolution, capped and multiplied logits": (
        {
            "dflash_config": {
                "conv_kernel_size": None,
                "conv_group_size": None,
                "output_multiplier": 0.4,
                "final_logit_softcapping": 5.0,
            }
        },
        8,
    ),
}


@works
@pytest.mark.parametrize(("overrides", "block"), VARIANTS.values(), ids=VARIANTS.keys())
def test_rows_and_proposals_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, overrides, block
):
    from dflash_sglang.drafting.selector import SelectorProposals
    from dflash_sglang.models.context_kv import ContextKV

    config = dflash2_config(**{**overrides})
    model = make_draft(tmp_path, config)
    target = Target()
    model.bind_target(target)
    model.serve_blocks_of(block)
    served = dict(config, dflash_config={**config["dflash_config"], "block_size": block})
    reference = ReferenceDFlash2.from_weights(served, dflash2_tensors(config))
    proposals = SelectorProposals(model.candidate_selector, model.head, 2, block - 1, drawn=False)
    pool = layers.make_pool(model)
    context = ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(3)
    table = 1 + torch.randperm(200, generator=generator).view(2, 100)  # slot of each request's positions
    features = torch.randn(2, 100, 3 * config["hidden_size"], generator=generator)  # of the committed text
    lengths = list(PREFIXES)
    for request, length in enumerate(lengths):
        context.write(features[request, :length], torch.arange(length), table[request, :length])

    for accepts in ((1, block), (4, 3), (block, 1)):
        tokens = torch.randint(0, 320, (2, block), generator=generator)
        embeds = model.forward_embed(tokens)
        rows = [torch.arange(length, length + block) for length in lengths]
        attention = layers.PlainAttention(pool, list(zip(table, lengths, strict=True)), block)
        hidden = layers.run_draft(model, embeds.flatten(0, 1).clone(), torch.cat(rows), attention)
        hidden = hidden.view(2, block, -1)
        proposals.write(hidden[:, 1:], tokens)
        for request, length in enumerate(lengths):
            known = reference.context_kv(features[request, :length], torch.arange(length))
            expected = reference.block(embeds[request], rows[request], known)
            torch.testing.assert_close(hidden[request], expected, rtol=1e-4, atol=1e-4)
            anchor = int(tokens[request, 0])
            assert tokens[request, 1:].tolist() == reference.propose(expected, target.lm_head, anchor)
        # The verify writes context KV of all rows: the committed ones, then those of rejected proposals.
        for request, accept in enumerate(accepts):
            new = features[request, rows[request]].clone()
            new[accept:] = 1e3
            context.write(new, rows[request], table[request, rows[request]])
            lengths[request] += accept


@works
def test_rows_and_edge_scores_equal_those_of_sglangs_own_model(tmp_path):
    """An independent witness: the built-in model on the same checkpoint, not compiled."""
    from sglang.srt.models.dflash import DFlash2DraftModel
    from transformers import PretrainedConfig

    from dflash_sglang.models.selector import Lattice

    config = dflash2_config(layer_types=["sliding_attention"] * 2)
    model = make_draft(tmp_path, config)
    block, bs = 8, 2
    with torch.compiler.set_stance("force_eager"):
        with layers.defaults(torch.float32):
            built_in = DFlash2DraftModel(PretrainedConfig.from_dict(config))
            built_in.load_weights(dflash2_tensors(config).items())
        embeds = torch.randn(bs * block, 64, generator=torch.Generator().manual_seed(2))
        slots = torch.arange(1, 1 + 2 * 40).view(2, 40)
        positions = torch.cat([torch.arange(20, 28), torch.arange(3, 11)])
        hidden = []
        for one in (model, built_in):
            pool = layers.make_pool(model)
            attention = layers.PlainAttention(pool, [(slots[0], 20), (slots[1], 3)], block)
            hidden.append(layers.run_draft(one, embeds.clone(), positions, attention))
        ours, theirs = hidden
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

        rows = ours.view(bs, block, -1)[:, 1:]
        logits, candidates = torch.randn(bs, 7, 320, generator=torch.Generator().manual_seed(5)).topk(5)
        anchors = torch.tensor([4, 9])
        scores = built_in.candidate_selector.build_lattice(
            candidate_ids=candidates, unary_logits=logits, hidden_states=rows, anchor_token_ids=anchors
        )
        tokens, _ = built_in.candidate_selector.sample_path(
            candidate_ids=candidates,
            scores=scores,
            uniforms=torch.rand(bs, 7),
            temperatures=torch.ones(bs),
            greedy_mask=torch.ones(bs, dtype=torch.bool),
        )
        projected, _ = model.candidate_selector.hidden_projection(rows)
        walk = model.candidate_selector.walk(Lattice(candidates, logits, projected), anchors)
        assert walk.tokens.tolist() == tokens.tolist()
        assert tokens.tolist() != candidates[..., 0].tolist(), "edges decide, not the logits alone"


def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path):
    model = make_draft(tmp_path, dflash2_config())
    pool = layers.make_pool(model)
    calls = []
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):  # the modules that all-reduce at TP > 1
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    empty = torch.empty(0, dtype=torch.long)
    hidden = layers.run_draft(model, torch.empty(0, 64), empty, layers.PlainAttention(pool, [], 8))
    assert hidden.shape == (0, 64)
    assert calls == [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")]


def test_the_blocks_embeddings_are_scaled_by_the_draft_or_by_the_target_and_not_by_both(tmp_path):
    model = make_draft(tmp_path, dflash2_config(dflash_config={"input_embedding_scale": 3.0}))
    target = Target()
    model.bind_target(target)
    ids = torch.tensor([5, 3, 3])
    torch.testing.assert_close(model.forward_embed(ids), 3.0 * target.model.embed_tokens.weight[ids])
    message = r"dflash_config.input_embedding_scale=3.0: expected 1.0 or none beside Target.*by 8.0 itself. Remove"
    with pytest.raises(ValueError, match=message):
        model.bind_target(Target(scale=8.0))


# ---- Loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["candidate_selector.predecessor_codebook", "candidate_selector.hidden_projection.weight",
     "layers.1.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_an_error_that_names_it_alone(tmp_path, name):
    config = dflash2_config()
    tensors = dflash2_tensors(config)
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        make_draft(tmp_path, config, tensors)


def test_tensors_of_a_convolution_that_the_config_does_not_have_are_an_error(tmp_path):
    config = dflash2_config(dflash_config={"conv_kernel_size": None, "conv_group_size": None})
    tensors = dflash2_tensors(dflash2_config())
    with pytest.raises(ValueError, match="unexpected tensors .*layers.0.attention_conv.base_kernel"):
        make_draft(tmp_path, config, tensors)


def test_kernels_of_another_size_than_the_configs_are_an_error_that_names_them(tmp_path):
    tensors = dflash2_tensors(dflash2_config())
    config = dflash2_config(dflash_config={"conv_kernel_size": 3})
    with pytest.raises(ValueError, match=r"'layers.0.attention_conv.base_kernel' of shape \(2, 2, 64\)"):
        make_draft(tmp_path, config, tensors)


def test_small_projections_are_quantised_where_the_checkpoint_is_and_not_while_loading(tmp_path):
    small = ("kernel_projection", "hidden_projection")
    config = dflash2_config()
    tensors = dflash2_tensors(config)
    by_loader = make_draft(
        tmp_path / "loader",
        config,
        {k: v for name, tensor in tensors.items() for k, v in _int8(name, tensor, small).items()},
        int8_config(),
    )
    quantised_file = dict(config, quantization_config={"quant_method": "int8"})
    by_file = make_draft(
        tmp_path / "file",
        quantised_file,
        {k: v for name, tensor in tensors.items() for k, v in _int8(name, tensor, ()).items()},
        int8_config(),
    )
    for model, dtype in ((by_loader, torch.float32), (by_file, torch.int8)):
        assert model.layers[0].attention_conv.kernel_projection.weight.dtype == dtype
        assert model.candidate_selector.hidden_projection.weight.dtype == dtype
        assert model.layers[0].mlp.down_proj.weight.dtype == torch.int8
    name = "layers.0.attention_conv.kernel_projection.weight"
    projection = by_file.layers[0].attention_conv.kernel_projection
    rounded = dequantised(projection.weight, projection.weight_scale)
    torch.testing.assert_close(rounded, tensors[name], rtol=0, atol=float(tensors[name].abs().max()) / 120)


def _int8(name: str, tensor: Tensor, kept: tuple[str, ...]) -> dict[str, Tensor]:
    linear = name.endswith("_proj.weight") or name == "fc.weight" or "projection" in name
    if not linear or any(part in name for part in kept):
        return {name: tensor}
    return quantised({name: tensor})


# ---- Drawn walks -------------------------------------------------------------------------------------------

VOCAB, STEPS, REQUESTS, WIDTH = 7, 2, 20_000, 4


class Walker:
    """Draws walks of two tokens after a last one; rows depend on that token alone, as a block's do."""

    def __init__(self, drawn: bool = True) -> None:
        from dflash_sglang.drafting.selector import SelectorProposals
        from dflash_sglang.models.heads import TargetHead
        from dflash_sglang.models.selector import CandidateSelector

        nested = dict(selector_rank=6, selector_top_k=WIDTH)
        spec = DraftSpec.from_config(dflash2_config(vocab_size=VOCAB, dflash_config=nested)).dflash2
        generator = torch.Generator().manual_seed(17)
        with layers.defaults(torch.float32):
            self.selector = CandidateSelector(spec, 8, VOCAB, None, "selector")
        for parameter in self.selector.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.rows = torch.randn(VOCAB, STEPS, 8, generator=generator)
        self.head = TargetHead(nn.Linear(8, VOCAB, bias=False))
        self.head.lm_head.weight.data = torch.randn(VOCAB, 8, generator=generator)
        self._proposals = SelectorProposals(self.selector, self.head, REQUESTS, STEPS, drawn)

    def propose(self, last: Tensor, temperature: float, greedy: bool = False) -> Any:
        tokens = torch.zeros(len(last), STEPS + 1, dtype=torch.long)
        tokens[:, 0] = last
        self._proposals.write(self.rows[last], tokens)
        return self._proposals.draw(
            tokens, torch.full((len(last),), temperature), torch.full((len(last),), greedy)
        )

    def conditionals(self, last: int, temperature: float) -> dict[tuple[int, int], float]:
        """{walk: probability}, by the formula."""
        first, second = self.rows[last]
        expected = {}
        for a, p_a in self._step(last, first, temperature).items():
            for b, p_b in self._step(a, second, temperature).items():
                expected[a, b] = p_a * p_b
        return expected

    @torch.no_grad()
    def likeliest(self, last: int) -> list[int]:
        walk: list[int] = []
        for row in self.rows[last]:
            step = self._step(walk[-1] if walk else last, row, 1.0)
            walk.append(max(step, key=step.__getitem__))
        return walk

    def _step(self, before: int, row: Tensor, temperature: float) -> dict[int, float]:
        s = self.selector
        logits, ids = (self.head.lm_head.weight @ row).topk(WIDTH)
        context = s.predecessor_codebook[before] * (s.hidden_projection.weight @ row)
        scores = logits + s.successor_codebook[ids] @ context
        return dict(zip(ids.tolist(), (scores / temperature).softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_walks_are_drawn_from_the_product_of_their_steps_conditionals(temperature):
    torch.manual_seed(5)
    walker, last = Walker(), 3
    proposals = walker.propose(torch.full((REQUESTS,), last), temperature)
    walks = [tuple(walk) for walk in proposals.tokens[:, 1:].tolist()]
    expected = walker.conditionals(last, temperature)
    observed = Counter(walks)
    assert set(observed) <= set(expected)
    likely = {walk: p * REQUESTS for walk, p in expected.items() if p * REQUESTS >= 5}
    counts = [(observed[walk], count) for walk, count in likely.items()]
    rest = REQUESTS - sum(likely.values())
    if rest >= 5:
        counts.append((REQUESTS - sum(observed[walk] for walk in likely), rest))
    assert sum((got - count) ** 2 / count for got, count in counts) <= chi_square_bound(len(counts) - 1)
    # What a proposal says that it was drawn from is what it was drawn from.
    is_taken = proposals.candidates == proposals.tokens[:, 1:, None]
    said = (proposals.probs * is_taken).sum(-1).prod(-1)
    torch.testing.assert_close(said, torch.tensor([expected[walk] for walk in walks]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(proposals.probs.sum(-1), torch.ones(REQUESTS, STEPS))


@works
@pytest.mark.parametrize("name", FILTERS)
def test_output_follows_the_targets_filtered_distribution_when_walks_are_proposed(name):
    """A Markov target: the joint distribution of two output tokens, by chi-square at 0.001."""
    from dflash_sglang.verify.rejection import NOT_COMMITTED, rejection_sample

    torch.manual_seed(11)
    filters = FILTERS[name]
    table = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))  # logits after each token
    walker = Walker()
    info = sampling_info(REQUESTS, **filters)

    def step(last: Tensor) -> Tensor:
        proposals = walker.propose(last, filters.get("temperature", 1.0), filters.get("top_k") == 1)
        return rejection_sample(table[proposals.tokens].view(-1, VOCAB), info, proposals, kernels=False)

    committed = step(torch.zeros(REQUESTS, dtype=torch.long))
    first = committed[:, 0]
    next_step = step(first)  # of the requests that committed one token
    second = torch.where(committed[:, 1] != NOT_COMMITTED, committed[:, 1], next_step[:, 0])
    conditional = target_probs(table, **filters)
    expected = (conditional[0][:, None] * conditional).flatten() * REQUESTS
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).float()
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = float(((observed - expected) ** 2 / expected)[possible].sum())
    assert chi_square <= chi_square_bound(int(possible.sum()) - 1)
    if name != "top-k of one":
        assert 0 < int((committed[:, 2] != NOT_COMMITTED).sum()) < REQUESTS, "whole walks are accepted too"


class Rank:
    """Stands in for SpecTpSync: rank 0 of a group, which hands its values on."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def sync(self, site: Any, values: Tensor) -> Tensor:
        self.sent.append(values.clone())
        return values


@pytest.mark.parametrize("kind", ["greedy", "seeded", "sampled", "sampled, argmax asked for"])
def test_walks_are_drawn_for_sampled_requests_without_seeds_alone_and_are_the_same_on_all_ranks(kind, monkeypatch):
    from dflash_sglang.drafting import proposer as module

    torch.manual_seed(2)
    drawn = kind != "sampled, argmax asked for"
    walker, bs = Walker(drawn), 64
    last = torch.arange(bs) % VOCAB
    ids = torch.cat([last[:, None], torch.zeros(bs, STEPS, dtype=torch.long)], dim=1)
    hidden = torch.cat([torch.full((bs, 1, 8), float("nan")), walker.rows[last]], dim=1).flatten(0, 1)
    out = SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden))
    proposer = object.__new__(module.Proposer)
    proposer._runner = SimpleNamespace(forward=lambda _: out)
    proposer._selector, proposer._drawn, proposer._layout = walker._proposals, drawn, None
    proposer._tokens = torch.zeros(bs + 3, STEPS + 1, dtype=torch.long)
    proposer._ones = torch.ones(bs + 3, STEPS, 1)
    proposer._tp_sync = rank = Rank()
    monkeypatch.setattr(module, "draft_tp_context", lambda _: nullcontext())
    monkeypatch.setattr(proposer, "_forward_batch", lambda *_: None)
    info = sampling_info(bs, 2.0, **({"top_k": 1} if kind == "greedy" else {}))
    if kind == "seeded":
        info.sampling_seed = torch.arange(bs)
    block = SimpleNamespace(ids=ids, batch_size=bs)
    proposals = [proposer.propose(SimpleNamespace(sampling_info=info), block) for _ in range(2)]
    tokens = [rank.sent[0], rank.sent[1]]
    assert torch.equal(tokens[1], proposals[1].tokens) and torch.equal(tokens[0][:, 0], last)
    if kind == "sampled":
        assert proposals[0].probs.shape == (bs, STEPS, WIDTH) and not torch.equal(*tokens)
    else:
        assert proposals[0].probs.shape == (bs, STEPS, 1) and bool((proposals[0].probs == 1).all())
        likeliest = [walker.likeliest(int(token)) for token in last]
        assert tokens[0][:, 1:].tolist() == tokens[1][:, 1:].tolist() == likeliest


# ---- Configuration -----------------------------------------------------------------------------------------


def shapes(spec: DraftSpec) -> tuple[float, float | None, float]:
    vocabulary = spec.vocabulary
    return vocabulary.logit_multiplier, vocabulary.logit_softcap, vocabulary.embedding_scale


def test_the_published_layout_is_read():
    spec = DraftSpec.from_config(dflash2_config())
    assert spec.block_size == 8 and [layer.causal for layer in spec.layers] == [False, False]
    assert (spec.dflash2.convolution.taps, spec.dflash2.convolution.group_size) == (2, 16)
    assert (spec.dflash2.selector_rank, spec.dflash2.selector_top_k) == (12, 5)
    assert shapes(spec) == (1, None, 1)
    scaled = {"output_multiplier": 2, "final_logit_softcapping": 30.0, "input_embedding_scale": 8.0}
    spec = DraftSpec.from_config(dflash2_config(final_logit_softcapping=15.0, dflash_config=scaled))
    assert shapes(spec) == (2, 30, 8)
    assert DraftSpec.from_config(draft_config()).dflash2 is None


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"])
def test_every_name_of_the_architecture_is_ours_and_registered(name):
    from dflash_sglang.models import dflash2

    config = dflash2_config(architectures=[name], dflash_config={"output_multiplier": 0.5})
    assert foreign(config) is None
    assert DraftSpec.from_config(config).dflash2 is not None
    assert name in [model.__name__ for model in dflash2.EntryClass]


def test_other_families_in_dflash2s_layout_stay_with_the_built_in_worker():
    for overrides in ({"use_gemma_norm": True}, {"speculators_model_type": "dflash2"}):
        assert foreign(dflash2_config(**overrides)) is not None


def test_a_draft_for_muse_glimmer_counts_layers_otherwise_and_stays_with_the_built_in_worker():
    from dflash_sglang.startup import _counts_layers_otherwise

    muse = SimpleNamespace(hf_config=SimpleNamespace(model_type="muse_glimmer"))
    assert "target config model_type='muse_glimmer'" in str(_counts_layers_otherwise(dflash2_config(), muse))
    assert _counts_layers_otherwise(draft_config(), muse) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "conv_kernel_size alone": (
        {"conv_group_size": None},
        r"dflash_config.conv_group_size=None: expected its value beside dflash_config.conv_kernel_size=2: "
        r"a convolution has both. Add dflash_config.conv_group_size \(the one it was trained with\)",
    ),
    "conv_group_size alone": (
        {"conv_kernel_size": 0},
        r"dflash_config.conv_kernel_size=0: expected its value beside dflash_config.conv_group_size=16",
    ),
    "groups that do not divide the hidden size": (
        {"conv_group_size": 24},
        "dflash_config.conv_group_size=24: expected a divisor of hidden_size=64. Correct dflash_config.conv_group",
    ),
    "a fractional tap": (
        {"conv_kernel_size": 1.5},
        "dflash_config.conv_kernel_size=1.5: expected an integer >= 1",
    ),
    "more taps than the kernel unrolls": (
        {"conv_kernel_size": 17},
        "dflash_config.conv_kernel_size=17: expected at most 16 taps. Correct dflash_config.conv_kernel_size",
    ),
    "a rank without candidates": (
        {"selector_top_k": None},
        "dflash_config.selector_top_k=None: expected the size of the candidate selector, which DFlash2 has, "
        "beside selector_rank=12. Add dflash_config.selector_top_k",
    ),
    "candidates without a rank": (
        {"selector_rank": None},
        "dflash_config.selector_rank=None: expected the size of the candidate selector",
    ),
    "more candidates than the kernel holds": (
        {"selector_top_k": 33},
        "dflash_config.selector_top_k=33: expected at most 32 candidates per position. Correct",
    ),
    "a vocabulary of its own": (
        {"draft_vocab_size": 9},
        "draft_vocab_size=9: expected none, or vocab_size=320: the selector's codebooks hold every token",
    ),
    "a negative multiplier": ({"output_multiplier": -1}, "output_multiplier=-1: expected a positive number"),
    "a negative soft cap": ({"final_logit_softcapping": -30.0}, "softcapping=-30.0: expected a positive number"),
    "an infinite scale": (
        {"input_embedding_scale": float("inf")},
        "dflash_config.input_embedding_scale=inf: expected a positive number",
    ),
}


@refused
@pytest.mark.parametrize(("nested", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_cannot_be_served_is_refused_with_the_field_its_value_and_what_to_change(nested, message):
    with pytest.raises(DraftConfigError, match=message) as error:
        DraftSpec.from_config(dflash2_config(dflash_config=nested))
    assert str(error.value).startswith("draft config ") and "config.json" in str(error.value)


@refused
def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(DraftConfigError, match="selector_top_k=5: expected at most 3 candidates"):
        DraftSpec.from_config(dflash2_config(vocab_size=3))


@pytest.mark.parametrize(
    ("setting", "plain", "selector"),
    [("auto", False, True), ("argmax", False, False), ("drawn", True, True)],
)
def test_proposals_are_drawn_by_default_where_the_draft_has_a_joint_distribution(setting, plain, selector):
    config = PluginConfig.from_mapping({"proposals": setting})
    assert (config.draws(joint=False), config.draws(joint=True)) == (plain, selector)
    assert PluginConfig().proposals == "auto"
