"""Instruments for engine tests, inside the scheduler process of an engine under test.

A plugin of SGLang like the package's own: `install(directory)` writes its distribution metadata, and the
variable DFLASH_TEST_HOOKS chooses, comma-separated:

oracle     proposals are the recorded continuation of the prompt (`record`), some tokens corrupted
poison     after each decode step, K and V of the rows that were not committed become NaN in both pools
features   every write of context KV leaves its positions and features in a file (`features_at`), and the first
           one what the draft borrows of the target (`borrowed`)
blindfold  before each draft forward, K and V of the context that an imposed window leaves out become NaN; in the
           batch's rings, all that its blocks do not read
proposals  every block's prefix length and proposals go to proposals.jsonl in DFLASH_TEST_RECORDS
mtp        multi-token-prediction layers choose the recorded continuation, with a wrong token at a place that is
           drawn, or nowhere; the rid and the prefix length of every block, the likeliest token of each layer and
           the chosen ones go to mtp.jsonl in DFLASH_TEST_RECORDS
mtp_short  windows of multi-token-prediction layers are one row shorter
candidates the widest blocks of up to `TREE_REQUESTS` requests, as graphs pad them, come with candidates for trees;
           requests, prefix lengths, tokens, logprobs and candidates of every block go to candidates.jsonl in
           DFLASH_TEST_RECORDS
widths     every decode step's blocks have a width of its own, where the policy is on
stretches  behind widths: some steps of width 1 are followed by up to 11 others
probes     widths that look worse are tried for a tenth of the time
shares     how many tokens a step verifies together is drawn, and what the draft thinks of its proposals
trees      with widths: trees are as likely as all chains; "always trees": steps verify trees wherever they can
grown      of every request's tree, its tokens, parents and accepted nodes go to grown.jsonl in DFLASH_TEST_RECORDS
copies     with copy: block: whether a match of any length is copied is drawn; "always copies": every match is.
           Steps check that the tokens of slots are those of the requests. A rank's blocks with their copies go to
           copies.RANK.jsonl in DFLASH_TEST_RECORDS
chains     with copy: 64: whether a step verifies more rows than a block is drawn; "always chains": steps do where
           they can. Behind the block stand the oracle's tokens, as far as it knows some, one of them wrong or none
rehearsals what is rehearsed before the first request may change nothing but the padding page, and draws no random
           number of a later step; says so in `rehearsed`
firsts     what forwards of requests import of this package, and which buffers they make, goes to firsts.jsonl;
           (when, which) kernels Triton compiles or loads, at start-up or for a request, to kernels.jsonl; buffers
           that this package has when SGLang has sized the KV pools, to taken.json
causal     the CPU platform's attention takes every layer for causal
sentinels  each step may change only its own slots and recurrent states, and a reservation only its own rows; the
           state of padding stays finite
states     of requests whose rid begins with "states": the recurrent states after each prefill and each commit, in
           a file per number of tokens (`states_of`)
context    the draft's KV pool begins as NaN; of requests whose rid begins with "context", its K and V rows of the
           prompt, as a prefill leaves them or as they arrive, go to a file (`context_of`)
misplaced  the kernel of gated delta nets keeps states of verified rows 8 to a request, but for steps of 2 rows
seeds      requests sample with their seeds, as under --enable-deterministic-inference, which refuses min_p and
           chooses no widths
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import plugin

HOOKS_ENV = "DFLASH_TEST_HOOKS"
RECORDS_ENV = "DFLASH_TEST_RECORDS"
TREE_REQUESTS = 5


def install(directory: Path, *modules: str) -> str:
    """Write the plugin's metadata into `directory`; returns the PYTHONPATH that a server finds it on.

    modules: below `tests`, whose `activate()` is to run in the schedulers beside this one's. One that does not
    exist is a ModuleNotFoundError here; SGLang would only log it.
    """
    names = ("support.scheduler_hooks", *modules)
    for name in names:
        if find_spec(f"tests.{name}") is None:
            raise ModuleNotFoundError(f"tests.{name}: expected a module below tests that has `activate`")
    return plugin.installed(directory, {f"dflash_{one.rpartition('.')[2]}": f"tests.{one}" for one in names})


def record(directory: Path, prompt: list[int] | str, output_ids: list[int]) -> None:
    """From now on the oracle proposes `output_ids` after `prompt`: its ids, or the rid of its request."""
    _record_path(directory, prompt).write_text(json.dumps(output_ids))


def _record_path(directory: Path, prompt: list[int] | str) -> Path:
    return directory / (hashlib.sha256(json.dumps(prompt).encode()).hexdigest() + ".json")


def features_at(directory: Path) -> dict[int, torch.Tensor]:
    """The features last captured at each position, [n_layers * hidden]; forgets them."""
    by_position = {}
    for path in sorted(directory.glob("*.features"), key=lambda path: int(path.stem)):
        positions, features = torch.load(path)
        by_position |= dict(zip(positions.tolist(), features, strict=True))
        path.unlink()
    return by_position


def states_of(directory: Path, rid: str) -> dict[int, list[torch.Tensor]]:
    """The recurrent states of a request, each [layers, ...], by the number of tokens that they have seen."""
    return {int(path.suffixes[-2][1:]): torch.load(path) for path in directory.glob(f"{rid}.*.states")}


def context_of(directory: Path, rid: str) -> torch.Tensor:
    """[2 * layers, tokens, heads, head_dim], K rows first: of the prompt of a request."""
    return torch.load(directory / f"{rid}.context")


def borrowed(directory: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [n], the draft's embeddings of them [n, hidden], and the logits [n, vocab] that its head gives these."""
    return torch.load(directory / "borrowed")


