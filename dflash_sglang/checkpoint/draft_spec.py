"""DraftSpec: a DFlash checkpoint's config.json, every spelling of it, as one typed record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_sglang.checkpoint import family_specs
from dflash_sglang.checkpoint.families import DFLASH2, DOMINO, DSPARK, GEMMA4, LAGUNA, family_of
from dflash_sglang.checkpoint.family_specs import VocabularySpec, vocabulary
from dflash_sglang.checkpoint.fields import (
    MOST_LAYERS,
    DraftConfigError,
    Fields,
    as_bool,
    as_float,
    as_int,
    class_default,
    shown,
)
from dflash_sglang.checkpoint.gemma4 import gemma4_fields
from dflash_sglang.checkpoint.layers import LayerAttention, layer_attention
from dflash_sglang.checkpoint.left_out import LAYER_INPUTS, NO_FLAGS, VLLM_PLACES, Flags, refuse_left_out
from dflash_sglang.checkpoint.rope import RopeSpec, rope
from dflash_sglang.checkpoint.speculators import LAYER_IDS, flattened, is_speculators

QWEN3_HEAD_DIM = 128  # of transformers' Qwen3 where a config has none
# Fields that say whether a block proposes from its first row on, the row of the last committed token (the anchor),
# and where they may stand beside the top level.
_FROM_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
_PLACES = ("dflash_config", "eagle_config", "text_config", "transformer_layer_config")


@dataclass(frozen=True)
class SwigluClamp:
    """Of gpt-oss's activation: gate * sigmoid(``alpha`` * gate) * (up + 1), where gate is at most ``limit`` and up
    lies between -``limit`` and ``limit``."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class DraftSpec:
    """A DFlash draft as its checkpoint describes it."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    attention_bias: bool
    gemma_norms: bool  # norms scale by 1 + weight, else by the weight
    swiglu_clamp: SwigluClamp | None  # how the MLP's activation differs from SwiGLU
    block_size: int  # trained: the last token, and a proposal of each row that has one
    has_row_less: bool  # the draft reads all rows of a block but the last: each proposes the token after its own
    mask_token_id: int  # in the embedding table
    target_layer_ids: tuple[int, ...]  # 0-based; their outputs are the features, in the order `fc` was trained on
    num_target_layers: int | None
    layers: tuple[LayerAttention, ...]
    rope: RopeSpec
    attention_value_scale: float | None  # factor on V
    quantization: str | None  # the checkpoint's method (`fp8`, `compressed-tensors`, ...)
    speculators: bool  # in the speculators format, else in z-lab's
    vocabulary: VocabularySpec
    attention_sinks: bool  # each head of a layer has a sink, one more logit in its softmax
    convolution: family_specs.ConvolutionSpec | None  # around attention and MLP of every layer
    # What makes it a draft of that family.
    dflash2: family_specs.DFlash2Spec | None
    dspark: family_specs.DSparkSpec | None
    domino: family_specs.DominoSpec | None
    laguna: family_specs.LagunaSpec | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], flags: Flags = NO_FLAGS) -> DraftSpec:
        """DraftSpec of a raw config.json (not of a transformers config object, which rewrites fields), which
        `families.check_family` has let pass. ``flags``: of the launch.

        Raises DraftConfigError for fields that are missing, and for one that is malformed or not servable.
        """
        raw, speculators = config, is_speculators(config)
        if speculators:
            config = flattened(config)
        family = family_of(config)
        if family is GEMMA4:
            config = gemma4_fields(config)
        fields = Fields(config)
        readers = (partial(_layers, fields, flags), partial(_swiglu_clamp, fields))
        refuse_left_out(fields, flags, LAYER_IDS if speculators else "target_layer_ids", family.needs, readers)
        _, from_anchor = anchor_field(raw) or (None, family in (DSPARK, GEMMA4))
        has_row_less = from_anchor and family is not DOMINO
        num_layers = as_int(fields.shape("num_hidden_layers"), 1, MOST_LAYERS)
        hidden_size = as_int(fields.shape("hidden_size"), 1)
        num_heads = as_int(fields.shape("num_attention_heads"), 1)
        unsaid = QWEN3_HEAD_DIM if fields.text.get("model_type") == "qwen3" else hidden_size // num_heads
        head_dim = as_int(fields.shape("head_dim", unsaid), 2)
        vocab_size = as_int(fields.shape("vocab_size"), 1)
        norm_eps = fields.shape("rms_norm_eps", None)
        if norm_eps[1] is None:
            norm_eps = fields.shape("rms_norm_eps", class_default(fields, "rms_norm_eps"))
        target_layer_ids = _target_layer_ids(fields)
        _check_features(fields, target_layer_ids)
        return cls(
            architecture=config["architectures"][0],
            hidden_size=hidden_size,
            intermediate_size=as_int(fields.shape("intermediate_size"), 1),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=as_int(fields.shape("num_key_value_heads", num_heads), 1),
            head_dim=head_dim,
            rms_norm_eps=as_float(norm_eps),
            vocab_size=vocab_size,
            max_position_embeddings=as_int(fields.shape("max_position_embeddings", 32768), 1),
            attention_bias=as_bool(fields.shape("attention_bias", False)),
            gemma_norms=as_bool(fields.draft("use_gemma_norm", fields.text.get("use_gemma_norm", False))),
            swiglu_clamp=_swiglu_clamp(fields),
            block_size=_block_size(fields, flags, has_row_less),
            has_row_less=has_row_less,
            mask_token_id=as_int(fields.draft("mask_token_id"), 0),
            target_layer_ids=target_layer_ids,
            num_target_layers=fields.optional("num_target_layers", as_int, 1),
            layers=_layers(fields, flags),
            rope=rope(fields, head_dim, whole_head=speculators),
            attention_value_scale=fields.optional("attention_value_scale", as_float),
            quantization=_quantization(config),
            speculators=speculators,
            vocabulary=vocabulary(fields),
            attention_sinks=as_bool(fields.draft("attention_sink_bias", False)),
            convolution=family_specs.convolution(fields, hidden_size) if family is DFLASH2 else None,
            dflash2=family_specs.dflash2(fields, vocab_size) if family is DFLASH2 else None,
            dspark=family_specs.dspark(fields) if family in (DSPARK, GEMMA4) else None,
            domino=family_specs.domino(fields, vocab_size) if family is DOMINO else None,
            laguna=family_specs.laguna(fields, head_dim) if family is LAGUNA else None,
        )

    @property
    def gemma4_layers(self) -> bool:
        """Whether its layers are Gemma 4's: norms behind each sublayer, keys that are values, too."""
        return self.architecture in GEMMA4.architectures

    @property
    def anchor_proposes(self) -> bool:
        """Whether the row of the last committed token has a proposal, too."""
        return self.has_row_less or (self.domino is not None and self.domino.shifted)

    def draft_rows(self, width: int) -> int:
        """Rows of one request in the draft's forward, for a block of `width` tokens, more than one."""
        return width - self.has_row_less

    def named_layer_ids(self, ids: tuple[int, ...]) -> tuple[str, list[int]]:
        """(field, value) with which the checkpoint's format names the target layers `ids`."""
        if self.speculators:
            return LAYER_IDS, [i + 1 for i in ids]
        return "target_layer_ids", list(ids)


