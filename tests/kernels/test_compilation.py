"""Every kernel of the package is compiled for NVIDIA GPUs that this machine may not have: Triton needs none.

Triton's interpreter takes what its compiler refuses, so without this a machine without a GPU would not notice.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.errors import CompilationError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dflash_sglang import kernels
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.attention import tree_keys
from dflash_sglang.kernels.block import (
    accept,
    find_copy,
    grouped_conv,
    grow_tree,
    pack_rows,
    place_nodes,
    prepare_block,
    share_rows,
    window_rows,
)
from dflash_sglang.kernels.context import context_write, rings
from dflash_sglang.kernels.head import pack_shard, selector_walk
from dflash_sglang.kernels.recurrent import replay
from dflash_sglang.kernels.sampled import tokens
from dflash_sglang.verify.sampling import Filters
from tests.kernels.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")

SHARED = 48 << 10  # bytes that a program may have on every GPU, without asking for more
BS, BLOCK, VOCAB, HIDDEN, ROWS = 3, 16, 151936, 4096, 9


class AbsentGPU(DriverBase):
    """A driver that knows what to compile for, and can run nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        raise AssertionError("nothing runs")

    get_device_interface = map_python_to_cpp_type = get_benchmarker = get_active_torch_device


@pytest.fixture(scope="module")
def kernel_names() -> set[str]:
    """Of what is launched, which ends so; other compiled functions are parts of these."""
    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    compiled = (name for one in modules for name, value in vars(one).items() if isinstance(value, JITFunction))
    return {name for name in compiled if name.endswith("_kernel")}