def activate() -> None:
    """Entry point: patches the worker class in the scheduler, before it serves."""
    chosen = [name for name in os.environ.get(HOOKS_ENV, "").split(",") if name]
    if not chosen:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before_memory_pools(scheduler: Any) -> None:
        from dflash_sglang.worker import DFlashWorker

        for name in chosen:
            _HOOKS[name](DFlashWorker)

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.init_memory_pools", before_memory_pools, HookType.BEFORE
    )
    if "host_lengths" in chosen:
        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler.init_model_worker", _void_what_is_gathered, HookType.BEFORE
        )


def _oracle(worker: type) -> None:
    from dflash_sglang.drafting.proposals import Proposals
    from dflash_sglang.drafting.proposer import Proposer

    directory = Path(os.environ[RECORDS_ENV])
    generator = torch.Generator().manual_seed(0)
    propose = Proposer.propose

    def with_oracle(self: Any, batch: Any, block: Any) -> Proposals:
        proposals = propose(self, batch, block)
        tokens, best, replaced = proposals.tokens, proposals.best, False
        best = best and best._replace(ids=best.ids.clone(), logprobs=best.logprobs.clone())
        for row, (req, prefix) in enumerate(zip(batch.reqs, block.prefix_lens.tolist(), strict=True)):
            prompt = list(req.origin_input_ids)
            paths = [path for key in (prompt, req.rid) if (path := _record_path(directory, key)).exists()]
            if not paths:
                continue
            start = prefix + 1 - len(prompt)
            known = torch.tensor(json.loads(paths[0].read_text())[start : start + block.size - 1])
            wrong = torch.rand(known.shape, generator=generator) < 0.15
            tokens[row, 1 : 1 + len(known)] = torch.where(wrong, (known + 1) % 250, known)
            if best is not None:  # where the likeliest is wrong, the next one is right
                ids, logprobs = (of[row, : len(known)] for of in best)
                order = torch.arange(ids.shape[1]).repeat(len(known), 1)
                order[wrong, :2] = torch.tensor([1, 0])
                ids[:] = (known[:, None] + order) % 250
                logprobs[:] = -(2 * torch.rand(ids.shape, generator=generator)).sort(dim=1).values
            replaced = True
        if not replaced:
            return proposals
        return Proposals.certain(tokens, logprobs=proposals.logprobs)._replace(best=best)

    Proposer.propose = with_oracle


def _causal(worker: Any) -> None:
    from dflash_sglang.attention import torch_cpu

    torch_cpu.NON_CAUSAL = ()


def _host_lengths(worker: Any) -> None:
    """Attention that takes its lengths from the host, as FlashInfer's does."""
    from dflash_sglang.attention.torch_cpu import TorchCpuAttention

    TorchCpuAttention.needs_cpu_seq_lens = True


def _void_what_is_gathered(scheduler: Any) -> None:
    """SGLang's check under SGLANG_IS_IN_CI, which is read when its module is imported."""
    from sglang.srt.managers import overlap_utils

    overlap_utils._DEBUG_ASSERT = True
    check = overlap_utils._assert_nonneg_and_invalidate
    overlap_utils._assert_nonneg_and_invalidate = check._torchdynamo_orig_callable  # compiling takes long


def _poison(worker: Any) -> None:
    decode = worker._decode

    def then_poison(self: Any, batch: Any, *args: Any) -> Any:
        requests = batch.req_pool_indices.clone()
        seq_lens = self._slots.relay.new_seq_lens[requests]
        reach, result = _reach(self, batch), decode(self, batch, *args)
        table = self.target_worker.model_runner.req_to_token_pool.req_to_token
        for request, old, new in zip(
            requests.tolist(), seq_lens.tolist(), result.new_seq_lens.tolist(), strict=True
        ):
            rejected = table[request, new : old + reach].long()
            for pool in _pools(self):
                for buffer in _buffers(pool):
                    buffer[rejected] = float("nan")
        return result

    worker._decode = then_poison