def _layers(fields: Fields, flags: Flags) -> tuple[LayerAttention, ...]:
    return layer_attention(fields, as_int(fields.shape("num_hidden_layers"), 1, MOST_LAYERS), flags.window)


def _block_size(fields: Fields, flags: Flags, has_row_less: bool) -> int:
    """Tokens of a block: those that a flag gives, or the rows that the config has and what is proposed beyond."""
    found = fields.draft("block_size")
    if found[1] is None and flags.block_size is not None:
        return flags.block_size
    return as_int(found, 1) + has_row_less


def _swiglu_clamp(fields: Fields) -> SwigluClamp | None:
    _, act = fields.shape("hidden_act", "silu")
    if act == "swigluoai":
        return SwigluClamp(*(_of_swigluoai(fields, name) for name in ("swiglu_alpha", "swiglu_limit")))
    if act != "silu":
        fix = "The draft's MLP is a SwiGLU; serve a checkpoint trained with it."
        raise DraftConfigError("hidden_act", act, "silu or swigluoai", fix)
    return None


def _of_swigluoai(fields: Fields, name: str) -> float:
    found = fields.shape(name, None)
    if found[1] is None:
        fix = f"Add {name} (the one that the draft was trained with) to its config.json."
        raise DraftConfigError(name, None, "a positive number beside hidden_act='swigluoai'", fix)
    return as_float(found)


def _target_layer_ids(fields: Fields) -> tuple[int, ...]:
    field, ids = fields.draft("target_layer_ids")
    valid = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not valid or not ids:
        raise DraftConfigError(field, ids, "a non-empty list of integers")
    return tuple(ids)


def _check_features(fields: Fields, layer_ids: Sequence[int]) -> None:
    """Raise DraftConfigError for a draft that is fed with anything but the outputs of `layer_ids`, its
    `target_layer_ids`, joined by its `fc`, or that names two sets of layers."""
    for place in VLLM_PLACES:
        given, path = (fields.top, "") if place is None else (fields.mapping(place), f"{place}.")
        used = given.get("use_aux_hidden_state")
        if used is not None and not as_bool((f"{path}use_aux_hidden_state", used)):
            expected = "true: a draft whose fc joins the outputs of several layers of the target"
            fix = "Serve a draft that was trained with them; this one takes the target's last hidden state alone."
            raise DraftConfigError(f"{path}use_aux_hidden_state", used, expected, fix)
        inputs = given.get(LAYER_INPUTS)
        if inputs is None:
            continue
        shifted = [i + 1 for i in layer_ids]
        if inputs != shifted:
            expected = f"{shifted}: each of target_layer_ids={list(layer_ids)} and 1, as vLLM counts them"
            fix = "Keep the one that the draft was trained with in its config.json."
            raise DraftConfigError(f"{path}{LAYER_INPUTS}", inputs, expected, fix)


def _quantization(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None:
        return None
    method = None
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method") or quantization.get("quant_algo")
    if not isinstance(method, str):
        fix = "Add quantization_config.quant_method to the draft's config.json."
        raise DraftConfigError("quantization_config", quantization, "an object with a quant_method", fix)
    return method


def anchor_field(config: Mapping[str, Any]) -> tuple[str, bool] | None:
    """(path, value) of the one of _FROM_ANCHOR in a raw config.json of any format, None without one.

    Raises DraftConfigError for a value that is not true or false, and for two that contradict each other.
    """
    said = list(_said(config))
    for found in said:
        if as_bool(found) != said[0][1]:
            expected = (
                f"{said[0][0]}={shown(said[0][1])} to say the same: whether the row of the last committed token "
                "proposes, too"
            )
            fix = "Keep the one that the draft was trained with in its config.json."
            raise DraftConfigError(found[0], found[1], expected, fix)
    return said[0] if said else None


def _said(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every name in every place; null is absent."""
    nested = ((f"{place}.", config.get(place)) for place in _PLACES)
    for path, fields in (("", config), *nested):
        given = fields if isinstance(fields, Mapping) else {}
        yield from ((path + name, given[name]) for name in _FROM_ANCHOR if given.get(name) is not None)
