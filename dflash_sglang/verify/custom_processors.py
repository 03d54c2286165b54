"""Custom logit processors at every verified row, with the request as they would find it in plain decoding."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import torch

from dflash_sglang.sglang_names.scheduler import (
    ProcessorEntry,
    Req,
    ScheduleBatch,
    apply_custom_logit_processor,
    async_h2d,
)

REQUEST_KEY = "__req__"  # under which SGLang puts the request into custom_params


class CustomProcessors:
    """Runs a batch's processors over all rows of its blocks.

    A processor may read the request's `output_ids`. The host's copy of them lacks what the last step committed
    as long as overlap scheduling has not processed its result, so the last step's tokens are kept on the device.
    """

    def __init__(self, max_requests: int, block_size: int, device: str):
        self._last = torch.zeros((max_requests, block_size + 1), dtype=torch.int64, device=device)

    def note(self, batch: ScheduleBatch, token_ids: torch.Tensor, commit_lens: torch.Tensor | int) -> None:
        """A step of `batch` commits `token_ids[b, :commit_lens[b]]`; token_ids [bs, at most block]."""
        if batch.sampling_info.has_custom_logit_processor:
            self._last[batch.req_pool_indices, : token_ids.shape[1]] = token_ids.long()
            self._last[batch.req_pool_indices, -1] = torch.as_tensor(commit_lens, device=self._last.device).long()

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """SGLang's sampler runs the processors of a prefill. In a mixed batch it samples for decoding requests,
        too, whose outputs are those of the step in flight on the device: waits for it."""
        info = batch.sampling_info
        if not (batch.forward_mode.is_mixed() and info.has_custom_logit_processor):
            return
        decoding = set(map(id, batch.decoding_reqs or ()))
        known = torch.cat([batch.seq_lens[:, None], self._last[batch.req_pool_indices]], dim=1).tolist()
        info.custom_params = [
            _at_row(params, _outputs(req, seq_len, last)) if id(req) in decoding else params
            for req, params, (seq_len, *last) in zip(batch.reqs, info.custom_params, known, strict=True)
        ]

    def apply(
        self,
        logits: torch.Tensor,  # [bs * block, vocab], changed in place
        batch: ScheduleBatch,
        tokens: torch.Tensor,  # [bs, block] last committed token + proposals
        prefix_lens: torch.Tensor,  # [bs] committed tokens with KV
    ) -> None:
        """Waits for the proposals on the host: processors are host code."""
        info = batch.sampling_info
        block_size = tokens.shape[1]
        seq_lens, last, proposals = (
            part.tolist()
            for part in torch.cat(
                [prefix_lens[:, None] + 1, self._last[batch.req_pool_indices], tokens[:, 1:]], dim=1
            )
            .cpu()
            .split([1, self._last.shape[1], block_size - 1], dim=1)
        )
        params = []
        for i, req in enumerate(batch.reqs):
            outputs = _outputs(req, seq_lens[i][0], last[i])
            params += [_at_row(info.custom_params[i], outputs + proposals[i][:k]) for k in range(block_size)]
        entries = {}
        for key, entry in info.custom_logit_processor.items():
            rows = [row * block_size + k for row in entry.rows for k in range(block_size)]
            indices = async_h2d(rows, dtype=torch.int64, device=logits.device)
            entries[key] = ProcessorEntry(entry.processor, rows, indices)
        of_rows = dataclasses.replace(
            info,
            temperatures=info.temperatures.repeat_interleave(block_size, dim=0),  # the batch's length
            custom_params=params,
            custom_logit_processor=entries,
        )
        apply_custom_logit_processor(logits, of_rows)


class RequestAtRow:
    """A request whose outputs are those before one verified row. What a processor keeps in it is of that row."""

    def __init__(self, req: Any, output_ids: list[int]):
        self._req = req
        self.output_ids = self.output_ids_through_stop = array("q", output_ids)
        self.seqlen = len(req.origin_input_ids) + len(output_ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_req":  # asked for while a copy is made, which has no request yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self._req, name)


def _outputs(req: Req, seq_len: int, last: list[int]) -> list[int]:
    """The output tokens of a request with `seq_len` tokens; last: what its last step gave, and how many of it."""
    missing = seq_len - len(req.origin_input_ids) - len(req.output_ids)
    committed = last[: last[-1]]
    return [*req.output_ids, *committed[len(committed) - missing :]]


def _at_row(params: dict[str, Any] | None, output_ids: list[int]) -> dict[str, Any] | None:
    if not params or REQUEST_KEY not in params:
        return params
    return {**params, REQUEST_KEY: RequestAtRow(params[REQUEST_KEY], output_ids)}
