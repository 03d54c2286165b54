"""gpt-oss's activation: SGLang's kernel, which runs on a GPU, equals the module's torch form."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.checkpoint.draft_spec import SwigluClamp
from dflash_sglang.models.layers import ClampedSwiglu
from dflash_sglang.sglang_names.scheduler import swiglu_oai_split


@pytest.mark.parametrize("size", [96, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_what_torch_gives(triton_runs, device, dtype, size):
    gate_up = 4 * torch.randn(5, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = ClampedSwiglu(SwigluClamp(1.702, 2.5))
    expected = module(gate_up)
    assert module.limit < gate_up.float().abs().max()
    ours = swiglu_oai_split(gate_up.to(device), module.alpha, 1.0, module.limit).cpu()
    torch.testing.assert_close(ours, expected)
    assert module(gate_up[:0]).shape == (0, size)
