"""A DFlash2 draft behind a real server in float32: lossless, accepted as the reference loop accepts (C18, C25),
sampled output of the target's distribution (C16), tensor parallel (C21).

The draft is the trained one with random convolutions and a random selector, near enough to nothing that it is
still accepted. What is expected comes from `transformers` and the reference in loops.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.support import scheduler_hooks, tiny
from tests.support.draft_formats import speculators_dflash2
from tests.support.engines import accepted_proposals, greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.support.reference_dflash2 import ReferenceDFlash2, added_tensors, dflash2_config, dflash2_tensors
from tests.support.tiny import write_checkpoint
from tests.unit.verify.test_sampling import chi_square_bound
from training.reference import generate, plain_generate

pytestmark = pytest.mark.slow

TARGET, PLAIN_DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
BLOCK, NEW_TOKENS = 16, 48
SIZES = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=32, selector_top_k=16)
SCALE = 0.15  # of the random additions: about half of the plain draft's acceptance is left
TOP_K, TEMPERATURE, DRAWS = 3, 1.6, 800
SAMPLING = dict(temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=3, ignore_eos=True)
LOOPED = slice(2, 5)  # of the prompts, those that the reference decodes too
SAMPLED_PROMPT = list(held_out_prompts()[2].encode())  # no near tie at the edge of the top-k
TINY = dict(num_key_value_heads=1, vocab_size=40, tie_word_embeddings=True)  # tokens in the shards of two ranks
works = pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="works")


def prompts() -> list[list[int]]:
    """Of 1 to 300 tokens; a token is a byte."""
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[1000 * i : 1000 * i + length]) for i, length in enumerate((1, 3, 16, 33, 127, 300))]


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS, **sampling))


def config_and_tensors(scale: float = SCALE) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    config["dflash_config"] |= {**SIZES, "block_size": config.pop("block_size")}
    config["architectures"] = ["DFlash2DraftModel"]
    tensors = load_file(PLAIN_DRAFT / "model.safetensors")
    added = {name: tensor.bfloat16() for name, tensor in added_tensors(config, scale=scale).items()}
    return config, {**tensors, **added}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dflash2") / "draft", *config_and_tensors())


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(target: Any) -> list[list[int]]:
    return [plain_generate(target, prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts()]


@pytest.fixture(scope="module")
def ours(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """(server, directory of the oracle's records); rejected rows are poisoned after every step."""
    records = tmp_path_factory.mktemp("records")
    environment = scheduler_hooks.hooked(records, "oracle,poison")
    with serve(TARGET, draft, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure


def test_the_start_up_line_says_what_the_draft_is_and_what_is_proposed(ours):
    log = ours[0].log_text()
    assert "worker active:\n  draft: DFlash2DraftModel (3 layers)\n  layers: 0-1 sliding(128) causal" in log
    assert (
        "  convolution: 2 taps, groups of 16\n  selector: rank 32 over 16 candidates\n  proposals: drawn\n" in log
    )


@works
def test_greedy_output_is_plain_decodings_and_accepted_as_the_reference_loop_accepts(ours, target, expected):
    server, _ = ours
    reference = ReferenceDFlash2.from_weights(*config_and_tensors())
    answers = [server.generate(**request(prompt)) for prompt in prompts()]
    assert [answer["output_ids"] for answer in answers] == expected
    assert_accepted_as_in_the_reference_loop(answers, target, reference, more_than=2)


@works
def test_greedy_output_is_plain_decodings_at_every_accept_length_and_in_a_batch(ours, expected):
    server, records = ours
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(records, prompt, output)
    answers = asked_together(server)
    scheduler_hooks.forget(records)
    assert [answer["output_ids"] for answer in answers] == expected
    assert_accept_lengths(answers, at_least=8)


@pytest.mark.full
@works
def test_blocks_of_any_width_are_plain_decodings_and_distributed_as_the_targets(draft, target, expected, tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "widths,poison", **{CONFIG_ENV: '{"width": {}}'})
    with serve(TARGET, draft, environment=environment, max_running_requests=48) as server:
        assert [answer["output_ids"] for answer in asked_together(server)] == expected
        assert_distributed(server, draws(server), three_tokens(target))
        assert_every_width_ran(server)


@works
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, target, expected):
    assert_sampled_beside_greedy(ours[0], target, expected)


def asked_together(server: Server) -> list[dict[str, Any]]:
    """The answers to all prompts."""
    with ThreadPoolExecutor(len(prompts())) as pool:
        return list(pool.map(lambda prompt: server.generate(**request(prompt)), prompts()))


def assert_accept_lengths(answers: list[dict[str, Any]], at_least: int) -> None:
    """Steps of these answers accepted so many different numbers of proposals."""
    assert len(accepted := accepted_proposals(answers)) >= at_least, accepted


def assert_accepted_as_in_the_reference_loop(
    answers: list[dict[str, Any]], target: Any, reference: Any, more_than: float
) -> None:
    """answers: to all prompts; some of them are compared. more_than: the mean accept length of a draft of use."""
    lengths: list[int] = []
    for prompt, answer in zip(prompts()[LOOPED], answers[LOOPED], strict=True):
        result = generate(target, reference, prompt, NEW_TOKENS, ignore_eos=True)
        assert answer["meta_info"]["spec_verify_ct"] == len(result.accept_lengths)
        lengths += result.accept_lengths
    assert sum(lengths) / len(lengths) > more_than


def letter_logprobs(vocab: int) -> torch.Tensor:
    """[vocab, vocab]: how often a byte follows another in English, which two families draft by."""
    counts = torch.full((vocab, vocab), 0.05)
    for before, after in pairwise("\n".join(held_out_prompts()).encode()):
        counts[before, after] += 1
    return (counts / counts.sum(1, keepdim=True)).log()


def write_trained(directory: Path, config: dict[str, Any], added: dict[str, torch.Tensor]) -> Path:
    """The trained plain draft with a config and tensors of a family."""
    tensors = load_file(PLAIN_DRAFT / "model.safetensors")
    added = {name: one.bfloat16() if one.is_floating_point() else one for name, one in added.items()}
    return write_checkpoint(directory, config, tensors | added)


def assert_every_width_ran(server: Server) -> None:
    (state,) = server.get("/server_info")["internal_states"]
    assert min(state["dflash_width"]["steps"].values()) > 0


def assert_plain_at_every_width(server: Server, expected: list[list[int]], at_least: int) -> None:
    """All prompts together, then one by one; at_least: as of `assert_accept_lengths`."""
    answers = asked_together(server) + [server.generate(**request(prompt)) for prompt in prompts()]
    assert [answer["output_ids"] for answer in answers] == expected * 2
    assert_accept_lengths(answers, at_least)
    assert_every_width_ran(server)


def assert_sampled_beside_greedy(
    server: Server, target: Any, expected: list[list[int]], often: float = 0.1
) -> None:
    """Sampled output follows the target's distribution, and greedy requests in its batches are plain decoding's;
    often: as of `assert_distributed`."""
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: [server.generate(**request(prompt))["output_ids"] for prompt in prompts()])
        sampled = draws(server)
        assert beside.result() == expected
    assert_distributed(server, sampled, three_tokens(target), often)


