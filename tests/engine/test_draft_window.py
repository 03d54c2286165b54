"""A window imposed on the draft: what its block sees, exactly (C10), and that only acceptance notices.

In process, the draft runs on the CPU platform's attention through a table that `DraftWindow` wrote; the reference
is a plain draft given the seen context alone. On servers, what lies outside of the window is made NaN.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.startup.facts import ServingFacts
from dflash_sglang.startup.serving_checks import window_problems
from tests.kernels.test_window_rows import seen_columns
from tests.support import recorded_graphs, scheduler_hooks
from tests.support import sglang_layers as layers
from tests.support.engines import greedy_params, kept, serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from tests.support.tiny import draft_config, draft_tensors
from training.pair import held_out_prompts
from training.reference import ReferenceDraft

BLOCK = 8
WIDTH = 160  # of a row


@layers.cpu_only
@pytest.mark.parametrize("prefix", [12, 40, 90])
@pytest.mark.parametrize(("window", "sinks", "page"), [(20, 0, 1), (20, 3, 1), (24, 5, 16), (9, 0, 64)])
def test_the_block_sees_sinks_window_and_block_and_nothing_else(tmp_path, window, sinks, page, prefix):
    """Slots outside hold NaN; the reference gets the inside. The sliding layer's own window is 16."""
    from dflash_sglang.attention.torch_cpu import TorchCpuAttention
    from dflash_sglang.drafting.window import DraftWindow
    from dflash_sglang.kernels.block.window_rows import Span
    from dflash_sglang.models.context_kv.projection import ContextKV

    layers.start_rank()
    config = draft_config()
    model = layers.make_draft(tmp_path)
    reference = ReferenceDraft.from_weights(config, draft_tensors(config))
    pool = layers.make_pool(model, slots=2 * WIDTH)
    context = ContextKV(model)
    context.bind(pool)
    generator = torch.Generator().manual_seed(prefix)
    table = 1 + torch.randperm(2 * WIDTH, generator=generator).view(2, WIDTH).int()
    features = torch.randn(prefix, 192, generator=generator)
    embeds = torch.randn(BLOCK, 64, generator=generator)
    positions = torch.arange(prefix, prefix + BLOCK)
    context.write(features, torch.arange(prefix), table[1, :prefix].long())

    draft_table = torch.zeros_like(table)
    draft_window = DraftWindow(Span(window, -(-sinks // page) * page, page), table, draft_table)
    requests, prefixes = torch.tensor([1]), torch.tensor([prefix])
    block: Any = SimpleNamespace(requests=requests, prefix_lens=prefixes, batch_size=1, size=BLOCK)
    columns = seen_columns(prefix, draft_window.span)
    for block.exact, more in ((True, 0), (False, 3)):
        block.kv_len_bounds = torch.tensor([prefix + more + BLOCK])
        seen = draft_window.cut(block)
        assert seen.prefix_lens.tolist() == [len(columns)]
        most = len(columns) + BLOCK if block.exact else draft_window.span.widest(BLOCK)
        assert len(columns) + BLOCK <= seen.kv_len_bounds.sum() == seen.prefix_bounds_sum + BLOCK <= most

    def run() -> torch.Tensor:
        runner: Any = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=draft_table), token_to_kv_pool=pool
        )
        return layers.run_draft(
            model,
            embeds.clone(),
            positions,
            TorchCpuAttention(runner),
            req_pool_indices=torch.tensor([1]),
            seq_lens=seen.prefix_lens,
            out_cache_loc=table[1, positions].long(),
            spec_info=SimpleNamespace(draft_token_num=BLOCK, ragged_verify_layout=None),
        )

    outside = [p for p in range(prefix) if p not in columns]
    for layer in (0, 1):
        for buffer in pool.get_kv_buffer(layer):
            buffer[table[1, outside].long()] = float("nan")
    known = reference.context_kv(features[columns], torch.tensor(columns))
    expected = reference.block(embeds, positions, known, torch.tensor(columns))
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    for p in (columns[0], columns[-1]):  # each edge of what is seen does matter
        for buffer in pool.get_kv_buffer(1):
            buffer[table[1, p].long()] += 1.0
        changed = run()
        assert (changed - expected).abs().max() > 1e-3
        expected = changed


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a window of less than a block": (
        {"draft_window": 7},
        "--speculative-draft-window-size=7: expected at least the block of 8.",
        "Set --speculative-draft-window-size 8 or more",
    ),
    "sinks without a window": (
        {"draft_sinks": 4},
        "--speculative-draft-sink-size=4: expected 0 or more, and --speculative-draft-window-size beside it.",
        "Set --speculative-draft-window-size too",
    ),
    "fewer sinks than none": (
        {"draft_window": 64, "draft_sinks": -1},
        "--speculative-draft-sink-size=-1: expected 0 or more",
        "remove --speculative-draft-sink-size",
    ),
    "sinks beside sliding layers that reach further": (
        {"draft_window": 15, "draft_sinks": 4},
        "--speculative-draft-sink-size=4: expected a --speculative-draft-window-size of at least 16 beside it",
        "Set --speculative-draft-window-size 16 or more",
    ),
}


