"""What requests ask of their logits: penalties, grammar, logit bias and custom processors, at every verified row.

Each row of a block is a decode step of its request, and is adjusted as plain decoding adjusts that step. So each
output token is penalised by exactly the output tokens before it: row k of a block has seen the proposals up to its
own input. (SGLang's penalizers are fed from the host, which under overlap scheduling knows the tokens of a step
only after the next one was launched; they are not used here.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_sglang.sglang_names.scheduler import (
    GrammarTree,
    Req,
    ScheduleBatch,
    async_h2d,
    build_grammar_vocab_mask,
)
from dflash_sglang.verify.custom_processors import CustomProcessors
from dflash_sglang.verify.rows import Places

AT_ONCE = 8  # requests, whose rows are copied two times over: 150 MiB of a block of 16 and 150000 tokens


class Adjustments:
    """Adjusts logits, and keeps what that takes of a request's output so far."""

    def __init__(self, max_requests: int, block_size: int, vocab_size: int, device: str) -> None:
        """max_requests: rows of req_to_token, or more. All memory is taken here."""
        self.max_requests, self.vocab_size = max_requests, vocab_size
        self.penalties = Penalties(max_requests, vocab_size, device)
        self._processors = CustomProcessors(max_requests, block_size, device)

    def arrive(self, batch: ScheduleBatch) -> None:
        """Requests that another server has prefilled, with their first tokens."""
        self.penalties.begin(batch)

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """The target's own sampler draws the first tokens: give it the penalties, and outputs to processors."""
        self.penalties.begin(batch)
        self.penalties.before_prefill(batch)
        self._processors.before_prefill(batch)

    def after_prefill(self, batch: ScheduleBatch, next_token_ids: Tensor) -> None:
        """next_token_ids [bs]: the first tokens."""
        committed = next_token_ids[:, None], torch.ones_like(next_token_ids)
        self.note(batch, self.penalties.penalised(batch), *committed)

    def apply(
        self,
        logits: Tensor,  # [rows, vocab], changed in place
        batch: ScheduleBatch,
        tokens: Tensor,  # [bs, block] last committed token + proposals
        prefix_lens: Tensor,  # [bs] committed tokens with KV
        places: Places,  # of the blocks' rows among the logits
        grammar_tree: GrammarTree | None,  # of these tokens, where the batch has a grammar
        grammar_barrier: Callable[[], None] | None,
    ) -> PenalisedRequests | None:
        """Adjust every row, in the order of plain decoding. Returns what `note` takes.

        Custom processors expect the rows of whole blocks."""
        info = batch.sampling_info
        penalised = self.penalties.penalised(batch)
        if penalised is not None:
            self.penalties.apply(logits, penalised, tokens, prefix_lens, places)
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask._replace(vocab_mask=places.of_blocks(mask.vocab_mask, len(logits))).apply(logits)
        if info.logit_bias is not None:
            for rows, bias in zip(places.rows.split(AT_ONCE), info.logit_bias.split(AT_ONCE), strict=True):
                logits[rows] = logits[rows] + bias[:, None]
        if info.has_custom_logit_processor:
            self._processors.apply(logits, batch, tokens, prefix_lens)
        return penalised

    def note(
        self,
        batch: ScheduleBatch,
        penalised: PenalisedRequests | None,
        token_ids: Tensor,  # [bs, at most block], committed up to
        commit_lens: Tensor,  # [bs]
    ) -> None:
        """What a step commits."""
        if penalised is not None:
            self.penalties.count(penalised, token_ids, commit_lens)
        self._processors.note(batch, token_ids, commit_lens)