def _features(worker: Any) -> None:
    """Of writes as they are called; a captured one is read from the forward whose graph has made it."""
    from dflash_sglang.models.context_kv.projection import ContextKV
    from dflash_sglang.verify.verifier import Verifier

    directory = Path(os.environ[RECORDS_ENV])
    forward = Verifier._forward
    count = itertools.count()

    def note(features: torch.Tensor, positions: torch.Tensor) -> None:
        torch.save((positions.cpu(), features.float().cpu()), directory / f"{next(count)}.features")

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Any, features: torch.Tensor, positions: torch.Tensor, *of: Any) -> None:
            if not (directory / "borrowed").exists():
                model = self._model
                ids = torch.tensor([model.spec.mask_token_id, 7], device=features.device)
                with torch.no_grad():
                    embeddings = model.forward_embed(ids)
                    tensors = (ids, embeddings, model.head.logits(embeddings))
                torch.save(tuple(tensor.cpu() for tensor in tensors), directory / "borrowed")
            note(features, positions)
            write(self, features, positions, *of)

        return noted

    def then_note(self: Any, batch: Any, block: Any, of: Any) -> Any:
        result = forward(self, batch, block, of)
        if result.can_run_cuda_graph and self._tail.writes_context:
            note(result.logits_output.hidden_states[: len(of.rows.positions)], of.rows.positions)
        return result

    ContextKV.write_prefill, ContextKV.write_planned = map(
        noting, (ContextKV.write_prefill, ContextKV.write_planned)
    )
    Verifier._forward = then_note


def _blindfold(worker: Any) -> None:
    from dflash_sglang.drafting.rings import DraftRings
    from dflash_sglang.drafting.window import DraftWindow

    cut, cut_rings = DraftWindow.cut, DraftRings.cut

    def then_poison(self: Any, requests: torch.Tensor, block: Any) -> Any:
        """NaN in the draft's pool at every context position that the window leaves out."""
        seen = cut(self, requests, block)
        assert not block.exact or seen.kv_len_bounds.tolist() == (seen.prefix_lens + block.size).tolist()
        for request, prefix in zip(requests.tolist(), block.prefix_lens.tolist(), strict=True):
            first = max(prefix - self.span.window, 0) // self.span.page_size * self.span.page_size
            outside = self._target_table[request, self.span.sinks : max(first, self.span.sinks)].long()
            for buffer in _buffers(self.pool):
                buffer[outside] = float("nan")
        return seen

    def then_poison_rings(self: Any, requests: torch.Tensor, block: Any) -> Any:
        """NaN in the rings of the batch at every slot that its blocks do not read."""
        seen = cut_rings(self, requests, block)
        assert not block.exact or seen.kv_len_bounds.tolist() == (seen.prefix_lens + block.size).tolist()
        for request, length in zip(requests.tolist(), seen.prefix_lens.tolist(), strict=True):
            first = self.shape.page_size + int(self._tables.ring_of_row[request]) * self.shape.size
            unread = torch.ones(self.shape.size, dtype=torch.bool)
            unread[self._own[request, : length + block.size].long() - first] = False
            for buffer in _buffers(self._pool):
                buffer[first : first + self.shape.size][unread] = float("nan")
        return seen

    def before_decode(self: Any, *args: Any) -> Any:
        DraftWindow.pool = self.model_runner.token_to_kv_pool
        return decode(self, *args)

    decode = worker._step
    worker._step, DraftWindow.cut, DraftRings.cut = before_decode, then_poison, then_poison_rings


