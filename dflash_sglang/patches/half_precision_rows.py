"""Logits as the head's product gives them, in the memory of float32 ones that SGLang's graphs share.

The narrow rows lie at the end of that memory, so that it takes no other to widen them there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.sglang_names.scheduler import cast_to_float32_logits

_WIDE = torch.float32.itemsize
# Bytes to which the place of narrow rows is aligned, as an allocation of its own: GEMMs are chosen by it, Triton
# kernels compiled for it.
_ALIGNMENT = 256


def place(buffer: Tensor, width: int, dtype: torch.dtype) -> Tensor | None:
    """buffer [rows, vocab] float32, the start of its storage -> a view [rows, width] of the end of its memory,
    None where that many do not fit."""
    rows = buffer.shape[0]
    cells = buffer.view(-1).view(dtype)
    step = _ALIGNMENT // dtype.itemsize
    start = (cells.numel() - rows * width) // step * step
    if start < 0:
        return None
    return cells[start : start + rows * width].view(rows, width)


def widen(narrow: Tensor, vocab_size: int) -> Tensor:
    """narrow [rows, width] of 16-bit floats: the first rows of what `place` gave, width >= vocab -> float32
    [rows, vocab], in the first rows of the buffer. Takes no memory but for the last rows; `narrow` is consumed.

    Row i of the result ends at byte 4 * (i + 1) * vocab, and narrow row j begins at S + 2 * j * width. One launch
    writes all rows that end before the first that it reads begins: about half of the buffer's rows that are left.
    The last ones, which begin among their own floats, are read from a copy.
    """
    rows, width = narrow.shape
    size = narrow.element_size()
    floats = narrow.as_strided((rows * vocab_size * _WIDE // size,), (1,), 0).view(torch.float32)
    wide = floats.view(rows, vocab_size)
    first = narrow.storage_offset() * size
    done = 0
    while done < rows:
        free = (first + done * width * size) // (vocab_size * _WIDE)
        end = min(rows, free) if free > done else rows
        source = narrow[done:end, :vocab_size]
        _copy(source if free > done else source.clone(), wide[done:end])
        done = end
    return wide


def _copy(narrow: Tensor, wide: Tensor) -> None:
    if narrow.is_cuda:
        cast_to_float32_logits(narrow, wide)  # torch's is slower
    else:
        wide.copy_(narrow)