class PenalisedRequests(NamedTuple):
    """The n penalised requests of a batch."""

    index: Tensor  # [n] their rows of the batch
    counts: Tensor  # [n] their rows of the tables
    frequency: Tensor  # [n, 1, 1] float32, as the next two
    presence: Tensor
    repetition: Tensor
    min_new_tokens: Tensor  # [n]
    prompt_lens: Tensor  # [n]
    never_first: Tensor | None  # [n, 1, vocab] bool, tokens that end the request; None: no min_new_tokens

    def parts(self) -> Iterator[PenalisedRequests]:
        """At most `AT_ONCE` of them each."""
        for start in range(0, len(self.index), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            yield PenalisedRequests(*(None if field is None else field[part] for field in self))


class Penalties:
    """Counts the output tokens of penalised requests on the device, where the accept of a step is known.

    A request's row of the tables is its row of `req_to_token`, which it keeps from prefill to its end. A row
    takes 5 bytes per token of the vocabulary: the counts, and the tokens that end the request, written when it
    begins, so that no step pays for their number.
    """

    def __init__(self, max_requests: int, vocab_size: int, device: str):
        """max_requests: rows of req_to_token. All memory is taken here."""
        self._vocab_size = vocab_size
        shape = (max_requests, vocab_size)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._ends = torch.zeros(shape, dtype=torch.bool, device=device)  # for min_new_tokens

    def begin(self, batch: ScheduleBatch) -> None:
        """Count what the batch's new requests have put out so far: retracted ones, and those that another server
        has prefilled."""
        if not batch.reqs:
            return
        decoding = set(map(id, batch.decoding_reqs or ())) if batch.forward_mode.is_mixed() else set()
        for slot, req in zip(batch.req_pool_indices_cpu.numpy(), batch.reqs, strict=True):
            if id(req) in decoding or not is_penalised(req):
                continue
            counts = self._counts[slot].zero_()
            if len(req.output_ids):
                ids = async_h2d(list(req.output_ids), dtype=torch.int64, device=counts.device)
                counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            if req.sampling_params.min_new_tokens:
                end_ids = [token for token in _end_ids(req) if 0 <= token < self._vocab_size]
                ids = async_h2d(end_ids, dtype=torch.int64, device=counts.device)
                self._ends[slot].zero_().index_fill_(0, ids, True)

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """Let SGLang's sampler apply the penalties of requests that have begun."""
        requests = self.penalised(batch)
        if requests is not None:
            info = batch.sampling_info
            counts = self._counts[requests.counts, None]
            additive = counts.new_zeros((len(batch.reqs), self._vocab_size), dtype=torch.float32)
            of_requests = -_additive(counts, requests)
            num_outputs = batch.seq_lens[requests.index] - requests.prompt_lens
            _forbid_end(of_requests, requests, num_outputs[:, None])
            additive[requests.index] = of_requests.squeeze(1)
            scaling = torch.ones_like(additive)
            scaling[requests.index] = _scaling(counts, requests).squeeze(1)
            info.acc_additive_penalties, info.acc_scaling_penalties = additive, scaling

    def penalised(self, batch: ScheduleBatch) -> PenalisedRequests | None:
        """The penalised requests of a batch whose requests have begun; None without any."""
        info = batch.sampling_info
        if info.acc_additive_penalties is None:  # what SGLang prepares for any penalised batch
            return None
        found = [i for i, req in enumerate(batch.reqs) if is_penalised(req)]
        if not found:
            return None
        slots, device = batch.req_pool_indices_cpu.tolist(), self._counts.device
        reqs = [batch.reqs[i] for i in found]
        params = [req.sampling_params for req in reqs]
        at_least = [of.min_new_tokens for of in params]
        integers = [found, [slots[i] for i in found], at_least, [len(req.origin_input_ids) for req in reqs]]
        index, rows, min_new_tokens, prompt_lens = async_h2d(integers, dtype=torch.int64, device=device)
        penalties = [(of.frequency_penalty, of.presence_penalty, of.repetition_penalty) for of in params]
        factors = async_h2d(penalties, dtype=torch.float32, device=device)
        frequency, presence, repetition = factors.T[..., None, None]
        never_first = self._ends[rows, None] if any(at_least) else None
        return PenalisedRequests(
            index, rows, frequency, presence, repetition, min_new_tokens, prompt_lens, never_first
        )

    def apply(
        self,
        logits: Tensor,  # [rows, vocab], changed in place
        requests: PenalisedRequests,
        tokens: Tensor,  # [bs, block] last committed token + proposals
        prefix_lens: Tensor,  # [bs] committed tokens with KV
        places: Places,  # of the blocks' rows among the logits
    ) -> None:
        """Penalise every row by the output tokens before it, the row's own input included."""
        block_size = tokens.shape[1]
        for part in requests.parts():
            # A row that stands for several is computed as often, each time alike.
            at, offsets = places.rows[part.index], places.offsets[part.index]  # [n, block]
            rows = logits[at]  # [n, block, vocab]
            proposals = tokens[part.index, 1:]  # [n, block - 1]
            ids = proposals[:, None].expand(-1, block_size, -1)
            raw = rows.gather(2, ids)
            counts = self._counts[part.counts, None]
            _penalise(rows, counts, part)
            # Then again the few entries whose count grows within the block.
            counts = counts.expand(-1, block_size, -1).gather(2, ids) + _occurrences(proposals, offsets)
            rows.scatter_(2, ids, _penalise(raw, counts, part))
            num_outputs = (prefix_lens[part.index] + 1 - part.prompt_lens)[:, None] + offsets
            _forbid_end(rows, part, num_outputs)
            logits[at] = rows

    def count(self, requests: PenalisedRequests, token_ids: Tensor, commit_lens: Tensor) -> None:
        """Add `token_ids[b, :commit_lens[b]]` of a batch, [bs, block] and [bs], to its requests' counts."""
        ids = token_ids[requests.index].long()
        offsets = torch.arange(ids.shape[1], device=ids.device)
        committed = offsets < commit_lens[requests.index, None]
        entries = requests.counts[:, None] * self._vocab_size + ids
        self._counts.view(-1).scatter_add_(0, entries.flatten(), committed.flatten().int())


def is_penalised(req: Req) -> bool:
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _end_ids(req: Req) -> set[int]:
    """Tokens that end a request: its stop tokens, the model's and the tokenizer's."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return ids - {None}


def _additive(counts: Tensor, requests: PenalisedRequests) -> Tensor:
    return requests.frequency * counts + requests.presence * (counts > 0)


def _scaling(counts: Tensor, requests: PenalisedRequests) -> Tensor:
    return torch.where(counts > 0, requests.repetition, 1.0)


def _penalise(logits: Tensor, counts: Tensor, requests: PenalisedRequests) -> Tensor:
    """logits [n, rows, ids], changed in place, and how often each id was put out before, broadcastable to it."""
    logits -= _additive(counts, requests)
    scaling = _scaling(counts, requests)
    negative, scaled = logits < 0, logits * scaling
    return torch.where(negative, scaled, logits.div_(scaling), out=logits)


def _occurrences(proposals: Tensor, offsets: Tensor) -> Tensor:
    """proposals [n, block - 1], offsets [n, block] of rows -> [n, block, block - 1]: how often the row has seen
    proposal i in its block."""
    seen = torch.arange(proposals.shape[1], device=proposals.device) < offsets[:, :, None]  # [n, k, j]
    same = proposals[:, :, None] == proposals[:, None, :]  # [n, j, i]
    return torch.bmm(seen.float(), same.float()).int()


def _forbid_end(rows: Tensor, requests: PenalisedRequests, num_outputs: Tensor) -> None:
    """rows [n, rows, vocab], num_outputs [n, rows]: no end before `min_new_tokens` output tokens."""
    if requests.never_first is not None:
        too_early = num_outputs < requests.min_new_tokens[:, None]
        rows.masked_fill_(too_early[:, :, None] & requests.never_first, float("-inf"))