@pytest.fixture
def compiled(
    kernel_names: set[str], capability: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, list[Any]]]:
    """{kernel: its forms that were compiled}: a launch compiles, and returns before anything would run.

    SGLang, which some of the modules import, takes an active driver of Triton's for a GPU: so they come first.
    """
    forms: dict[str, list[Any]] = {}
    plain = JITFunction.run

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = plain(self, *arguments, grid=grid, warmup=True, **options)
        forms.setdefault(self.fn.__name__, []).append(kernel)

    monkeypatch.setattr(JITFunction, "run", run)
    driver.set_active(AbsentGPU(capability))
    yield forms
    driver.set_active(None)  # the default is looked for again when it is needed


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def counts(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def halves(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def blocks() -> None:
    out = prepare_block.BlockTensors(*(ids(BS, BLOCK) for _ in range(3)), ids(BS), ids(BS), ids(1))
    sources = prepare_block.BlockSources(ids(ROWS), ids(ROWS), ids(BS), counts(ROWS, 4096))
    prepare_block.prepare_block_triton(sources, 7, 4096, 1, out, 1)
    packed = pack_rows.Rows(*(ids(BS * BLOCK) for _ in range(3)))
    pack_rows.pack_rows_triton(pack_rows.Rows(*out[:3]), counts(BS + 1), counts(BS), packed)
    for slots in (BS, 512):
        share_rows.share_rows_triton(torch.zeros(slots, BLOCK - 1), 2 * slots, counts(slots), counts(slots + 1))
    span, rows = window_rows.Span(2048, 64, 16), window_rows.WindowRows(counts(ROWS, 4096), ids(BS))
    window_rows.window_rows_triton(counts(ROWS, 4096), ids(BS), ids(BS), BLOCK, span, rows)


def accepts(nodes: int = BLOCK, paths: accept.Paths | None = None) -> None:
    outcomes = accept.Outcomes(ids(5, ROWS * BLOCK), counts(5, ROWS), ids(5, ROWS), ids(5, ROWS))
    ragged = accept.Ragged(counts(BS + 1), counts(BS), nodes)
    for part, rows in ((None, ids(BS, nodes)), (ragged, ids(BS * nodes))):
        verified = accept.Verification(rows, rows, ids(BS), ids(BS), ids(1), counts(ROWS), part)
        accept.accept_triton(verified, outcomes, accept.Relay(ids(ROWS), ids(ROWS)), paths)


def trees() -> None:
    candidates = grow_tree.Candidates(ids(BS, BLOCK - 1, 8), torch.zeros(BS, BLOCK - 1, 8))
    for nodes in (8, 64):
        tree = grow_tree.Tree(counts(BS, nodes), counts(BS, nodes), ids(BS, nodes), torch.zeros(BS, nodes))
        grow_tree.grow_tree_triton(ids(BS), candidates, ids(BS, nodes), tree)
        for history in (None, counts(4096)):
            places = place_nodes.Places(ids(BS, nodes), ids(BS, nodes), ids(BS, nodes), history)
            place_nodes.place_nodes_triton(tree.depths, ids(BS), ids(BS), counts(ROWS, 4096), places)
        accepts(nodes, accept.Paths(tree, ids(BS, nodes), ids(BS, BLOCK), ids(BS * BLOCK), ids(BS * BLOCK)))


def copies() -> None:
    tables, on = find_copy.CopyTables.allocate(4096, counts(ROWS, 4096), 4 * BLOCK), counts(1)
    for width in (1, 6, BLOCK):
        steps = (BS, width - 1)
        logprobs = torch.zeros(steps) if width > 1 else None
        blocks = find_copy.CopyRows(ids(BS, width), ids(BS, width), ids(BS), ids(BS), logprobs=logprobs)
        find_copy.find_copies_triton(blocks, tables, on)
        find_copy.write_copies_triton(blocks, tables, on)
        find_copy.extend_copies_triton(blocks, tables, 4 * BLOCK)
        for drawn, best in ((16, None), (None, 8)):
            both = [c and find_copy.Candidates(ids(*steps, c), torch.zeros(*steps, c)) for c in (drawn, best)]
            find_copy.write_copies_triton(blocks._replace(drawn=both[0], best=both[1]), tables, on)


def rows_of_layers() -> None:
    grouped_conv.grouped_conv_triton(halves(2 * BLOCK, HIDDEN), halves(2 * BLOCK, 3, 64), halves(3, HIDDEN), BLOCK)


def heads() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(BS, VOCAB, dtype=dtype)
        pack_shard.pack_shard_triton(logits, 0)
        for count in (1, 8):
            pack_shard.pack_best_triton(logits, 0, count)
    pack_shard.pack_best_triton(halves(BS, VOCAB), 0, 16)
    pack_shard.merge_shards_triton(ids(8, BS))
    for count in (1, 8, 16):
        packed = ids(10 * (count + 1), BS)
        pack_shard.merge_parts_triton(packed, count)
        best = pack_shard.Candidates(ids(BS, count), torch.zeros(BS, count))
        pack_shard.merge_best_triton(packed, count, pack_shard.AS_IS, ids(VOCAB), best)
        if count == 1:
            capped = pack_shard.Scaling(1.0, 30.0)
            pack_shard.pack_best_triton(halves(BS, VOCAB), 0, count, capped)
            pack_shard.merge_best_triton(packed, count, capped, None, best)


def walks() -> None:
    codebooks = selector_walk.Codebooks(halves(VOCAB, 64), halves(VOCAB, 64))
    lattice = selector_walk.Lattice(ids(BS, 15, 8), torch.zeros(BS, 15, 8), halves(BS, 15, 64))
    noise = torch.ones(BS, 15, 8)
    draw = selector_walk.Draw(torch.ones(BS), torch.zeros(BS, dtype=torch.bool), noise)
    selector_walk.selector_walk_triton(codebooks, lattice, ids(BS, BLOCK), torch.zeros(BS, 15))
    selector_walk.selector_walk_triton(codebooks, lattice, ids(BS, BLOCK), draw=draw)
    gated = codebooks._replace(gate=halves(64, 96)[:, 32:])
    selector_walk.selector_walk_triton(gated, lattice, ids(BS, BLOCK), torch.zeros(BS, 15))
    of_state = codebooks._replace(predecessor=None)
    selector_walk.selector_walk_triton(of_state, lattice, ids(BS, BLOCK), torch.zeros(BS, 15))
    selector_walk.selector_walk_triton(of_state, lattice, ids(BS, BLOCK), draw=draw)


def samples() -> None:
    work, ones = tokens.Workspace(BS, BLOCK, VOCAB, "cpu"), torch.ones(BS)
    logits = torch.zeros(BS * BLOCK, VOCAB)
    ragged = accept.Ragged(counts(BS + 1), counts(BS), BLOCK)
    forms = ((1, False, False, None), (1, True, False, None), (8, True, True, ragged))
    for candidates, filtered, renormalised, part in forms:
        shape = (BS, BLOCK - 1, candidates)
        proposals = Proposals(ids(BS, BLOCK), ids(*shape), torch.zeros(shape))
        filters = Filters(ones, counts(BS), ones, ones, *[filtered] * 3, renormalised)
        rows = tokens.SampledRows(logits, *proposals[:3], part)
        tokens.target_tokens_triton(rows, filters, work, ids(BS * BLOCK))


def states() -> None:
    """Of a model with 48 heads of 128 x 128, as replayed after a verify, with and without a prefix cache."""
    for states, rows in ((torch.zeros, torch.zeros), (torch.zeros, halves), (halves, halves)):
        kept = replay.ReplayRows(
            rows(2, ROWS, 48, BLOCK, 128), rows(2, ROWS, 16, BLOCK, 128), *(torch.zeros(2, ROWS, 48, BLOCK),) * 2
        )
        moved = states(2, ROWS, 48, 128, 128)
        replay.replay_triton(moved, kept, counts(BS), counts(BS))
        replay.replay_triton(moved, kept, counts(BS), counts(BS), ids(BS), ids(BS))


def tree_attention() -> None:
    """Of Qwen3-8B and of layers with other groups and dims; queries lie in rows with keys and values."""
    for heads, kv_heads, dim in ((32, 8, 128), (28, 4, 128), (8, 8, 64), (64, 4, 256)):
        for nodes in (16, 64):
            rows = halves(BS * nodes, (heads + 2 * kv_heads) * dim)
            queries = rows[:, : heads * dim].view(-1, heads, dim)
            prefix = tree_keys.Prefix(halves(*queries.shape), torch.zeros(heads, BS * nodes))
            tree = tree_keys.TreeKeys(*(halves(128, kv_heads, dim),) * 2, ids(BS, nodes), ids(BS, nodes))
            tree_keys.add_tree_keys_triton(queries, prefix, tree, 0.1)


def context(dtype: torch.dtype) -> None:
    pools = [torch.zeros(32, 8, 128).to(dtype) for _ in range(4)]
    rows = context_write.Fp8Rows(pools[:2], pools[2:])
    kv, norms = halves(BS, 2, 2 * 8 * 128), halves(2, 128)
    context_write.write_fp8_rows_triton(kv, norms, torch.zeros(4096, 128), ids(BS), ids(BS), 1e-6, rows)


def draft_rings() -> None:
    shape = rings.RingShape.fitting(2048, 64, BLOCK)
    tables = rings.RingTables(shape, ids(ROWS), ids(ROWS), ids(99, shape.size), ids(4096), ids(99))
    rings.assign_slots_triton(ids(BS), ids(BS), ids(BS, BLOCK), 7, tables, ids(BS, BLOCK))
    rows = window_rows.WindowRows(counts(ROWS, 4096), ids(BS))
    window_rows.window_rows_triton(tables.slots, ids(BS), ids(BS), BLOCK, shape.span, rows)
    moves = rings.Moves(ids(shape.context), ids(shape.context))
    rings.take_over_triton(3, 900, counts(ROWS, 4096), tables, moves)


# Each of them takes a minute of a core.
OTHERS = [pytest.param(capability, marks=pytest.mark.full) for capability in (80, 120)]


@pytest.mark.parametrize("capability", [90, *OTHERS])
def test_all_kernels_compile_and_fit_into_every_gpu(compiled, kernel_names):
    for launches in (
        blocks, accepts, trees, copies, rows_of_layers, heads, walks, samples, states, tree_attention, draft_rings,
    ):  # fmt: skip
        launches()
    context(torch.float8_e5m2)
    assert set(compiled) == kernel_names
    for name, forms in compiled.items():
        assert all(form.asm["cubin"] for form in forms), name
        assert max(form.metadata.shared for form in forms) <= SHARED, name


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_context_is_written_in_float8_e4m3_by_gpus_that_convert_to_it_and_by_no_other(compiled, capability):
    """The bound at which `models/context_kv/writers.py` leaves the write to SGLang's pool."""
    if capability < 89:
        with pytest.raises(CompilationError):
            context(torch.float8_e4m3fn)
    else:
        context(torch.float8_e4m3fn)
        assert list(compiled) == ["_write_fp8_rows_kernel"]
