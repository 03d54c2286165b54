"""Stand-ins for SGLang's objects that several test modules use: server arguments, a target's config, ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dflash_sglang.startup.launch_checks import UNSERVED, UNSERVED_APART


class Algorithm:
    """SGLang's SpeculativeAlgorithm, DFLASH or another one."""

    def __init__(self, dflash: bool = True) -> None:
        self.dflash = dflash

    def is_dflash(self) -> bool:
        return self.dflash


def arguments(draft: Path, **overrides: Any) -> SimpleNamespace:
    """ServerArgs of a launch with DFLASH that leaves everything else unset."""
    unset = """speculative_dflash_block_size speculative_num_draft_tokens speculative_draft_attention_backend
    speculative_draft_kv_cache_dtype speculative_draft_model_quantization speculative_draft_load_format
    speculative_draft_window_size speculative_draft_sink_size speculative_token_map download_dir attention_backend
    prefill_attention_backend extra_metric_labels"""
    values: dict[str, Any] = dict.fromkeys(unset.split()) | dict(
        device="cpu",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(draft),
        speculative_draft_model_revision="main",
        _speculative_draft_quantization_explicitly_set=False,
        enable_return_aux_hidden_states=False,
        model_path="target",
        load_format="auto",
        kv_cache_dtype="auto",
        tp_size=1,
        attn_dp_size=1,
        disaggregation_mode="null",
        disaggregation_transfer_backend="mooncake",
    )
    values |= {row.field: row.off for row in (*UNSERVED, *UNSERVED_APART)}
    return SimpleNamespace(**{**values, **overrides})


def target_model() -> SimpleNamespace:
    """SGLang's ModelConfig of a target of 5 layers, 64 wide, and 320 tokens."""
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=5, hidden_size=64, vocab_size=320),
        hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
        model_impl="auto",
        is_local_attention_model=False,
        use_ngram_embedding=False,
        is_generation=True,
        joint_head_config=None,
        pointer_head=None,
    )


class Settings(SimpleNamespace):
    """A group of SGLang's resolved settings."""

    @contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        yield
        vars(self).update(before)


class BuiltInWorker:
    """What SGLang's own `create_worker` gives."""


def built_in(algorithm: Algorithm, server_args: Any) -> type:
    return BuiltInWorker


class Together:
    """A group whose ranks are threads that meet in every collective."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._sent: list[torch.Tensor] = [torch.empty(0)] * ranks

    def of(self, rank: int) -> SimpleNamespace:
        def all_gather_into_tensor(out: torch.Tensor, own: torch.Tensor) -> None:
            self._sent[rank] = own
            self._barrier.wait()
            assert len({(sent.shape, sent.dtype) for sent in self._sent}) == 1
            out.view(-1, *own.shape[1:]).copy_(torch.cat(self._sent))
            self._barrier.wait()

        return SimpleNamespace(
            world_size=len(self._sent), rank_in_group=rank, all_gather_into_tensor=all_gather_into_tensor
        )