@pytest.mark.matrix(draft="z-lab, an imposed window that cannot be", outcome="refused")
@pytest.mark.parametrize(("serving", "says", "fix"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_window_that_cannot_be_honoured_is_one_problem(serving, says, fix):
    (problem,) = window_problems(DraftSpec.from_config(draft_config()), ServingFacts("draft", **serving))
    assert str(problem).startswith(says) and fix in str(problem)


def test_windows_that_can_be_honoured_are_no_problem():
    spec = DraftSpec.from_config(draft_config())
    for serving in ({}, {"draft_window": 8}, {"draft_window": 16, "draft_sinks": 4}, {"draft_sinks": 0}):
        assert list(window_problems(spec, ServingFacts("draft", **serving))) == []


PROMPTS = [
    list("\n".join(held_out_prompts()).encode())[1000 * i : 1000 * i + n] for i, n in enumerate((33, 300, 900))
]
NEW_TOKENS = 80


def generate(server: Server) -> list[dict[str, Any]]:
    return server.generate(input_ids=PROMPTS, sampling_params=greedy_params(NEW_TOKENS))


def windowed(
    directory: Path, any_width: bool = False, graphs: bool = False, **arguments: Any
) -> list[dict[str, Any]]:
    """Answers of a server whose draft would read NaN outside of its window; any_width: each step has one of its
    own, and its lengths on the host; graphs: recorded ones."""
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    hooks, config = "blindfold", {}
    if any_width:
        hooks, config = "blindfold,widths,host_lengths", {CONFIG_ENV: '{"width": {}}'}
    environment = hooked(directory, hooks, **config, **arguments.pop("environment", {}))
    with serve(TARGET, DRAFT, environment=environment, **arguments) as server:
        answers = generate(server)
        assert "draft_window: " in server.log_text()
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert len(PROMPTS) * (NEW_TOKENS - 1) >= (2 if any_width else 4) * steps, (
        "a NaN among the keys leaves no proposal accepted"
    )
    return answers


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with kept(TARGET) as server:
        return [answer["output_ids"] for answer in generate(server)]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.matrix(target="Qwen3", draft="z-lab, an imposed window", kv="model dtype", outcome="works")
@pytest.mark.parametrize(
    "arguments",
    [
        dict(speculative_draft_window_size=48, any_width=True),
        dict(speculative_draft_window_size=48, graphs=True, disable_overlap_schedule=True, page_size=64),
        dict(speculative_draft_window_size=128, speculative_draft_sink_size=5, page_size=16),
    ],
    ids=[
        "48, blocks of any width",
        "48, pages of 64, synchronous in recorded graphs",
        "128 and sinks, pages of 16",
    ],
)
def test_a_windowed_draft_reads_nothing_outside_and_the_output_is_plain_decodings(plain, tmp_path, arguments):
    assert [answer["output_ids"] for answer in windowed(tmp_path, **arguments)] == plain


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.matrix(target="Qwen3", draft="z-lab, an imposed window", kv="model dtype", outcome="works")
@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
def test_a_captured_draft_reads_nothing_outside_of_its_window(tmp_path, backend):
    """In a CUDA graph; with sinks and pages of 16."""
    windowed(
        tmp_path,
        environment=DEVICE_ENVIRONMENT,
        speculative_draft_attention_backend=backend,
        speculative_draft_window_size=128,
        speculative_draft_sink_size=16,
        page_size=16,
        cuda_graph_max_bs_decode=4,
        max_total_tokens=20000,
        **ON_DEVICE,
    )
