"""Every family of drafts behind a real server in float32: lossless at every width and accept length, accepted
(C18, C25), sampled output of the target's distribution (C16), the same walks on two ranks (C21).

Drafts and target are the trained ones of `family_drafts`, whose letters lie in the shards of both ranks. A family
has one server, with two ranks or in recorded graphs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.support import family_drafts as drafts
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import accepted_proposals, ask_at_once, greedy, greedy_params, serve
from tests.support.family_drafts import REDUCED, place, spread
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.support.reference_dflash2 import ReferenceDFlash2
from tests.support.reference_gemma4 import gemma4_config, gemma4_tensors
from tests.support.tiny import write_checkpoint
from tests.unit.verify.test_sampling import chi_square_bound
from tests.zoo import pair
from training.pair import held_out_prompts
from training.reference import generate, plain_generate

pytestmark = [pytest.mark.slow, pytest.mark.full]

NEW_TOKENS = 48
TOP_K, TEMPERATURE, DRAWS = 3, 1.6, 800
SAMPLING = dict(temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=3, ignore_eos=True)
LOOPED = slice(2, 5)  # of the prompts, those that the reference decodes too
ANY_WIDTH = {scheduler_hooks.HOOKS_ENV: "widths,oracle,poison", CONFIG_ENV: '{"copy": "off", "width": {}}'}


def tokens(text: str) -> list[int]:
    return [place(byte) for byte in text.encode()]


SAMPLED_PROMPT = tokens(held_out_prompts()[2])  # no near tie at the edge of the top-k


class Family(NamedTuple):
    """A draft, what its server says of it, and how much of it is accepted."""

    make: Callable[[Path], Path]
    lines: tuple[str, ...]
    ranks: int = 2
    use: float = 1.0  # tokens that a step commits, at least, of texts that no oracle knows
    lengths: int = 6  # numbers of accepted proposals that occur beside an oracle, at least
    often: float | None = None  # share of sampled outputs with two tokens of one step, at least; None: not asked


SELECTED = "\n  selector: rank 32 over 16 candidates\n  proposals: drawn\n"
DOMINO = f"domino: GRU of {drafts.STATE}, rank {drafts.GRU_RANK}\n  proposals: drawn"
OF_SEVEN = f"\n  block: {drafts.ROWS + 1} (trained {drafts.ROWS + 1})\n"
MARKOV = "\n  proposals_from: the anchor's row\n  markov_head: rank 32\n  proposals: drawn"
FAMILIES: dict[str, Family] = {
    "speculators DFlash2": Family(
        lambda directory: drafts.dflash2_draft(directory, speculators=True), (SELECTED,), use=1.5, often=0.04
    ),
    "Domino, shifted": Family(
        lambda directory: drafts.domino_draft(directory, shifted=True),
        (f"\n  proposals_from: the anchor's row\n  {DOMINO}",),
        lengths=8,
        often=0.0,
    ),
    "Domino": Family(
        lambda directory: drafts.domino_draft(directory, shifted=False),
        ("\n  block: 16 (trained 16)\n", f"\n  proposals_from: the first mask's row\n  {DOMINO}"),
        ranks=1,
        use=1.5,
        lengths=8,
        often=0.04,
    ),
    "DSpark": Family(drafts.dspark_draft, (OF_SEVEN, MARKOV), ranks=1, often=0.04),
    "speculators DSpark, rnn": Family(
        lambda directory: drafts.dspark_draft(directory, "rnn", speculators=True),
        (OF_SEVEN, "\n  markov_head: rnn, rank 32\n"),
        often=0.04,
    ),
    "speculators DSpark": Family(
        lambda directory: drafts.dspark_draft(directory, REDUCED, speculators=True), (OF_SEVEN, MARKOV), often=0.04
    ),
    "DSpark of Gemma 4's layers": Family(
        drafts.gemma4_draft, ("draft: Gemma4DSparkModel (2 layers)", OF_SEVEN), often=0.04
    ),
    "Gemma norms and swigluoai": Family(drafts.gemma_norms_and_swigluoai, (), use=1.5),
    "Laguna": Family(drafts.laguna, (), use=1.5),
    "NVFP4 with an embedding of its own, stand-ins for its kernels": Family(
        drafts.nvfp4, ("\n  draft_quantization: modelopt\n",), use=1.5
    ),
}


def rows() -> list[Any]:
    """Each family, marked as a row of the support matrix."""
    return [
        pytest.param(
            name,
            id=name,
            marks=pytest.mark.matrix(
                target="Qwen3",
                draft=name.partition(", ")[0] if "DSpark" in name or "Domino" in name else name,
                kv="model dtype" + ", two ranks" * (family.ranks == 2),
                outcome="works",
            ),
        )
        for name, family in FAMILIES.items()
    ]


def prompts() -> list[list[int]]:
    """Of 1 to 300 tokens; a token is a byte."""
    text = tokens("\n".join(held_out_prompts()))
    return [text[1000 * i : 1000 * i + length] for i, length in enumerate((1, 3, 16, 33, 127, 300))]


def request(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS, **sampling))


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spread(drafts.TARGET, tmp_path_factory.mktemp("spread") / "target")


@pytest.fixture(scope="module")
def target(target_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(target: Any) -> list[list[int]]:
    return plain_decodings(target, prompts())


def plain_decodings(model: Any, asked: list[list[int]]) -> list[list[int]]:
    return [plain_generate(model, prompt, NEW_TOKENS, ignore_eos=True) for prompt in asked]


@pytest.fixture(scope="module")
def distribution(target: Any) -> dict[tuple[int, ...], float]:
    return three_tokens(target)


class Served(NamedTuple):
    """The server of a family, and where its instruments have their files."""

    name: str
    family: Family
    server: Server
    records: Path


@pytest.fixture(scope="module", params=rows())
def served(request: Any, target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Blocks of any width; rejected rows are poisoned after every step. One rank in recorded graphs, or two."""
    family = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp("served")
    draft = spread(family.make(directory / "bytes"), directory / "draft")
    records = directory / "records"
    records.mkdir()
    if family.ranks == 1:
        environment = recorded_graphs.recording(records, ANY_WIDTH[scheduler_hooks.HOOKS_ENV], **ANY_WIDTH)
        flags: dict[str, Any] = dict(page_size=16)
    else:
        stand_ins = ["support.quantised_twins"] if "NVFP4" in request.param else []
        environment = test_parallel.watched(records, *stand_ins, **ANY_WIDTH)
        flags = dict(tp_size=2, **test_parallel.RANKS)
    with serve(target_path, draft, environment=environment, max_running_requests=48, **flags) as server:
        yield Served(request.param, family, server, records)
        print(server.log_tail(60))  # shown with a failure
    if family.ranks == 1:
        assert sum(one.role == "draft" for one in recorded_graphs.replays(records)) > 100


