"""MiMo-V2 with its multi-token-prediction layers, and the reference of what they propose.

The target is the zoo's. The layers are named as in the hub's files: `model.mtp.layers.0` and on. The reference
loads the same file into transformers' model and its decoder layers.
"""

from __future__ import annotations

import copy
import functools
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.zoo.member import pair

MTP_LAYERS = 3
_BESIDE = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")


def write(directory: Path) -> Path:
    """Writes the checkpoint: the zoo's target, and behind it seeded layers that keep the scale of their input."""
    shutil.copytree(pair("MiMo-V2")[0], directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for i in range(MTP_LAYERS):
        hidden = len(tensors["model.norm.weight"])
        of_layer: dict[str, tuple[int, ...]] = {name: (hidden,) for name in _BESIDE}
        of_layer["eh_proj.weight"] = (hidden, 2 * hidden)
        for name, tensor in tensors.items():  # attention as in a sliding layer, a dense MLP as in the first layer
            for stem in ("model.layers.1.self_attn.", "model.layers.0.mlp.", "model.layers.0.input_layernorm."):
                if name.startswith(stem):
                    of_layer[name.split(".", 3)[3]] = tuple(tensor.shape)
        of_layer["pre_mlp_layernorm.weight"] = (hidden,)
        for name, shape in of_layer.items():
            noise = torch.randn(shape, generator=generator)
            made = noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.1 * noise + ("norm" in name)
            tensors[f"model.mtp.layers.{i}.{name}"] = made
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class Reference(nn.Module):
    """The target and its MTP layers, made of transformers' modules, in float32. A call reads the whole text."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import MiMoV2FlashForCausalLM
        from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as modeling

        super().__init__()
        load = functools.partial(MiMoV2FlashForCausalLM.from_pretrained, dtype=torch.float32)
        self.target = load(checkpoint, attn_implementation="eager").eval()
        config = copy.deepcopy(self.target.config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"] * MTP_LAYERS, ["dense"] * MTP_LAYERS
        self.window = config.sliding_window
        tensors = load_file(checkpoint / "model.safetensors")

        def norm(name: str) -> nn.Module:
            made = modeling.MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps)
            made.weight.data.copy_(tensors[name])
            return made

        stems = [f"model.mtp.layers.{i}." for i in range(MTP_LAYERS)]
        self.enorms, self.hnorms, self.norms = (
            nn.ModuleList(norm(f"{stem}{name}.weight") for stem in stems)
            for name in ("enorm", "hnorm", "final_layernorm")
        )
        self.projections = [tensors[f"{stem}eh_proj.weight"] for stem in stems]
        self.layers = nn.ModuleList(modeling.MiMoV2FlashDecoderLayer(config, i) for i in range(MTP_LAYERS))
        for stem, layer in zip(stems, self.layers, strict=True):
            names = {name.removeprefix(stem): name for name in tensors if name.startswith(stem)}
            layer.load_state_dict(
                {
                    name.replace("pre_mlp_", "post_attention_").replace("attention_sink_bias", "sinks"): tensors[
                        of
                    ]
                    for name, of in names.items()
                    if name not in _BESIDE
                }
            )

    @torch.no_grad()
    def propose(self, ids: Tensor, chosen: Tensor) -> list[int]:
        """The likeliest proposal of each MTP layer for a text ids [n], n > 1.

        chosen [MTP_LAYERS]: what later layers read in their place.

        The text ends with a token that the target has not read: layer i (from 0) reads at position p the target's
        hidden state and the token p + i + 1.
        """
        hidden, tokens, proposed = self.target.model(ids[None, :-1]).last_hidden_state[0], ids[1:], []
        positions = torch.arange(len(hidden))
        distance = positions[:, None] - positions
        mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        rotary = self.target.model.rotary_emb(hidden[None], positions[None], "sliding_attention")
        for i in range(MTP_LAYERS):
            embedded = self.target.get_input_embeddings()(tokens)
            joined = torch.cat([self.enorms[i](embedded), self.hnorms[i](hidden)], dim=-1) @ self.projections[i].T
            rows = self.layers[i](joined[None], attention_mask=mask[None, None], position_embeddings=rotary)[0]
            proposed.append(int(self.target.lm_head(self.norms[i](rows[-1])).argmax()))
            tokens = torch.cat([tokens[1:], chosen[i : i + 1]])
        return proposed