def _proposals(worker: Any) -> None:
    from dflash_sglang.drafting.proposer import Proposer

    propose = Proposer.propose
    path = Path(os.environ[RECORDS_ENV]) / "proposals.jsonl"

    def noting(self: Any, batch: Any, block: Any) -> Any:
        proposals = propose(self, batch, block)
        rows = zip(block.prefix_lens.tolist(), proposals.tokens.tolist(), strict=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return proposals

    Proposer.propose = noting


def _mtp(worker: Any) -> None:
    from dflash_sglang.drafting.mtp.source import MtpSource

    directory, generator = Path(os.environ[RECORDS_ENV]), random.Random(0)
    init, propose, choose = MtpSource.__init__, MtpSource.propose, MtpSource._choose
    path = directory / "mtp.jsonl"

    def with_place(self: Any, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        # Of each row of a batch, what the layers are to propose; -1: as they like. Graphs read it.
        self.told = torch.full_like(self._tokens, -1)

    def noting(self: Any, batch: Any, block: Any) -> Any:
        proposed, rows = block.size - 1, []
        for req, prefix in zip(batch.reqs, block.prefix_lens.tolist(), strict=True):
            recorded = _record_path(directory, list(req.origin_input_ids))
            output = json.loads(recorded.read_text()) if recorded.exists() else []
            start, wrong = prefix + 1 - len(req.origin_input_ids), generator.randint(0, proposed)
            following = output[start : start + proposed]
            following[wrong : wrong + 1] = [(token + 1) % 250 for token in following[wrong : wrong + 1]]
            rows.append(following + [-1] * (self.told.shape[1] - len(following)))
        self.told[: len(rows)] = torch.tensor(rows)
        proposals = propose(self, batch, block)
        with path.open("a") as file:
            for row, (req, prefix) in enumerate(zip(batch.reqs, block.prefix_lens.tolist(), strict=True)):
                likeliest = self._ids[row, :proposed, 0].tolist()
                file.write(json.dumps([req.rid, prefix, likeliest, proposals.tokens[row, 1:].tolist()]) + "\n")
        return proposals

    def chosen(self: Any, i: int, candidates: Any) -> torch.Tensor:
        tokens = choose(self, i, candidates)
        told = self.told[: len(tokens), i]
        tokens = torch.where(told >= 0, told, tokens)
        self._tokens[: len(tokens), i] = tokens
        return tokens

    MtpSource.__init__, MtpSource.propose, MtpSource._choose = with_place, noting, chosen


def _mtp_short(worker: Any) -> None:
    from dflash_sglang.models.mtp.recent_rows import RecentRows

    window = RecentRows.window

    def shorter(self: Any, *args: Any) -> Any:
        if len(self._offsets) == self.size // 3:
            self.rows, self._offsets = self.rows - 1, self._offsets[:-1]
        return window(self, *args)

    RecentRows.window = shorter


def _freed(worker: Any) -> None:
    """Rows of freed sliding slots, all of them slot 0, outweigh all others that a layer of the draft sees."""
    from dflash_sglang.drafting.mtp.source import MtpSource

    forward = MtpSource._forward

    def outweighed(self: Any, *args: Any) -> None:
        pool = self._runner.token_to_kv_pool.swa_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[0] = 50.0
        forward(self, *args)

    MtpSource._forward = outweighed


def _candidates(worker: Any) -> None:
    from dflash_sglang.drafting.proposer import Proposer

    init, propose = Proposer.__init__, Proposer.propose
    path = Path(os.environ[RECORDS_ENV]) / "candidates.jsonl"

    def for_trees(self: Any, *args: Any, **settings: Any) -> None:
        init(self, *args, **{**settings, "tree_requests": TREE_REQUESTS})

    def noting(self: Any, batch: Any, block: Any) -> Any:
        proposals = propose(self, batch, block)
        best = proposals.best and [of.tolist() for of in proposals.best]
        row = [block.prefix_lens.tolist(), proposals.tokens.tolist(), proposals.logprobs.tolist(), best]
        with path.open("a") as file:
            file.write(json.dumps([[req.rid for req in batch.reqs], *row]) + "\n")
        return proposals

    Proposer.__init__, Proposer.propose = for_trees, noting


def _widths(worker: Any) -> None:
    from dflash_sglang.width import startup
    from dflash_sglang.width.choice import Choice, Chooser

    startup.PASSES, startup.MOST_SECONDS = 1, 1.0  # nothing follows from the times
    _take_a_second()
    draws = random.Random(0)

    def some(self: Any, bucket: int, allowed: Sequence[int], *_: Any) -> Choice:
        return Choice(draws.choice(allowed), "gain")

    Chooser.choose = some


def _stretches(worker: Any) -> None:
    from dflash_sglang.width.choice import Choice, Chooser

    choose, draws, left = Chooser.choose, random.Random(2), [0]

    def stretched(self: Any, bucket: int, allowed: Sequence[int], *load: Any) -> Choice:
        if left[0] == 0:
            choice = choose(self, bucket, allowed, *load)
            left[0] = draws.randrange(12) if choice.kind == 0 else 0
            return choice
        left[0] -= 1
        return Choice(0, "gain")

    Chooser.choose = stretched


def _probes(worker: Any) -> None:
    from dflash_sglang.width import choice

    choice.PROBE_BUDGET = 0.1


def _shares(worker: Any) -> None:
    from dflash_sglang.drafting.row_reader import RowReader
    from dflash_sglang.width.decider import Decider

    draws, generator = random.Random(1), torch.Generator().manual_seed(2)

    def some(self: Any, options: Any, rates: Any) -> dict[int, int]:
        of_kind: dict[int, list[int]] = {}
        for at, kind in enumerate(options.kind.tolist()):
            of_kind.setdefault(kind, []).append(at)
        return {kind: draws.choice(of) for kind, of in of_kind.items()}

    def of_no_draft(read: Any) -> Any:
        def drawn(self: Any, bs: int, steps: int, padded: int) -> Any:
            logprobs, best = read(self, bs, steps, padded)
            return -torch.rand((bs, steps), generator=generator).to(logprobs.device), best

        return drawn

    allowed = Decider._allowed

    def ragged_more_often(self: Any, *load: Any) -> list[int]:
        kinds = allowed(self, *load)
        return kinds + 2 * [kind for kind in kinds if self.kinds[kind].ragged]

    Decider._best, Decider._allowed = some, ragged_more_often
    RowReader.read = of_no_draft(RowReader.read)


def _trees(worker: Any, always: bool = False) -> None:
    from dflash_sglang.width.decider import Decider

    allowed = Decider._allowed

    def trees_more_often(self: Any, *load: Any) -> list[int]:
        kinds = allowed(self, *load)
        trees = [kind for kind in kinds if self.kinds[kind].nodes]
        return trees if trees and always else kinds + 4 * trees

    Decider._allowed = trees_more_often
    _take_a_second()


def _take_a_second() -> None:
    """Steps of trees that nobody measured, which the policy would not choose: their time is infinite."""
    import numpy as np

    from dflash_sglang.width.step_times import StepTimes

    filled = StepTimes._filled
    StepTimes._filled = lambda self, base: np.nan_to_num(filled(self, base), posinf=1.0)


def _grown(worker: Any) -> None:
    from dflash_sglang.verify.tree import TreeVerify

    directory = Path(os.environ[RECORDS_ENV])
    choose, move = TreeVerify.choose, TreeVerify.move_paths
    chosen: list[Any] = []

    def noting(self: Any, batch: Any, *arguments: Any) -> Any:
        rows = choose(self, batch, *arguments)
        chosen[:] = [req.rid for req in batch.reqs], rows.by_request(rows.rows.ids).clone()
        return rows

    def then_note(self: Any, paths: Any) -> None:
        move(self, paths)
        columns = chosen[1], paths.tree.parents, paths.nodes
        with (directory / "grown.jsonl").open("a") as file:
            for rid, tokens, parents, nodes in zip(chosen[0], *(of.tolist() for of in columns), strict=True):
                file.write(json.dumps([rid, tokens, parents, nodes]) + "\n")

    TreeVerify.choose, TreeVerify.move_paths = noting, then_note


def _states(worker: Any) -> None:
    from dflash_sglang.verify.recurrent import RecurrentStates

    directory = Path(os.environ[RECORDS_ENV])
    commit, extend = RecurrentStates.commit, worker._extend

    def note(runner: Any, batch: Any, lengths: torch.Tensor) -> None:
        pool = runner.req_to_token_pool
        slots, states = pool.get_mamba_indices(batch.req_pool_indices).tolist(), pool.mamba_pool.mamba_cache
        for req, slot, length in zip(batch.reqs, slots, lengths.tolist(), strict=True):
            if req.rid.startswith("states"):
                kept = [rows[:, slot].clone() for rows in (*states.conv, states.temporal)]
                torch.save(kept, directory / f"{req.rid}.{length}.states")

    def then_note(self: Any, batch: Any, commit_lens: torch.Tensor, width: int) -> None:
        commit(self, batch, commit_lens, width)
        note(self._worker.model_runner, batch, batch.seq_lens + commit_lens)

    def extend_then_note(self: Any, batch: Any, *arguments: Any) -> Any:
        result = extend(self, batch, *arguments)
        note(self.target_worker.model_runner, batch, batch.seq_lens)
        return result

    RecurrentStates.commit, worker._extend = then_note, extend_then_note


def _context(worker: Any) -> None:
    directory = Path(os.environ[RECORDS_ENV])
    alloc, extend, arrive = worker.alloc_memory_pool, worker._extend, worker._arrive

    def then_void(self: Any, *args: Any, **kwargs: Any) -> None:
        alloc(self, *args, **kwargs)
        for buffer in _buffers(self.model_runner.token_to_kv_pool):
            buffer[self._reservation.page_size :] = float("nan")

    def note(self: Any, batch: Any) -> None:
        table = self.target_worker.model_runner.req_to_token_pool.req_to_token
        for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            if req.rid.startswith("context"):
                slots = table[row, : len(req.origin_input_ids)].long()
                rows = [buffer[slots] for buffer in _buffers(self.model_runner.token_to_kv_pool)]
                torch.save(torch.stack(rows), directory / f"{req.rid}.context")

    def extend_then_note(self: Any, batch: Any, *args: Any) -> Any:
        result = extend(self, batch, *args)
        note(self, batch)
        return result

    def note_then_arrive(self: Any, batch: Any, *args: Any) -> Any:
        note(self, batch)
        return arrive(self, batch, *args)

    worker.alloc_memory_pool, worker._extend, worker._arrive = then_void, extend_then_note, note_then_arrive


def _misplaced(worker: Any) -> None:
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    verify = TritonGDNKernel.target_verify

    def elsewhere(self: Any, *arguments: Any, intermediate_states_buffer: torch.Tensor, **more: Any) -> Any:
        kept, rows = intermediate_states_buffer, intermediate_states_buffer.shape[1]
        if rows != 2:
            strides = (8 * kept.stride(1), *kept.stride()[1:])
            kept = kept.as_strided((kept.shape[0] * rows // 8, *kept.shape[1:]), strides)
        return verify(self, *arguments, intermediate_states_buffer=kept, **more)

    TritonGDNKernel.target_verify = elsewhere


def _sentinels(worker: Any) -> None:
    from dflash_sglang.drafting.block import longest_prefix
    from dflash_sglang.drafting.draft_input import SlotReservation

    forward = worker.forward_batch_generation
    reserve = SlotReservation.reserve
    copies: list[torch.Tensor] = []

    def guarded_forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        table = self.target_worker.model_runner.req_to_token_pool.req_to_token
        buffers = [buffer.view(torch.int32) for pool in _pools(self) for buffer in _buffers(pool)]  # NaN is equal
        if not copies:
            copies.extend(torch.empty_like(buffer) for buffer in buffers)
        for buffer, copy in zip(buffers, copies, strict=True):
            copy.copy_(buffer)
        if batch.forward_mode.is_extend():
            own = batch.out_cache_loc.clone()
        else:
            seq_lens = self._slots.relay.new_seq_lens[batch.req_pool_indices]
            start = seq_lens.clamp(max=longest_prefix(self.target_worker.model_runner))
            columns = start[:, None] + torch.arange(_reach(self, batch))
            columns.clamp_(max=table.shape[1] - 1)
            own = table[batch.req_pool_indices.long()[:, None], columns]
        slots = own.flatten().long()
        own = set(slots.tolist())
        page_size = self._reservation.page_size
        assert not own & set(range(page_size)), f"live slots in the padding page: {sorted(own)[:4]}"
        table_before = table.clone()
        states = [rows.view(torch.int32) for rows in _recurrent_states(self)]
        states_before, own_states = [rows.clone() for rows in states], _state_slots(batch)
        result = forward(self, batch, *args, **kwargs)
        assert torch.equal(table, table_before), "a forward changed req_to_token"
        for rows, before in zip(states, states_before, strict=True):
            assert rows[:, 0].view(torch.float32).isfinite().all(), "the state of padding"
            changed = set((rows != before).transpose(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist())
            assert changed <= own_states, (
                f"states {sorted(changed - own_states)} belong to no request of the batch"
            )
        for buffer, copy in zip(buffers, copies, strict=True):
            copy[slots] = buffer[slots]
            copy[:page_size] = buffer[:page_size]  # a graph's padding rows
            if not torch.equal(buffer, copy):
                changed = (buffer != copy).flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise AssertionError(f"slots {changed} belong to no request of the batch")
        return result

    def guarded_reserve(self: Any, batch: Any) -> Any:
        table = batch.req_to_token_pool.req_to_token
        before = table.clone()
        allocated = {req.kv.req_pool_idx: req.kv.kv_allocated_len for req in batch.reqs}
        result = reserve(self, batch)
        for row, column in (table != before).nonzero().tolist():
            assert row in allocated, f"row {row} belongs to no request of the batch"
            assert allocated[row] <= column < self.row_limit, f"column {column} of row {row}"
        return result

    worker.forward_batch_generation = guarded_forward
    SlotReservation.reserve = guarded_reserve


def _rehearsals(worker: Any) -> None:
    from dflash_sglang.warmup.dummy_batches import Rehearsal

    names = ("seconds", "prefill", "step")
    ran: dict[str, list[Any]] = {name: [] for name in names}
    init_cuda_graphs, prewarm_sampling = worker.init_cuda_graphs, worker.prewarm_sampling
    before: list[torch.Tensor] = []

    def counting(name: str) -> Any:
        rehearse = getattr(Rehearsal, name)

        def counted(self: Any, *arguments: Any) -> Any:
            ran[name].append(arguments[:3])
            return rehearse(self, *arguments)

        return counted

    def state(self: Any) -> list[torch.Tensor]:
        page, requests = self._reservation.page_size, self.target_worker.model_runner.req_to_token_pool
        tensors = [requests.req_to_token, self._tables.adjustments.penalties._counts]
        tensors += [buffer[page:] for pool in _pools(self) for buffer in _buffers(pool)]
        tensors += [rows[:, 1:] for rows in _recurrent_states(self)]
        return tensors

    def watched(self: Any) -> None:
        assert not gc.isenabled() and gc.get_freeze_count(), "garbage was collected while the target was captured"
        before.extend(tensor.clone() for tensor in state(self))
        init_cuda_graphs(self)
        assert gc.isenabled() and not gc.get_freeze_count()

    def compared(self: Any) -> Any:
        random_state, coins = torch.get_rng_state(), random.Random(0).getstate()
        policy = self._widths._policy

        def policy_now() -> str:
            times = policy.decider and policy.decider.step_times
            return json.dumps([policy.metrics.snapshot(), times and [times._base, times._variance]])

        told = policy_now()
        width = self.width
        result = prewarm_sampling(self)
        for number, (tensor, old) in enumerate(zip(state(self), before, strict=True)):
            assert torch.equal(tensor, old), f"tensor {number} of {len(before)} has changed"
        assert torch.equal(torch.get_rng_state(), random_state), "random numbers were drawn"
        assert self._slots._coins.getstate() == coins, "coins were drawn"
        assert self._slots.current[0] == 4, "the next outcome of nobody is somebody's"
        assert told == policy_now()
        assert self.width == width and not self._widths._launched
        ran["prefill"] = [[tokens, dict(sampling)] for tokens, sampling in ran["prefill"]]
        ran["step"] = [[context, dict(sampling), shape.width] for context, sampling, shape in ran["step"]]
        (Path(os.environ[RECORDS_ENV]) / "rehearsed").write_text(json.dumps([ran, json.loads(told)[1]]))
        return result

    for name in names:
        setattr(Rehearsal, name, counting(name))
    worker.init_cuda_graphs, worker.prewarm_sampling = watched, compared


def _firsts(worker: Any) -> None:
    forward, prewarm_sampling = worker.forward_batch_generation, worker.prewarm_sampling
    alloc_memory_pool = worker.alloc_memory_pool
    there: list[set[Any]] = []
    storages: set[tuple[int, int]] = set()  # of all tensors at the end of the start-up, graphs' inputs among them

    def now(self: Any) -> list[set[Any]]:
        modules = {name for name in sys.modules if name.startswith("dflash_sglang")}
        found = ((where, _storage(tensor)) for where, tensor in _own_tensors(self))
        return [modules, {(where, storage[1]) for where, storage in found if storage not in storages}]

    def loaded(*args: Any) -> None:
        with (Path(os.environ[RECORDS_ENV]) / "kernels.jsonl").open("a") as file:
            file.write(json.dumps(["request" if there else "start-up", str(args[2])]) + "\n")

    def sized(self: Any, **pools: Any) -> None:
        (Path(os.environ[RECORDS_ENV]) / "taken.json").write_text(
            json.dumps([(where, _storage(tensor)[1]) for where, tensor in _own_tensors(self)])
        )
        alloc_memory_pool(self, **pools)

    def prewarmed(self: Any) -> Any:
        result = prewarm_sampling(self)
        there[:] = now(self)
        storages.update(_storage(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
        return result

    def watched(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode.name
        result = forward(self, batch, *args, **kwargs)
        modules, buffers = (list(after - before) for after, before in zip(now(self), there, strict=True))
        with (Path(os.environ[RECORDS_ENV]) / "firsts.jsonl").open("a") as file:
            file.write(json.dumps([mode, modules, buffers]) + "\n")
        return result

    if torch.cuda.is_available():
        from triton import knobs

        knobs.runtime.kernel_load_start_hook.add(loaded)
    worker.prewarm_sampling, worker.forward_batch_generation = prewarmed, watched
    worker.alloc_memory_pool = sized


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes, which a view shares with the tensor that it looks at."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _own_tensors(owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(where, tensor) of the tensors that this package's objects hold, at any depth."""
    from dflash_sglang.attention.torch_cpu import TorchCpuAttention

    seen, found = set(), [("worker", owner)]
    while found:
        where, thing = found.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield where, thing
        elif isinstance(thing, TorchCpuAttention):  # whose metadata are of a forward
            continue
        elif isinstance(thing, list | tuple):
            found += [(f"{where}[{i}]", item) for i, item in enumerate(thing)]
        elif type(thing).__module__.startswith("dflash_sglang") and hasattr(thing, "__dict__"):
            found += [(f"{where}.{name}", value) for name, value in vars(thing).items()]


def _seeds(worker: type) -> None:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo

    build = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = build(cls, batch, vocab_size)
        info.sampling_seed = torch.tensor([req.sampling_params.sampling_seed or 42 for req in batch.reqs])
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)


def _pools(worker: Any) -> list[Any]:
    return [worker.target_worker.model_runner.token_to_kv_pool, worker.model_runner.token_to_kv_pool]


def _recurrent_states(worker: Any) -> list[torch.Tensor]:
    """Each [layers, slots, ...], float32; none for a target without recurrent layers."""
    pool = getattr(worker.target_worker.model_runner.req_to_token_pool, "mamba_pool", None)
    return [] if pool is None else [*pool.mamba_cache.conv, pool.mamba_cache.temporal]


def _reach(worker: Any, batch: Any) -> int:
    """Slots past its prefix that a step of this batch may write of each: of a block, a tree or a chain; none of an idle batch."""
    if batch.forward_mode.is_idle():
        return 0
    served = worker._states.trees if batch.spec_info.no_trees is None else {}
    trees = (nodes for nodes, most in served.items() if len(batch.reqs) <= most)
    return max(worker.block_size, batch.spec_info.chain, *trees)


def _state_slots(batch: Any) -> set[int]:
    """Slots of recurrent states that a step of this batch may write: its requests', those that the prefix cache
    takes of them, and that of padding."""
    slots = {0}
    if hasattr(batch.req_to_token_pool, "mamba_pool"):
        slots.update(batch.req_to_token_pool.get_mamba_indices(batch.req_pool_indices).tolist())
        kept = [req.kv.mamba_ping_pong_track_buffer for req in batch.reqs]
        slots.update(slot for buffer in kept if buffer is not None for slot in buffer.tolist())
    return slots


def _copies(worker: Any, always: bool = False) -> None:
    from dflash_sglang.drafting.copies import Copies
    from dflash_sglang.drafting.proposer import Proposer
    from dflash_sglang.kernels.block import find_copy
    from dflash_sglang.sglang_names.scheduler import get_parallel

    generator = torch.Generator().manual_seed(0)

    def worth(record: torch.Tensor, lengths: torch.Tensor, right: torch.Tensor, steps: int) -> torch.Tensor:
        return (lengths > 0) & (always | (torch.rand(lengths.shape, generator=generator) < 0.5))

    find_copy.worth_copying = worth
    step, propose = worker._step, Proposer.propose

    def then_look(self: Any, batch: Any, *args: Any) -> Any:
        Proposer.copies = self._copies
        return step(self, batch, *args)

    def after_look(self: Any, batch: Any, block: Any) -> Any:
        for req, row, prefix in zip(batch.reqs, block.requests.tolist(), block.prefix_lens.tolist(), strict=True):
            known = [*req.origin_input_ids, *req.output_ids][:prefix]  # overlap scheduling knows less than a step
            slots = self.copies._tables.req_to_token[row, : len(known)].long()
            held = self.copies.history[slots].tolist()
            assert not req.rid or held == known, (req.rid, held, known)
        return propose(self, batch, block)

    worker._step, Proposer.propose = then_look, after_look
    rank = get_parallel().tp_rank
    path, copy = Path(os.environ[RECORDS_ENV]) / f"copies.{rank}.jsonl", Copies.propose

    def and_tell(self: Any, batch: Any, block: Any, proposals: Any) -> Any:
        proposals = copy(self, batch, block, proposals)
        with path.open("a") as lines:
            print(json.dumps(proposals.tokens.tolist()), file=lines)
        return proposals

    Copies.propose = and_tell


def _chains(worker: Any, always: bool = False) -> None:
    from dflash_sglang.drafting.copies import Copies
    from dflash_sglang.width.chains import Chains

    choices, draws = random.Random(4), random.Random(5)  # of the rank that decides, and of all
    directory, extend = Path(os.environ[RECORDS_ENV]), Copies.extend
    step, batches = worker._step, [None]
    Chains.pay = lambda self, slots: always or choices.random() < 0.5

    def then_step(self: Any, batch: Any, *args: Any) -> Any:
        batches[0] = batch
        return step(self, batch, *args)

    def with_oracle(self: Any, block: Any, proposals: Any, chains: Any) -> None:
        extend(self, block, proposals, chains)
        ids, slots = (of.view(block.batch_size, -1) for of in (chains.ids, chains.slots))
        for row, (req, prefix) in enumerate(zip(batches[0].reqs, block.prefix_lens.tolist(), strict=True)):
            prompt = list(req.origin_input_ids)
            if (path := _record_path(directory, prompt)).exists():
                start = prefix + 1 - len(prompt)
                known = json.loads(path.read_text())[start + block.size - 1 : start + ids.shape[1] - 1]
                if draws.random() < 0.5 and known:
                    known[draws.randrange(len(known))] = 7
                there = slice(block.size, block.size + len(known))
                ids[row, there] = torch.tensor(known, dtype=ids.dtype)
                self.history[slots[row, there]] = ids[row, there].int()

    worker._step, Copies.extend = then_step, with_oracle


def _buffers(pool: Any) -> list[torch.Tensor]:
    pool = getattr(pool, "full_kv_pool", pool)  # of a recurrent target
    return [*pool.k_buffer, *pool.v_buffer]


_HOOKS = {
    "blindfold": _blindfold,
    "proposals": _proposals,
    "candidates": _candidates,
    "oracle": _oracle,
    "mtp": _mtp,
    "mtp_short": _mtp_short,
    "freed": _freed,
    "causal": _causal,
    "host_lengths": _host_lengths,
    "poison": _poison,
    "features": _features,
    "sentinels": _sentinels,
    "widths": _widths,
    "shares": _shares,
    "trees": _trees,
    "always trees": functools.partial(_trees, always=True),
    "grown": _grown,
    "stretches": _stretches,
    "probes": _probes,
    "copies": _copies,
    "always copies": functools.partial(_copies, always=True),
    "chains": _chains,
    "always chains": functools.partial(_chains, always=True),
    "rehearsals": _rehearsals,
    "firsts": _firsts,
    "seeds": _seeds,
    "states": _states,
    "context": _context,
    "misplaced": _misplaced,
}
