"""The captured tail of verify equals its eager twin, step after step (C7): on a CPU in a recording of its
operations (`recorded_graphs`), on a GPU in a CUDA graph.

Rows that no request has are poisoned: garbage ids, NaN features and logits, at row and slot 0, which are nobody's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.graph_tail import VerifyTail
from dflash_sglang.verify.target_logits import TargetLogits
from tests.support import sglang_layers as layers
from tests.support.recorded_graphs import Recording

BLOCK, VOCAB, FEATURES = 4, 11, 192
REQUESTS = 12  # rows of req_to_token; row 0 is nobody's
SLOTS = 64
CAPTURED = (2, 4, 8)
STEPS = 100
DTYPE = torch.float32 if layers.DEVICE == "cpu" else torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


class Runner:
    """What the tail reads of a model runner."""

    def __init__(self, translates: bool = False) -> None:
        self.capture_tail_hooks: list[Any] = []
        space = SimpleNamespace(write=(lambda ids: ids) if translates else None)
        self.kv_index_translator = SimpleNamespace(space=lambda kind: space)
        self.model, self.model_config = torch.nn.Module(), SimpleNamespace(vocab_size=VOCAB)


class Graph:
    """The tail over static buffers of one batch size, captured and replayed."""

    def __init__(self, tail: Any, size: int, in_parts: bool = False) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=layers.DEVICE)

        rows = size * BLOCK
        self.batch = SimpleNamespace(
            batch_size=size,
            input_ids=zeros(rows),
            positions=zeros(rows),
            out_cache_loc=zeros(rows),
            seq_lens=zeros(size),
            req_pool_indices=zeros(size),
            spec_info=SimpleNamespace(ragged_verify_layout=None),
        )
        if in_parts:  # as it is captured: the first request has all of them
            lens, starts = zeros(size, dtype=torch.int32), zeros(size + 1, dtype=torch.int32)
            self.batch.spec_info.ragged_verify_layout = SimpleNamespace(verify_lens=lens, qo_indptr_device=starts)
        self.out = SimpleNamespace(
            next_token_logits=zeros(rows, VOCAB, dtype=torch.float32),
            hidden_states=zeros(rows, FEATURES, dtype=DTYPE),
        )
        self._run = lambda: tail(None, self.out, self.batch, rows)
        self._run()
        self.replay = self._captured()

    def _captured(self) -> Any:
        if layers.DEVICE == "cpu":
            with Recording() as recording:
                self._run()
            return recording.replay
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph.replay

    def load(self, live: int, generator: torch.Generator) -> None:
        """A step of `live` requests, the padding poisoned."""
        size, rows = self.batch.batch_size, live * BLOCK

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        values = dict(
            input_ids=draw(0, 3, size * BLOCK),
            positions=draw(0, 200, size * BLOCK),
            out_cache_loc=1 + torch.randperm(SLOTS - 1, generator=generator)[: size * BLOCK],
            seq_lens=draw(0, 200, size),
            req_pool_indices=1 + torch.randperm(REQUESTS - 1, generator=generator)[:size],
        )
        values["input_ids"][rows:] = 2**40
        values["out_cache_loc"][rows:] = values["req_pool_indices"][live:] = 0
        for name, value in values.items():
            getattr(self.batch, name).copy_(value)
        logits = draw(0, 3, size * BLOCK, VOCAB).float()
        logits[:, 3:] = -5.0  # ids of proposals and of the target agree now and then
        features = torch.randn(size * BLOCK, FEATURES, generator=generator)
        logits[rows:] = features[rows:] = float("nan")
        self.out.next_token_logits.copy_(logits)
        self.out.hidden_states.copy_(features)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_captured_tail_equals_the_eager_one_over_steps_of_varying_live_rows(tmp_path, in_parts):
    """And, in parts, of varying rows of each request."""
    from dflash_sglang.models.context_kv.projection import ContextKV

    model = layers.make_draft(tmp_path, DTYPE)
    context, eager_context = (ContextKV(model) for _ in range(2))
    captured_pool, eager_pool = (layers.make_pool(model, SLOTS, DTYPE) for _ in range(2))
    context.bind(captured_pool)
    eager_context.bind(eager_pool)
    target, draft = Runner(), Runner()
    acceptor, eager = (Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE)) for _ in range(2))
    tail = VerifyTail(target, draft, TargetLogits(target), acceptor, context)
    assert tail.writes_context and len(target.capture_tail_hooks) == 1 and not draft.capture_tail_hooks
    graphs = [Graph(target.capture_tail_hooks[0], size, in_parts) for size in CAPTURED]
    for tensors in (acceptor.slots.relay, eager.slots.relay, acceptor.slots.outcomes, eager.slots.outcomes):
        for tensor in tensors:
            tensor.fill_(-7)
    before, seen = None, set()
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        live = int(torch.randint(1, CAPTURED[-1] + 1, (), generator=generator))
        graph = next(graph for graph in graphs if graph.batch.batch_size >= live)
        graph.load(live, generator)
        batch, lens = graph.batch, [BLOCK] * live
        if in_parts:
            lens = torch.randint(1, BLOCK + 1, (live,), generator=generator).tolist()
            layout = batch.spec_info.ragged_verify_layout
            layout.verify_lens.zero_()
            layout.verify_lens[:live] = torch.tensor(lens)
            layout.qo_indptr_device[1:] = layout.verify_lens.cumsum(0)
        for one in (acceptor, eager):
            one.slots.current.fill_(one.slots.next())
        graph.replay()
        got = acceptor.slots.outcome(live, BLOCK)
        target_ids, start = graph.out.next_token_logits.argmax(-1), 0
        for request, rows in enumerate(lens):
            own, place = slice(start, start := start + rows), slice(request, request + 1)
            of_request = batch.seq_lens[place], batch.req_pool_indices[place]
            eager.accept(batch.input_ids[None, own], target_ids[None, own], *of_request)
            alone = eager.slots.outcome(1, rows)
            committed = int(alone.commit_lens[0])
            assert int(got.commit_lens[request]) == committed <= rows
            assert got.target_ids[request, :committed].tolist() == alone.target_ids[0, :committed].tolist()
            assert got.new_seq_lens[request] == alone.new_seq_lens[0]
            assert got.bonus_tokens[request] == alone.bonus_tokens[0]
            seen.add((rows, committed))
        if before is not None:
            assert all(map(torch.equal, *before)), f"step {step} changed the outcome of the step before"
        before = got, [tensor.clone() for tensor in got]
        for ours, twin in zip(acceptor.slots.relay, eager.slots.relay, strict=True):
            assert torch.equal(ours[1:], twin[1:]), "rows of requests, of this step's and of others"
        eager_context.write(graph.out.hidden_states[:start], batch.positions[:start], batch.out_cache_loc[:start])
        for layer in range(len(model.layers)):
            kept = zip(captured_pool.get_kv_buffer(layer), eager_pool.get_kv_buffer(layer), strict=True)
            for ours, twin in kept if not in_parts else ():  # padding rows of parts have slots of their own
                torch.testing.assert_close(ours[1:], twin[1:], rtol=2**-7, atol=2**-7)
    lengths = range(1, BLOCK + 1)
    assert seen >= ({(rows, n) for rows in lengths for n in range(1, rows + 1)} if in_parts else {(BLOCK, 2)})


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_idle_verify_leaves_the_outcomes_of_the_step_before(monkeypatch, steps):
    """Its graph accepts padding, while overlap scheduling copies those outcomes to the host."""
    from dflash_sglang.verify import verifier

    acceptor = Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE))
    blocks = [torch.full((1, BLOCK), 1, device=layers.DEVICE) for _ in range(2)]
    lengths, requests = (torch.full((1,), n, device=layers.DEVICE) for n in (10, 3))
    for _ in range(steps):
        acceptor.slots.current.fill_(acceptor.slots.next())
        acceptor.accept(*blocks, lengths, requests)
        outcome = acceptor.slots.outcome(1, BLOCK)
    kept = [tensor.clone() for tensor in outcome]

    forwards: list[Any] = []

    def forward(forward_batch: Any, **_: Any) -> None:
        forwards.append(forward_batch)
        acceptor.accept(blocks[0], blocks[1] + 1, lengths + 5, requests)

    under_test: Any = object.__new__(verifier.Verifier)
    under_test._acceptor, under_test._runner = acceptor, SimpleNamespace(device=layers.DEVICE)
    under_test._worker = SimpleNamespace(forward_batch_generation=forward)
    prepare = mock.Mock(return_value=("padding", True))
    monkeypatch.setattr(verifier.DFlashVerifyInput, "prepare_for_verify", prepare)
    under_test.verify_idle(SimpleNamespace(), BLOCK)
    assert forwards == ["padding"]
    assert all(map(torch.equal, outcome, kept))


@pytest.mark.parametrize("requests", [12, 13])
def test_tokens_and_accept_lengths_reach_the_host_in_one_copy(monkeypatch, requests):
    from dflash_sglang.verify import step_result

    copies: list[torch.Tensor] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.cpu().clone())
        return copies[-1]

    monkeypatch.setattr(step_result, "async_d2h", to_host)
    acceptor = Acceptor(StepSlots(requests, BLOCK, layers.DEVICE))
    tokens = torch.arange(5 * BLOCK, device=layers.DEVICE).view(5, BLOCK)
    target_ids = tokens + 1
    target_ids[range(3), range(3)] = 99
    rows = torch.arange(1, 6, device=layers.DEVICE)
    acceptor.slots.current.fill_(acceptor.slots.next())
    acceptor.accept(tokens, target_ids, rows, rows)
    accepted = acceptor.slots.outcome(3, BLOCK)  # the other two are padding
    result = step_result.StepResult(
        next_token_ids=accepted.target_ids.view(-1),
        accept_lens=accepted.commit_lens,
        packed=accepted.packed,
        copy_done=mock.Mock(),
    )
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    [copy] = copies
    assert result.accept_lens.tolist() == [1, 2, 3]
    assert result.next_token_ids.tolist() == target_ids[:3].flatten().tolist()
    memory = copy.untyped_storage().data_ptr()
    assert {part.untyped_storage().data_ptr() for part in (result.accept_lens, result.next_token_ids)} == {memory}
    assert result.copy_done.record.call_count == 1


def test_a_result_that_is_read_two_steps_late_is_the_one_of_its_step():
    """Steps write where the ones before them wrote."""
    from dflash_sglang.drafting.proposals import Proposals
    from dflash_sglang.kernels.block.accept import Ragged
    from dflash_sglang.verify.step_result import StepResult

    acceptor = Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE))
    requests, rows = torch.arange(1, 3, device=layers.DEVICE), torch.arange(2 * BLOCK, device=layers.DEVICE)
    logprobs, mass = (torch.zeros((2, n), device=layers.DEVICE) for n in (BLOCK - 1, 6))
    promised, lens = torch.zeros(2, device=layers.DEVICE), torch.zeros(2, dtype=torch.int32, device=layers.DEVICE)
    buffers = dict(logprobs=logprobs, mass=mass, promised=promised, verified_lens=lens)

    def step(number: int) -> Any:
        tokens = (rows.view(2, BLOCK) + number).contiguous()
        target_ids = tokens + 1
        target_ids[:, number] = 99
        for buffer in buffers.values():
            buffer.fill_(number + 1)
        acceptor.slots.current.fill_(acceptor.slots.next())
        acceptor.accept(tokens, target_ids, 10 * requests, requests)
        forward = SimpleNamespace(
            logits_output=None, can_run_cuda_graph=True, routed_experts_output=None, indexer_topk_output=None
        )
        verified = SimpleNamespace(accepted=acceptor.slots.outcome(2, BLOCK), forward=forward)
        candidates = tokens[:, 1:, None]
        proposals = Proposals(tokens, candidates, candidates, logprobs, promised=promised)
        of: Any = SimpleNamespace(
            ragged=Ragged(lens, lens, BLOCK), paths=SimpleNamespace(tree=SimpleNamespace(mass=mass))
        )
        return StepResult.from_verified(verified, proposals, of, mock.Mock(), chances=True)

    results = [step(number) for number in range(BLOCK)]
    for number, result in enumerate(results):
        result.copy_done = mock.Mock()
        result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
        assert result.accept_lens.tolist() == [number + 1] * 2
        accepted = result.next_token_ids.view(2, BLOCK)[:, : number + 1].tolist()
        assert accepted == [[*range(first + 1, first + number + 1), 99] for first in (number, number + BLOCK)]
        assert result.new_seq_lens.tolist() == [10 + number + 1, 20 + number + 1]
        for name, buffer in buffers.items():
            assert torch.equal(getattr(result, name), torch.full_like(buffer, number + 1)), name


def test_slots_that_a_pool_renames_are_left_to_the_eager_write():

    target, draft = Runner(translates=True), Runner()

    def refuse(*tensors: torch.Tensor) -> None:
        raise AssertionError("written by the graph")

    tail = VerifyTail(
        target,
        draft,
        TargetLogits(target),
        Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE)),
        SimpleNamespace(write=refuse),
    )
    assert not tail.writes_context
    Graph(target.capture_tail_hooks[0], 2).replay()
