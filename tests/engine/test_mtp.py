"""Step-3.5's own multi-token-prediction layers as the draft, behind a real server in float32.

Weights are random, so the layers choose the recorded continuation, with errors: steps commit 1 to 4 tokens. Steps
of width 1 leave their rows to later ones. With two KV groups one layer keeps its rows at the target's full slots,
two at its sliding ones: there are few of these, and texts are several windows long, so that slots of a request's
early tokens are freed, and taken again, while it decodes.
"""

from __future__ import annotations

import functools
import json
import shutil
import urllib.error
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV
from tests.engine import test_request_fields as fields
from tests.engine import test_sampled_serving as sampled
from tests.engine import test_slots as slots
from tests.engine.test_parallel import RANKS_ENV
from tests.engine.test_weight_update import changed_copy
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.collectives import DIRECTORY_ENV
from tests.support.engines import RETRACTING, greedy, greedy_params, serve
from tests.zoo import step3p5
from tests.zoo.member import directory_of
from tests.zoo.step3p5 import FULL, LAYERS, MTP_LAYERS, SLIDING, TYPES, WINDOW, Reference
from training.pair import pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TYPES_OF_GROUPS = [*TYPES[:LAYERS], SLIDING, FULL, SLIDING]
CHUNK, NEW_TOKENS = 64, 40
LENGTHS = (1, 2, 33, 65, 100, 200)  # the longer ones are prefilled in chunks; the last chunk of 65 has one token
COMMON: dict[str, Any] = dict(chunked_prefill_size=CHUNK, max_total_tokens=4096)
OF_GROUPS: dict[str, Any] = dict(max_total_tokens=2048, swa_full_tokens_ratio=0.25)
WIDTHS = [1, 2, 3, 4]
CONFIG: dict[str, Any] = {"width": {"widths": WIDTHS}}
HOOKS = "widths,stretches"
LIKELY = slice(40, 52)  # tokens that all heads favour, so that random layers propose what the target samples


@functools.cache
def checkpoint(groups: int = 1) -> Path:
    if groups == 1:
        return step3p5.write(directory_of("Step-3.5"))
    return step3p5.write(directory_of("Step-3.5 in two KV groups"), TYPES_OF_GROUPS)


