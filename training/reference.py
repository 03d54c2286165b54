"""The reference decoding loop: greedy DFLASH and plain greedy decoding, batch 1, plain PyTorch in float32.

Accept length of a verify step = number of tokens that the step commits: the agreeing proposals plus the bonus
token (so 1 to block_size). The token sampled by prefill belongs to no step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.modeling import ContextKV, DraftModel, attention_biases


@dataclass(frozen=True)
class Result:
    """The outcome of one prompt.

    ids: the generated tokens, cut at max_new_tokens and after the EOS; accept_lengths: one entry per verify
    step, not cut, so the last step may count tokens that ``ids`` no longer holds.
    """

    ids: list[int]
    accept_lengths: list[int]

    @property
    def mean_accept_length(self) -> float:
        return sum(self.accept_lengths) / len(self.accept_lengths)


class ReferenceDraft:
    """A draft checkpoint with the operations of one decoding step, unbatched."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model.eval()
        self.shape = model.shape

    @staticmethod
    def load(directory: str | Path) -> ReferenceDraft:
        """Reads ``config.json`` and every ``*.safetensors`` of the directory, strictly, into float32."""
        directory = Path(directory)
        weights: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            weights |= load_file(file)
        return ReferenceDraft.from_weights(json.loads((directory / "config.json").read_text()), weights)

    @staticmethod
    def from_weights(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ReferenceDraft:
        """Weights by z-lab name, ``model.`` before it or not; RuntimeError if one is missing or extra."""
        model = DraftModel(config)
        model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()}, strict=True)
        return ReferenceDraft(model)

    @torch.no_grad()
    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """features: [T, n_ids * hidden], positions: [T] -> per layer (k, v), [T, kv_heads, head_dim] each."""
        return self.model.context_kv(features, positions)

    @torch.no_grad()
    def block(
        self,
        block_embeds: Tensor,
        positions: Tensor,
        context_kv: ContextKV,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows of one block, after the final norm.

        block_embeds: [B, hidden], positions: [B], context_kv: per layer [T, kv_heads, head_dim], its rows at
        context_positions: [T] (absent: 0..T-1) -> [B, hidden].
        """
        if context_positions is None:
            context_positions = torch.arange(context_kv[0][0].shape[0], device=positions.device)
        starts = positions[:1].expand_as(positions)
        biases = attention_biases(self.shape, context_positions, positions, starts)
        return self.model(block_embeds, positions, context_kv, biases)

    @torch.no_grad()
    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        """hidden [B, hidden] of a block, the target's head, the last committed token -> B - 1 tokens."""
        del anchor  # the rows have seen it
        return head(hidden[1:]).argmax(-1).tolist()


class Target:
    """A causal LM of ``transformers`` with its KV cache and the residual stream after chosen layers.

    The features come from hooks on the decoder layers: ``hidden_states[-1]`` of transformers is after the
    final norm, the feature of the last layer is before it.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.model = model.eval()
        self.layer_ids = tuple(layer_ids)
        self._cache: Any = None
        self._captured: dict[int, Tensor] = {}

    def _hook(self, layer_id: int) -> Any:
        def capture(module: nn.Module, args: Any, output: Any) -> None:
            self._captured[layer_id] = output

        return capture

    def forward(self, ids: Sequence[int], keep: int) -> tuple[list[int], Tensor]:
        """Runs ``ids`` after the first ``keep`` cached positions.

        Returns the argmax of every row, [T], and the features, [T, n_ids * hidden].
        """
        logits, features = self.rows(ids, keep)
        return logits.argmax(-1).tolist(), features

    @torch.no_grad()
    def rows(self, ids: Sequence[int], keep: int, visible: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """As ``forward``, with the logits of every row, [T, vocab].

        visible: [T, T] bool, which of the rows each row sees, itself included; absent: those before it. A row's
        position follows from how many it sees.
        """
        if keep == 0:
            self._cache = None
        elif self._cache.get_seq_length() > keep:
            self._cache.crop(keep - self._cache.get_seq_length())
        device = next(self.model.parameters()).device
        tree: dict[str, Tensor] = {}
        if visible is not None:
            own = torch.from_numpy(visible).to(device)
            tree["attention_mask"] = torch.cat((own.new_ones(len(ids), keep), own), dim=1)[None, None]
            tree["position_ids"] = keep - 1 + own.sum(-1)[None]
        layers: Any = self.model.get_submodule("model.layers")
        handles = [layers[i].register_forward_hook(self._hook(i)) for i in set(self.layer_ids)]
        try:
            out = self.model(
                input_ids=torch.tensor([list(ids)], device=device),
                past_key_values=self._cache,
                use_cache=True,
                **tree,
            )
        finally:
            for handle in handles:
                handle.remove()
        self._cache = out.past_key_values
        features = [self._captured[i][0] for i in self.layer_ids]
        empty = out.logits.new_zeros(len(ids), 0)
        return out.logits[0], torch.cat([empty, *features], dim=-1)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keeps the cached positions before ``start``, then these rows of those run last."""
        kept = [*range(start), *(start + row for row in rows)]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


def eos_ids(model: Any) -> frozenset[int]:
    """The ids of the model's generation config that end generation."""
    eos = model.generation_config.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _finish(ids: list[int], limit: int, stops: frozenset[int]) -> tuple[list[int], bool]:
    ids = ids[:limit]
    for index, token in enumerate(ids):
        if token in stops:
            return ids[: index + 1], True
    return ids, len(ids) == limit


def plain_generate(
    target: Any, input_ids: Sequence[int], max_new_tokens: int, ignore_eos: bool = False
) -> list[int]:
    """Greedy tokens of the target alone, one per forward."""
    stops = frozenset() if ignore_eos else eos_ids(target)
    runner = Target(target, ())
    step, out = list(input_ids), list[int]()
    keep = 0
    while True:
        predictions, _ = runner.forward(step, keep)
        keep += len(step)
        out.append(predictions[-1])
        out, done = _finish(out, max_new_tokens, stops)
        if done:
            return out
        step = out[-1:]


@torch.no_grad()
def generate(
    target: Any,
    draft: ReferenceDraft,
    input_ids: Sequence[int],
    max_new_tokens: int,
    block_size: int | None = None,
    ignore_eos: bool = False,
) -> Result:
    """Greedy DFLASH decoding of one prompt.

    target: a ``transformers`` causal LM whose embedding and head the draft uses; block_size: tokens verified
    per step, the trained one when absent. Raises ValueError for a block_size outside 2..trained.
    """
    trained = draft.shape.block_size
    size = trained if block_size is None else block_size
    if not 2 <= size <= trained:
        raise ValueError(f"block_size={size}: expected 2..{trained}, the draft was trained with {trained}")
    stops = frozenset() if ignore_eos else eos_ids(target)
    runner = Target(target, draft.shape.target_layer_ids)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    device = head.weight.device
    predictions, features = runner.forward(input_ids, 0)
    context = draft.context_kv(features, torch.arange(len(input_ids), device=device))
    length, accepts = len(input_ids), list[int]()
    out, done = _finish([predictions[-1]], max_new_tokens, stops)
    while not done:
        block = [out[-1]] + [draft.shape.mask_token_id] * (size - 1)
        positions = torch.arange(length, length + size, device=device)
        hidden = draft.block(embed(torch.tensor(block, device=device)), positions, context)
        block[1:] = draft.propose(hidden, head, out[-1])
        predictions, features = runner.forward(block, length)
        agreed = 0
        while agreed < size - 1 and block[agreed + 1] == predictions[agreed]:
            agreed += 1
        committed = agreed + 1  # the last committed token and the agreed proposals now have features
        new = draft.context_kv(features[:committed], positions[:committed])
        context = [
            (torch.cat((k, more_k)), torch.cat((v, more_v)))
            for (k, v), (more_k, more_v) in zip(context, new, strict=True)
        ]
        length += committed
        accepts.append(committed)
        out, done = _finish(out + predictions[:committed], max_new_tokens, stops)
    return Result(out, accepts)
