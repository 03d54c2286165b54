"""Runs the draft over a block, eager or captured, and reads its proposals."""

from __future__ import annotations

from typing import Any

import torch

from dflash_sglang.attention.verifying import draft_forward, draft_input
from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.copies import Copies
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.replays import replay_of
from dflash_sglang.drafting.row_reader import RowReader
from dflash_sglang.drafting.window import DraftWindow, Seen
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.sglang_names.scheduler import (
    ForwardBatch,
    ModelRunner,
    ScheduleBatch,
    SpecTpSync,
    SpecTpSyncSite,
    draft_tp_context,
    enable_num_token_non_padded,
    get_dp_tp_group,
)


def why_no_candidates(model: DFlashDraftModel) -> str | None:
    """Why proposals of this draft come without candidates for trees, or None."""
    if model.edges is not None:
        return "the draft's edges score walks, and no tokens of their own"
    if model.spec.anchor_proposes:
        return "the anchor's row proposes, and no test grows trees of such rows"
    if model.head.all_rows is not None:
        return "ranks with batches of their own share the draft's head, and exchange one token of a row"
    return None


class Proposer:
    """DFlash's `ProposalSource`: one draft forward per step over whole blocks.

    The draft's graph ends with what its `RowReader` reads off the rows. Proposals overwrite the mask tokens of the
    ids that the forward read: a graph's input, or the block's. A draft that reads one row less than a block has
    gets them in a buffer. Blocks of one token have no proposals, and no draft forward.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: DFlashDraftModel,
        block_size: int,
        parallel_layout: Any,
        drawn: bool,
        window: DraftWindow | None = None,
        tree_requests: int = 0,
        copies: Copies | None = None,
    ):
        """block_size: of the widest blocks; tree_requests: of so many requests, with the padding of the draft's
        graph, the widest blocks come with candidates for trees; copies: are written over certain proposals, if the
        draft's graph finds the target's slots and lengths in its inputs. Raises ValueError where
        `why_no_candidates` has a reason."""
        why = why_no_candidates(model)
        if tree_requests and why is not None:
            raise ValueError(f"tree_requests={tree_requests}: expected 0, because {why}")
        self._runner = runner
        self._model = model
        self._layout = parallel_layout
        self._window = window
        # Graphs are padded to parts of one size for the ranks that share a batch.
        max_requests = runner.req_to_token_pool.req_to_token.shape[0] + parallel_layout.attn_tp_size
        self._ones = torch.ones(max_requests * block_size, dtype=torch.float32, device=runner.device)
        self._drawn = drawn
        self._reader = RowReader(
            model.head, model.edges, max_requests, block_size - 1, drawn, runner.device, tree_requests
        )
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        self._all_rows = model.head.all_rows
        self._no_rows = torch.empty((0, model.config.hidden_size), dtype=runner.dtype, device=runner.device)
        self._blocks = torch.empty(
            max_requests * block_size if model.spec.has_row_less else 0, dtype=torch.int64, device=runner.device
        )
        self._serve(block_size)
        apart = self._reader.ranks_may_part and get_dp_tp_group().world_size > 1
        in_graph = self._all_rows is None and window is None and not model.spec.has_row_less and not apart
        self._copies = copies if in_graph else None
        if self._all_rows is None:  # else ranks with batches of their own, and IDLE ones, run the head together
            runner.capture_tail_hooks.append(self._capture_tail)

    def draft_rows(self, width: int) -> int:
        """Rows of one request in the draft's forward, for blocks of more than one token."""
        return self._model.spec.draft_rows(width) if width > 1 else 0

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        """One draft forward. Drawn proposals are for sampled requests without seeds: a seed's output must not
        depend on what was proposed."""
        bs, width = block.ids.shape
        if not self.draft_rows(width):
            return self._certain(block.ids)
        if width != self._width:
            self._serve(width)
        info = batch.sampling_info
        drawn = self._drawn and not info.is_all_greedy and info.sampling_seed is None
        if self._copies is not None:
            self._copies.in_graphs(not drawn)
        tokens, padded, captured = self._replayed(block) or self._run(batch, block)
        if drawn:
            with torch.inference_mode(), draft_tp_context(self._layout):
                proposals = self._reader.draw(tokens, info.temperatures.view(-1), info.top_ks <= 1)
        else:
            proposals = self._certain(tokens)
        logprobs, best = self._reader.read(bs, width - 1, padded)
        if drawn or self._reader.ranks_may_part:
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, tokens)
        if self._reader.ranks_may_part:
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, logprobs)
        promised = None
        if self._copies is not None and captured and not drawn:
            promised = self._copies.promised(bs)
        return proposals._replace(logprobs=logprobs, best=best, promised=promised)

    def _replayed(self, block: Block) -> tuple[torch.Tensor, int, bool] | None:
        """What `_run` gives, by a graph that finds the blocks in its inputs; None without such a graph."""
        if self._window is not None or self._all_rows is not None or self._model.spec.has_row_less:
            return None
        replay = replay_of(self._runner, block.batch_size)
        if replay is None or not replay.takes(block.padded, *block.rows, block.prefix_lens, block.requests):
            return None
        replay.run()
        ids = replay.inputs.input_ids[: block.ids.numel()]
        return ids.view(block.ids.shape), replay.requests, True

    def _run(self, batch: ScheduleBatch, block: Block) -> tuple[torch.Tensor, int, bool]:
        """(tokens of the blocks [bs, block] with the likeliest proposals, requests with the padding of a graph,
        whether a graph ran)"""
        drafted = block.without_last() if self._model.spec.has_row_less else block
        forward_batch = self._forward_batch(batch, drafted)
        self._expect_rows(batch, block.size)
        with torch.inference_mode(), draft_tp_context(self._layout):
            out = self._runner.forward(forward_batch)
            if out.can_run_graph and self._all_rows is None:
                graphs = self._runner.decode_cuda_graph_runner
                ids = graphs.buffers.input_ids[: drafted.ids.numel()].view(block.batch_size, -1)
                return self._proposed(ids), graphs.bs, True
            return self._write_proposals(drafted.ids, out.logits_output.hidden_states), block.batch_size, False

    def _certain(self, tokens: torch.Tensor) -> Proposals:
        bs, proposals = tokens.shape[0], tokens.shape[1] - 1
        return Proposals.certain(tokens, self._ones[: bs * proposals].view(bs, proposals, 1))

    def examples(self, width: int) -> list[Proposals]:
        """One request's proposals of each kind that sampled steps of a width get, for what compiles before."""
        if not self.draft_rows(width):  # sampled as without speculation
            return []
        tokens = torch.zeros((1, width), dtype=torch.int64, device=self._runner.device)
        kinds = [self._certain(tokens)]
        if self._drawn:
            temperature = torch.ones(1, dtype=torch.float32, device=tokens.device)
            with torch.inference_mode(), draft_tp_context(self._layout):
                kinds.append(self._reader.draw(tokens, temperature, temperature < 0))
        return kinds

    def propose_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Take part in the collectives of a draft forward that other data-parallel ranks run: those of a head that
        is sharded over all of them. Nothing is embedded, attended to or written."""
        if self._all_rows is not None and self.draft_rows(width):
            self._expect_rows(batch, width)
            with torch.inference_mode(), draft_tp_context(self._layout):
                self._reader.write_nothing(self._no_rows)

    def _serve(self, width: int) -> None:
        """What steps of one width share."""
        self._width = width
        self._model.serve_blocks_of(width)
        self._spec_info = draft_input(self.draft_rows(width), self._runner.device)

    def _expect_rows(self, batch: ScheduleBatch, width: int) -> None:
        if self._all_rows is not None:
            self._all_rows.expect(max(batch.global_num_tokens) * (width - 1))

    def _capture_tail(self, runner: Any, out: Any, forward_batch: ForwardBatch, num_tokens: int) -> None:
        """SGLang's capture hook: the last nodes of the draft graph."""
        del runner
        ids = forward_batch.input_ids[:num_tokens].view(forward_batch.batch_size, -1)
        self._write_proposals(ids, out.hidden_states)
        if self._copies is not None:
            bs, rows = ids.shape
            self._copies.write(ids, forward_batch, *self._reader.read(bs, rows - 1, padded=bs))

    def _write_proposals(self, ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """ids [bs, rows] of the draft's forward, hidden_states [bs * rows (+ padding), hidden] -> `_proposed`."""
        (bs, rows), tokens = ids.shape, self._proposed(ids)
        if tokens is not ids:
            tokens[:, 0] = ids[:, 0]
        first, steps = int(not self._model.spec.anchor_proposes), tokens.shape[1] - 1
        self._reader.write(hidden_states[: bs * rows].view(bs, rows, -1)[:, first : first + steps], tokens)
        return tokens

    def _proposed(self, ids: torch.Tensor) -> torch.Tensor:
        """Where the blocks [bs, block] of the ids [bs, rows] are: over their mask tokens, or of a draft
        that reads one row less in a buffer with room for it."""
        bs, rows = ids.shape
        return self._blocks[: bs * (rows + 1)].view(bs, -1) if len(self._blocks) else ids

    def _forward_batch(self, batch: ScheduleBatch, block: Block) -> ForwardBatch:
        translator = self._runner.kv_index_translator
        seen: Block | Seen = block
        loc_plan, rows = block.loc_plan, block.rows
        if self._window is not None:
            seen = self._window.cut(block)
            reads: dict[str, Any] = dict(
                seq_lens=seen.prefix_lens, seq_lens_cpu=seen.kv_len_bounds - block.size, read_extent=block.size
            )
            if block.draft_slots is None:
                loc_plan = loc_plan.reads_from(translator, **reads)
            else:
                rows = rows._replace(slots=block.draft_slots.view(-1))
                loc_plan = translator.plan(req_pool_indices=block.requests, write_virtual=rows.slots, **reads)
        more: dict[str, Any] = {}
        if enable_num_token_non_padded():
            number = torch.full((), block.ids.numel(), dtype=torch.int32, device=block.ids.device)
            more["num_token_non_padded"] = number
        return draft_forward(
            self._runner, rows, block.requests, seen.prefix_lens, seen.kv_len_bounds, seen.prefix_bounds_sum,
            self._spec_info, loc_plan, can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph, **more,
        )  # fmt: skip
