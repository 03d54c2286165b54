"""Embeddings in place of a prompt: the scheduler gets them as rows that replace those of placeholders.

SGLang cannot prefill `input_embeds` together with tokens of other requests, and after a retraction it begins them
again behind what the client has. It does both right with embeddings at positions.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from dflash_sglang.requests.errors import unexpected
from dflash_sglang.sglang_names.launcher import PositionalEmbeds

PLACEHOLDER = 1  # a token whose own embedding is replaced
ROWS, POSITIONED = "input_embeds", "positional_embed_overrides"


def place_embeddings(request: Any, width: int, dtype: torch.dtype) -> None:
    """Turns a request's `input_embeds` into `positional_embed_overrides`, and checks whichever it has.

    request: a TokenizedGenerateReqInput. width, dtype: of the target's embeddings. Raises RequestError.
    """
    rows, positioned = request.input_embeds, request.positional_embed_overrides
    if positioned is not None and not isinstance(positioned, PositionalEmbeds):
        raise unexpected(POSITIONED, positioned, "none, since JSON cannot hold them")
    if rows is None and positioned is None:
        return
    field = ROWS if positioned is None else POSITIONED
    if request.session_params is not None and request.session_params.id is not None:
        raise unexpected(field, rows, "none in a session, whose turns are tokens")
    if positioned is None:
        embeds = _as_tensor(rows, width).to(dtype)
        request.positional_embed_overrides = PositionalEmbeds(embeds, list(range(len(embeds))))
        request.input_ids, request.input_embeds = array("q", [PLACEHOLDER]) * len(embeds), None
    elif rows is not None:
        raise unexpected(field, positioned, "none beside input_embeds")
    _check(field, request.positional_embed_overrides.embeds, width)


def no_rows(body: Any) -> str | None:
    """The error of a decoded JSON body whose prompt is embeddings of no token; SGLang looks for the first one."""
    if not isinstance(body, dict) or any(body.get(prompt) is not None for prompt in ("text", "input_ids")):
        return None
    rows = body.get(ROWS)
    if isinstance(rows, list) and (not rows or rows[0] == []):
        return str(unexpected(ROWS, rows, "a row of numbers for each token of the prompt"))
    return None


def _as_tensor(rows: Any, width: int) -> torch.Tensor:
    """[tokens, width] float64 of nested lists."""
    try:
        values = np.asarray(rows)
    except ValueError:  # rows of different lengths
        values = np.empty(0)
    if values.dtype.kind not in "fi" or values.ndim != 2 or values.shape[1] != width or not len(values):
        raise unexpected(ROWS, rows, f"a row of {width} numbers for each token of the prompt")
    return torch.from_numpy(values.astype(np.float64))


def _check(field: str, embeds: torch.Tensor, width: int) -> None:
    """One that is not finite reaches other requests through the slots that it leaves."""
    if embeds.ndim != 2 or embeds.shape[1] != width:
        raise unexpected(f"{field} of shape", list(embeds.shape), f"rows of {width} numbers")
    finite = torch.isfinite(embeds)
    if not finite.all():
        token, column = (~finite).nonzero()[0].tolist()
        expected = f"a number that {embeds.dtype} holds"
        raise unexpected(f"{field} of token {token}", embeds[token, column].item(), expected)
