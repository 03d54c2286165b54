"""MtpSpec: the multi-token-prediction layers that a target's config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_sglang.checkpoint.fields import MOST_LAYERS, DraftConfigError, Fields, as_int, first_architecture
from dflash_sglang.checkpoint.layers import LayerAttention

_TARGET = "Step3p5ForCausalLM"
_DRAFT = "Step3p5MTPDraftModel"  # by which SGLang finds its class
_NO_WAY = "Serve this target without --speculative-algorithm DFLASH."
# Of config.json, a value for each layer: those of the MTP layers follow the target's.
_PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")


def holds_mtp(config: Mapping[str, Any]) -> bool:
    """Whether this config.json is of a target whose MTP layers can be its draft."""
    return first_architecture(config) == _TARGET


@dataclass(frozen=True)
class MtpSpec:
    """A chain of MTP layers. Layer i, counted from 1, proposes the token i places behind the last one.

    ``num_target_layers``: which precede them in the checkpoint. ``layers``: their attention.
    """

    num_target_layers: int
    layers: tuple[LayerAttention, ...]
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    # As in DraftSpec: weights are in the model's dtype, no row is masked, and the draft has rows of its own.
    quantization: ClassVar[None] = None
    mask_token_id: ClassVar[None] = None
    anchor_proposes: ClassVar[bool] = True
    has_row_less: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MtpSpec:
        """MtpSpec of a raw config.json for which `holds_mtp`.

        Raises DraftConfigError for a field that is missing, malformed or not served.
        """
        fields = Fields(config)
        target_layers = as_int(fields.shape("num_hidden_layers"), 1, MOST_LAYERS)
        count = as_int(fields.shape("num_nextn_predict_layers", 0), 1, MOST_LAYERS)
        for name in _PER_LAYER:
            values = config.get(name)
            if isinstance(values, list) and len(values) < target_layers + count:
                expected = f"a value for each of {target_layers} layers and {count} multi-token-prediction layers"
                raise DraftConfigError(name, values, expected)
        kinds = config.get("layer_types") or []
        # SGLang's layers of these models see one key more than transformers' do.
        window = as_int(fields.shape("sliding_window"), 1) + 1 if "sliding_attention" in kinds else None
        groups = config.get("num_attention_groups")
        of_sliding = fields.mapping("attention_other_setting").get("num_attention_groups", groups)
        if of_sliding != groups:
            expected = (
                f"num_attention_groups={groups!r}: SGLang's KV pools of this target have one number of heads"
            )
            raise DraftConfigError("attention_other_setting.num_attention_groups", of_sliding, expected, _NO_WAY)
        sparse = map(int, filter(None, str(config.get("moe_layers_enum") or "").split(",")))
        experts = sorted(layer for layer in sparse if layer >= target_layers)
        if experts:
            expected = "no multi-token-prediction layer with experts"
            raise DraftConfigError("moe_layers_enum", experts, expected, _NO_WAY)
        quantization = config.get("quantization_config")
        if quantization is not None:
            expected = "none: multi-token-prediction layers are read in the model's dtype"
            fix = "Serve the unquantised checkpoint, or without --speculative-algorithm DFLASH."
            raise DraftConfigError("quantization_config", quantization, expected, fix)
        layers = (
            LayerAttention(kind, True, window if kind == "sliding_attention" else None)
            for kind in kinds[target_layers : target_layers + count]
        )
        return cls(
            num_target_layers=target_layers,
            layers=tuple(layers),
            hidden_size=as_int(fields.shape("hidden_size"), 1),
            vocab_size=as_int(fields.shape("vocab_size"), 1),
            max_position_embeddings=as_int(fields.shape("max_position_embeddings", 32768), 1),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def block_size(self) -> int:
        """The last token and a proposal of each layer."""
        return self.num_layers + 1

    def draft_rows(self, width: int) -> int:
        """Rows of one request in the draft's forward, for blocks of any width: the last committed ones. As many as
        the step before has committed, or as there are layers, and every row's keys and values are those of the
        committed text."""
        del width
        return self.block_size

    @property
    def reach(self) -> int:
        """Positions before the last token whose keys and values a forward of a sliding layer reads or writes. The
        first window after steps of width 1 starts two windows back, and each row sees a sliding window."""
        return 2 * self.block_size + max((layer.window or 0 for layer in self.layers), default=0)

    def prefix(self, layer: int) -> str:
        """Of the names of a layer's tensors in the checkpoint; layer: counted from 0."""
        return f"model.layers.{self.num_target_layers + layer}."

    def make_alone(self, config: Any) -> None:
        """Make the target's transformers config that of its MTP layers: a model of these layers alone.

        Beside a target with both kinds of layers SGLang gives them a pool of two KV groups, as the target has:
        sliding layers at the target's sliding slots, others at its full ones.
        """
        first, count = self.num_target_layers, self.num_layers
        slides = [layer.kind == "sliding_attention" for layer in self.layers]
        if any(slides) and "full_attention" in config.layer_types[:first]:
            config.is_hybrid_swa, config.hybrid_layer_pattern = True, list(map(int, slides))
        for name in _PER_LAYER:
            values = getattr(config, name, None)
            if isinstance(values, list | tuple):
                setattr(config, name, list(values)[first : first + count])
        config.moe_layers_enum, config.num_nextn_predict_layers = "-1", 0
        config.architectures = [_DRAFT]
        config.num_hidden_layers = self.num_layers
        # SGLang sizes the pool by these layers, and asks the target for layers to capture; see `hidden_states`.
        config.dflash_config = {"target_layer_ids": [0], "block_size": self.block_size}