def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(served, expected):
    server, family = served.server, served.family
    for line in family.lines:
        assert line in server.log_text()
    asked = [request(prompt) for prompt in prompts()]
    unaided = test_parallel.ask(server, asked, together=False)
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(served.records, prompt, output)
    answers = test_parallel.ask(server, asked, together=True)
    scheduler_hooks.forget(served.records)
    assert [answer["output_ids"] for answer in (*unaided, *answers)] == expected * 2
    assert sum(map(len, expected)) > family.use * test_parallel.steps(unaided), "the draft is of use"
    assert len(accepted := accepted_proposals(answers)) >= family.lengths, accepted
    (state,) = server.get("/server_info")["internal_states"]
    assert min(state["dflash_width"]["steps"].values()) > 0
    if family.ranks == 2:
        test_parallel.assert_same_tokens_on(range(2), dict(sampled=[*unaided, *answers], directory=served.records))


WALKING = [row for row in rows() if FAMILIES[row.values[0]].often is not None]


@pytest.mark.parametrize("served", WALKING, indirect=True)
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests_and_are_those_of_all_ranks(
    served, target, expected, distribution
):
    server = served.server
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask_at_once, server, [request(prompt) for prompt in prompts()], at_once=1)
        sampled = draws(server)
        assert [answer["output_ids"] for answer in beside.result()] == expected
    assert_distributed(server, sampled, distribution, served.family.often)
    if served.family.ranks == 2:
        asked, outputs = [request(SAMPLED_PROMPT)], plain_decodings(target, [SAMPLED_PROMPT])
        test_parallel.assert_ranks_take_the_same_walks(server, asked, outputs, served.records)