def draws(server: Server) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(
            lambda _: server.generate(input_ids=SAMPLED_PROMPT, sampling_params=dict(SAMPLING, n=100)),
            range(DRAWS // 100),
        )
        return [one for answer in answers for one in answer]


def assert_distributed(
    server: Server, sampled: list[dict[str, Any]], distribution: dict[tuple[int, ...], float], often: float = 0.1
) -> None:
    """By chi-square at 0.001, which one sample in a thousand fails by chance: then another one decides. Walks are
    accepted in part, and at least this `often`."""
    over = over_chi_square(sampled, distribution)
    assert over <= 0 or over_chi_square(draws(server), distribution) <= 0, f"by {over:.1f}, and again"
    steps = [one["meta_info"]["spec_verify_ct"] for one in sampled]
    assert often * DRAWS < steps.count(1) < DRAWS, "two tokens of one step, and of two"


def over_chi_square(sampled: list[dict[str, Any]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square over its bound, outputs of which fewer than five are expected taken as one."""
    observed = Counter(tuple(one["output_ids"]) for one in sampled)
    assert set(observed) <= set(distribution)
    kept = {key for key, p in distribution.items() if p * DRAWS >= 5}
    counts = [(observed[key], distribution[key] * DRAWS) for key in kept]
    counts.append((DRAWS - sum(got for got, _ in counts), DRAWS - sum(count for _, count in counts)))
    chi_square = sum((got - count) ** 2 / count for got, count in counts if count > 1e-3)
    return chi_square - chi_square_bound(len(counts) - 1)


@torch.no_grad()
def three_tokens(target: Any) -> dict[tuple[int, ...], float]:
    """{sampled tokens: probability}."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, p in distribution.items():
            logits = target(torch.tensor([[*SAMPLED_PROMPT, *tokens]])).logits[0, -1]
            top, ids = logits.topk(TOP_K)
            weights = [math.exp(x / TEMPERATURE) for x in (top - top[0]).tolist()]
            for token, weight in zip(ids.tolist(), weights, strict=True):
                longer[(*tokens, token)] = p * weight / sum(weights)
        distribution = longer
    return distribution


def assert_ranks_walk_alike(draft: Path, directory: Path) -> None:
    """Two ranks that draw apart take the same walks of a random draft in the shape of TINY, beside a target of it,
    and output what plain decoding does."""
    target, _ = tiny.make_pair(directory / "pair", target=TINY)
    ids = random.Random(0)
    asked = [request([ids.randrange(4, 40) for _ in range(length)]) for length in (3, 17, 64)]
    expected = test_parallel.continuations(target, [one["input_ids"] for one in asked])
    environment = test_parallel.watched(directory)
    with serve(target, draft, environment=environment, tp_size=2, **test_parallel.RANKS) as server:
        test_parallel.assert_ranks_take_the_same_walks(server, asked, expected, directory)


@pytest.mark.full
@pytest.mark.matrix(target="Qwen3", draft="speculators DFlash2", kv="model dtype, two ranks", outcome="works")
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path):
    """Random models, whose tokens lie in the shards of both ranks: keys and values of a walk that only one of them
    took would be wrong. The draft is in the speculators format."""
    config = dflash2_config(**TINY)
    draft = write_checkpoint(tmp_path / "draft", speculators_dflash2(config), dflash2_tensors(config))
    assert_ranks_walk_alike(draft, tmp_path)


@pytest.mark.gpu
@works
def test_a_gpu_walks_in_the_drafts_graph_as_it_walks_eagerly(draft, target):
    """bfloat16: near ties may fall otherwise than in float32, so that most outputs are equal, not all."""
    environment = {**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}
    everything = [list(text.encode()) for text in held_out_prompts()[:24]]
    asked = dict(input_ids=everything, sampling_params=greedy_params(NEW_TOKENS))
    outputs, steps = [], []
    for graphs in (dict(cuda_graph_max_bs_decode=48), dict(disable_cuda_graph=True)):
        with serve(TARGET, draft, environment=environment, **ON_DEVICE, **graphs) as server:
            answers = server.generate(**asked)
            outputs.append([answer["output_ids"] for answer in answers])
            steps.append(sum(answer["meta_info"]["spec_verify_ct"] for answer in answers))
            assert_distributed(server, draws(server), three_tokens(target))
            print(server.log_tail(30))
    plain = [plain_generate(target, prompt, NEW_TOKENS, ignore_eos=True) for prompt in everything]
    for of_server in outputs:
        equal = sum(a == b for a, b in zip(of_server, plain, strict=True))
        assert equal >= 14, f"{equal} of 24 outputs equal float32's"
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
    assert sum(len(ids) - 1 for ids in outputs[0]) > 2 * steps[0]