@functools.cache
def reference(groups: int = 1) -> Reference:
    return Reference(checkpoint(groups))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 250, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def both_turns(groups: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    """What a server without speculation answers, and what then to prompts that begin with these answers."""
    new_tokens, arguments = (NEW_TOKENS, COMMON) if groups == 1 else (4 * WINDOW, COMMON | OF_GROUPS)
    with serve(checkpoint(groups), **arguments) as server:
        first = greedy(server, prompts(), new_tokens)
        return first, greedy(server, next_prompts(prompts(), first), new_tokens)


def next_prompts(asked: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + output + [9, 8, 7] for prompt, output in zip(asked, outputs, strict=True)]


@contextmanager
def ours(
    directory: Path,
    hooks: str,
    *modules: str,
    groups: int = 1,
    config: dict[str, Any] | None = None,
    graphs: bool = False,
    **arguments: Any,
) -> Iterator[tuple[Server, Path]]:
    """modules: see `scheduler_hooks.install`; config: the plugin's; graphs: whether forwards run in recorded
    graphs."""
    records = directory / "records"
    records.mkdir()
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    variables = {RANKS_ENV: str(records), DIRECTORY_ENV: str(records), CONFIG_ENV: json.dumps(config or {})}
    environment = hooked(records, hooks, *modules, **variables)
    target = checkpoint(groups)
    with serve(target, target, environment=environment, **{**COMMON, **arguments}) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure


class Noted(NamedTuple):
    """A block: the likeliest token of each layer, and what was chosen in its place."""

    rid: str
    prefix: int
    likeliest: list[int]
    chosen: list[int]


def noted(records: Path) -> list[Noted]:
    """The blocks of this test's requests."""
    blocks = [Noted(*row) for row in scheduler_hooks.noted(records, "mtp.jsonl")]
    return [block for block in blocks if block.rid.startswith("text")]


def commits_of(blocks: Sequence[Noted]) -> set[int]:
    """How many tokens steps committed, by the next block of the same request; other requests' may lie between."""
    prefixes: dict[str, set[int]] = {}
    for block in blocks:
        prefixes.setdefault(block.rid, set()).add(block.prefix)
    return {after - before for of in prefixes.values() for before, after in pairwise(sorted(of))}


def wrong_proposals(blocks: Sequence[Noted], texts: dict[str, list[int]], groups: int = 1) -> int:
    """Blocks whose proposals are not the reference's for the text before them."""
    count = 0
    for block in blocks:
        text = texts[block.rid][: block.prefix + 1]
        if len(text) == block.prefix + 1:  # else the step began behind the request's end
            chosen = (*block.chosen, *[0] * (MTP_LAYERS - len(block.chosen)))
            proposed = expected(tuple(text), chosen, groups)
            count += block.likeliest != proposed[: len(block.likeliest)]
    return count


@functools.cache
def expected(text: tuple[int, ...], chosen: tuple[int, ...], groups: int) -> list[int]:
    return reference(groups).propose(torch.tensor(text), torch.tensor(chosen))[0].tolist()


def ask(server: Server, records: Path, outputs: list[list[int]]) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Answers to prompts, one after the other, and texts by rid. The draft aims at the outputs."""
    answers, texts = [], {}
    for prompt, output in zip(prompts(), outputs, strict=True):
        scheduler_hooks.record(records, prompt, output)
        rid = f"text {len(prompt)}"
        answer = server.generate(input_ids=prompt, rid=rid, sampling_params=greedy_params(len(output)))
        answers.append(answer["output_ids"])
        texts[rid] = prompt + output
    return answers, texts


CASES: dict[str, dict[str, Any]] = {
    "blocks of one width, pages of 16": dict(page_size=16),
    "every width, in graphs": dict(config=CONFIG, graphs=True),
    "two KV groups, every width, in graphs, pages of 64": dict(
        groups=2, config=CONFIG, graphs=True, page_size=64, **OF_GROUPS
    ),
}


def case(name: str, kv: str) -> Any:
    row = pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv=kv, outcome="works")
    return pytest.param(CASES[name], id=name, marks=row)


@pytest.mark.parametrize(
    "settings",
    [*map(case, CASES, ("model dtype", "model dtype, every width", "model dtype, two KV groups"))],
)
def test_output_is_plain_decodings_and_every_block_is_the_references(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, every_width = settings.get("groups", 1), "config" in settings
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "1")  # as soon as nobody reads them
    first, second = both_turns(groups)
    hooks = "mtp" + ",freed" * (groups > 1) + f",{HOOKS}" * every_width
    with ours(tmp_path, hooks, **settings) as (server, records):
        together = greedy(server, prompts(), len(first[0]))
        after_hits = greedy(server, next_prompts(prompts(), first), len(first[0]))
        server.post("/flush_cache?timeout=60")
        answers, texts = ask(server, records, first)
        log = server.log_text()
    assert (together, after_hits) == (first, second)
    assert answers == first
    blocks = noted(records)
    assert wrong_proposals(blocks, texts, groups) == 0
    if groups == 1:
        assert "draft: MTP(3 layers: sliding, sliding, sliding; own heads)" in log
        for prompt, output in zip(prompts(), first, strict=True):  # the reference's target is the server's
            logits = reference().logits(torch.tensor(prompt + output[:-1]))
            assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output
    else:
        assert "slots, sliding ones its sliding slots" in log
        assert "GB for 2048 tokens, 512 of sliding layers" in log
    if not every_width:
        commits = commits_of(blocks)
        assert commits >= set(range(1, MTP_LAYERS + 2)), commits
        return
    widths = [len(block.chosen) + 1 for block in blocks]
    assert set(widths) == set(WIDTHS)
    stretches = {len(list(steps)) for width, steps in groupby(widths) if width == 1}
    rows = MTP_LAYERS + 1  # of a window
    assert len(stretches) > rows and max(stretches) > 2 * rows, stretches
    replayed = [replay for replay in recorded_graphs.replays(records) if replay.role == "draft"]
    assert len(replayed) > len([width for width in widths if width > 1])
    assert {replay.captured > replay.requests for replay in replayed} == {True, False}


def test_requests_at_the_context_limit_are_plain_decodings(tmp_path: Path) -> None:
    """Each twice: the cache then has all of its prompt but some tokens, and windows end behind the last one."""
    arguments: dict[str, Any] = dict(context_length=slots.CONTEXT, allow_auto_truncate=True)

    def outline(server: Any, lengths: tuple[int, int]) -> Any:
        return slots.outline(slots.ask(server, *lengths))

    with serve(checkpoint(), **arguments) as server:
        expected = [outline(server, lengths) for lengths in slots.AT_THE_LIMIT]
    with ours(tmp_path, HOOKS, config=CONFIG, page_size=16, **arguments) as (server, _):
        for _ in range(2):
            assert [outline(server, lengths) for lengths in slots.AT_THE_LIMIT] == expected
        with ThreadPoolExecutor(len(expected)) as pool:
            assert list(pool.map(lambda lengths: outline(server, lengths), slots.AT_THE_LIMIT)) == expected


def test_request_fields_act_as_in_plain_decoding_at_every_width(tmp_path: Path) -> None:
    """Seeds, grammars, logprobs, stops, penalties and logit processors, one beside the other, with requests that
    are retracted and go on."""
    target = shutil.copytree(checkpoint(), tmp_path / "target")
    for file in Path(pair_directories()["target"]).glob("tokenizer*"):
        shutil.copy(file, target)
    environment = scheduler_hooks.hooked(tmp_path, f"seeds,{HOOKS}", **{CONFIG_ENV: json.dumps(CONFIG)})
    arguments: dict[str, Any] = dict(skip_tokenizer_init=None, enable_custom_logit_processor=True)
    asked = {name: requests[:1] for name, requests in {"": fields.base_requests(), **fields.table()}.items()}
    without = {**environment, scheduler_hooks.HOOKS_ENV: "seeds"}
    with serve(target, environment=without, disable_overlap_schedule=True, **arguments) as server:
        expected = {name: [server.generate(**request)] for name, (request,) in asked.items()}
    environment |= RETRACTING
    with serve(target, target, environment=environment, **arguments) as server, ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda requests: [server.generate(**requests[0])], asked.values())
        got = dict(zip(asked, answers, strict=True))
        assert "Testing retraction" in server.log_text()
    assert not fields.differences(expected, got)
    assert fields.numbers(got["logprobs"][0]) == pytest.approx(fields.numbers(expected["logprobs"][0]), abs=1e-3)
    same = [name for name in asked if fields.essence(got[name][0]) == fields.essence(got[""][0])]
    assert not {"regex", "json_schema", "ebnf", "sampling_seed", "logit_bias", "n"} & set(same)


def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(tmp_path: Path) -> None:
    """Drawn proposals, in graphs."""
    target = step3p5.write(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("lm_head.weight", "shared_head.output.weight")):
            tensor[LIKELY] *= 3
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with serve(target) as server:
        plain = greedy(server, [sampled.PROMPT], sampled.GREEDY_TOKENS) * 3
        distribution = sampled.distribution(server, sampled.PROMPT)
    environment = {REQUIRE_ENV: "1", CONFIG_ENV: '{"proposals": "drawn"}', **recorded_graphs.recording(tmp_path)}
    with (
        serve(target, target, environment=environment, max_running_requests=48) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        beside = pool.submit(greedy, server, [sampled.PROMPT] * 3, sampled.GREEDY_TOKENS)
        sampled.assert_sampled_from(server, sampled.PROMPT, distribution)
        assert beside.result() == plain
        (state,) = server.get("/server_info")["internal_states"]
        assert state["dflash_acceptance"]["accepted"][0] > 100, "two tokens of one step"
        assert "proposals: drawn" in server.log_tail(2000)
    assert {replay.role for replay in recorded_graphs.replays(tmp_path)} == {"draft", "target"}


def blocks_that_differ(server: Server, records: Path, rid: str, of: Reference, output: list[int]) -> list[bool]:
    """Asks for the output; of each block, whether its proposals are not this reference's."""
    server.post("/flush_cache?timeout=60")
    prompt = prompts()[4]
    answer = server.generate(input_ids=prompt, rid=rid, sampling_params=greedy_params(NEW_TOKENS))
    assert answer["output_ids"] == output
    text = torch.tensor(prompt + output)
    blocks = [block for block in noted(records) if block.rid == rid and block.prefix < len(text)]
    assert len(blocks) > NEW_TOKENS // 4
    return [
        block.likeliest != of.propose(text[: block.prefix + 1], torch.tensor(block.chosen))[0].tolist()
        for block in blocks
    ]


def send(server: Server, tensors: dict[str, Tensor], selector: str) -> str:
    """The error, if the update is refused. Without all of its tensors, SGLang's target ends the server."""
    payload, said = b64encode(MultiprocessingSerializer.serialize(list(tensors.items()))).decode(), ""
    server.post("/begin_weight_update", selector=selector)
    try:
        server.post("/update_weights_from_tensor", serialized_named_tensors=[payload], selector=selector)
    except urllib.error.HTTPError as error:
        said = error.read().decode()
    server.post("/end_weight_update")
    return said


def test_the_layers_follow_the_target(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)

    def disturbed(name: str, tensor: Tensor) -> Tensor:
        return tensor + 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    other = changed_copy(checkpoint(), tmp_path / "other", disturbed)
    outputs = []
    for target in (checkpoint(), other):
        with serve(target) as plain:
            outputs += greedy(plain, [prompts()[4]], NEW_TOKENS)
    assert outputs[0] != outputs[1]
    torch.multiprocessing.set_sharing_strategy("file_system")  # a server that is not our child can open it
    with ours(tmp_path, "mtp") as (server, records):
        before, after = Reference(checkpoint()), Reference(other)
        assert not any(blocks_that_differ(server, records, "text before", before, outputs[0]))
        server.post("/flush_cache?timeout=60")
        server.post("/update_weights_from_disk", model_path=str(other))
        assert not any(blocks_that_differ(server, records, "text from disk", after, outputs[1]))
        tensors = load_file(checkpoint() / "model.safetensors")
        server.post("/flush_cache?timeout=60")
        assert send(server, tensors, "all") == ""
        assert not any(blocks_that_differ(server, records, "text by tensors", before, outputs[0]))
        name = f"model.layers.{LAYERS}.eh_proj.weight"
        refused = send(server, {name: tensors[name][:1].contiguous()}, "draft")
        assert f"tensor {name!r} of shape (1, " in refused
        assert not any(blocks_that_differ(server, records, "text as before", before, outputs[0]))