def draws(server: Server) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(
            lambda _: server.generate(input_ids=SAMPLED_PROMPT, sampling_params=dict(SAMPLING, n=100)),
            range(DRAWS // 100),
        )
        return [one for answer in answers for one in answer]


def assert_distributed(
    server: Server, sampled: list[dict[str, Any]], distribution: dict[tuple[int, ...], float], often: float = 0.04
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
        for drawn, p in distribution.items():
            logits = target(torch.tensor([[*SAMPLED_PROMPT, *drawn]])).logits[0, -1]
            top, ids = logits.topk(TOP_K)
            weights = [math.exp(x / TEMPERATURE) for x in (top - top[0]).tolist()]
            for token, weight in zip(ids.tolist(), weights, strict=True):
                longer[(*drawn, token)] = p * weight / sum(weights)
        distribution = longer
    return distribution


@pytest.fixture(scope="module")
def dflash2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dflash2")
    return spread(drafts.dflash2_draft(directory / "bytes"), directory / "draft")


@pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="works")
def test_whole_blocks_are_accepted_as_the_reference_loop_accepts_them(
    target_path, target, expected, dflash2, tmp_path
):
    """In graphs. Another context row than the last committed token's would be accepted otherwise."""
    environment = recorded_graphs.recording(tmp_path, "poison", **{CONFIG_ENV: '{"copy": "off"}'})
    with serve(target_path, dflash2, environment=environment, max_running_requests=48, page_size=16) as server:
        answers = ask_at_once(server, [request(prompt) for prompt in prompts()])
        log = server.log_text()
    assert "worker active:\n  draft: DFlash2DraftModel (3 layers)\n  layers: 0-1 sliding(128) causal" in log
    assert f"  convolution: 2 taps, groups of 16{SELECTED}" in log
    assert [answer["output_ids"] for answer in answers] == expected
    config = json.loads((dflash2 / "config.json").read_text())
    reference = ReferenceDFlash2.from_weights(config, load_file(dflash2 / "model.safetensors"))
    lengths: list[int] = []
    for prompt, answer in zip(prompts()[LOOPED], answers[LOOPED], strict=True):
        result = generate(target, reference, prompt, NEW_TOKENS, ignore_eos=True)
        assert answer["meta_info"]["spec_verify_ct"] == len(result.accept_lengths)
        lengths += result.accept_lengths
    assert sum(lengths) / len(lengths) > 2


def test_ranks_with_batches_of_their_own_embed_their_own_walks(target_path, expected, tmp_path):
    """Data-parallel attention: greedy and sampled requests on one rank beside few and none on the other."""
    draft = spread(drafts.domino_draft(tmp_path / "bytes", shifted=False), tmp_path / "draft")
    layout = dict(tp_size=2, dp_size=2, enable_dp_attention=True)
    asked = [dict(request(prompt), routed_dp_rank=int(i > 1)) for i, prompt in enumerate(prompts())]
    drawn = dict(asked[0], sampling_params=asked[0]["sampling_params"] | SAMPLING)
    environment = {"DFLASH_SGLANG_REQUIRE": "1", CONFIG_ENV: '{"width": {}}'}
    with serve(target_path, draft, environment=environment, **layout, **test_parallel.RANKS) as server:
        alone = test_parallel.ask(server, asked[-1:], together=True)
        *together, sampled = test_parallel.ask(server, [*asked, drawn], together=True)
    assert [one["output_ids"] for one in (*alone, *together)] == [expected[-1], *expected]
    assert sum(len(one["output_ids"]) for one in together) > 1.2 * test_parallel.steps(together)
    assert len(sampled["output_ids"]) == 3


@pytest.mark.matrix(target="Gemma 4", draft="DSpark of Gemma 4's layers", kv="model dtype", outcome="works")
def test_a_draft_of_gemma_4s_layers_is_lossless_beside_gemma_4_at_every_width_and_accept_length(tmp_path):
    """Of random models."""
    config = gemma4_config()
    draft = write_checkpoint(tmp_path / "draft", config, gemma4_tensors(config))
    ids = torch.Generator().manual_seed(7)
    asked = [torch.randint(4, 250, (n,), generator=ids).tolist() for n in (5, 33, 100, 200)]
    flags: dict[str, Any] = dict(chunked_prefill_size=64, max_total_tokens=4096)
    with serve(pair("Gemma 4")[0], **flags) as server:
        plain = greedy(server, asked, NEW_TOKENS)
    (tmp_path / "records").mkdir()
    environment = scheduler_hooks.hooked(tmp_path / "records", "", **ANY_WIDTH)
    for prompt, output in zip(asked, plain, strict=True):
        scheduler_hooks.record(tmp_path / "records", prompt, output)
    with serve(pair("Gemma 4")[0], draft, environment=environment, **flags) as server:
        answers = [server.generate(**request(prompt)) for prompt in asked * 2]
    assert [answer["output_ids"] for answer in answers] == plain * 2
    assert len(accepted := accepted_proposals(answers)) >= 5, accepted


@pytest.mark.gpu
@pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="works")
def test_a_gpu_walks_in_the_drafts_graph_as_it_walks_eagerly(target_path, target, dflash2, distribution):
    """bfloat16: near ties may fall otherwise than in float32, so that most outputs are equal, not all."""
    environment = {**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}
    everything = [tokens(text) for text in held_out_prompts()[:24]]
    asked = dict(input_ids=everything, sampling_params=greedy_params(NEW_TOKENS))
    outputs, steps = [], []
    for graphs in (dict(cuda_graph_max_bs_decode=48), dict(disable_cuda_graph=True)):
        with serve(target_path, dflash2, environment=environment, **ON_DEVICE, **graphs) as server:
            answers = server.generate(**asked)
            outputs.append([answer["output_ids"] for answer in answers])
            steps.append(test_parallel.steps(answers))
            assert_distributed(server, draws(server), distribution)
            print(server.log_tail(30))
    plain = plain_decodings(target, everything)
    for of_server in outputs:
        equal = sum(a == b for a, b in zip(of_server, plain, strict=True))
        assert equal >= 14, f"{equal} of 24 outputs equal float32's"
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
    assert sum(len(ids) - 1 for ids in outputs[0]) > 2 * steps[0]
