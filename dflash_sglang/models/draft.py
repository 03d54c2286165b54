"""DFlashDraftModel: the draft as SGLang's loader builds it and its model runner calls it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.families import Family
from dflash_sglang.checkpoint.files import draft_config, tensor_facts, weights_directory
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING, OwnModules, head_rows, own_in_words, own_modules
from dflash_sglang.checkpoint.shapes import STACKED, dense_shapes, layer_shapes
from dflash_sglang.models.borrowed import BlockEmbedding, Borrowed, BorrowingDraft
from dflash_sglang.models.convolution import ConvolvedLayer
from dflash_sglang.models.domino import DominoEdges, PrefixGRU, embed_proj
from dflash_sglang.models.edges import Edges
from dflash_sglang.models.head.draft_head import build_draft_head
from dflash_sglang.models.head.target_head import find_embedding, find_head
from dflash_sglang.models.layers import DraftLayer, Quantisation, rms_norm
from dflash_sglang.models.loading.stacking import still_missing
from dflash_sglang.models.loading.weights import load_checkpoint, load_update
from dflash_sglang.settings.plugin_config import DraftHeadForm
from dflash_sglang.sglang_names.scheduler import WeightsMapper, get_model, get_spec
from dflash_sglang.startup.facts import LoadError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DFlashDraftModel(BorrowingDraft):
    """A plain DFlash draft, or a Domino one, which has the same architecture and a head that corrects proposals.
    `bind_target` lends it the target's embedding and head after loading, unless its checkpoint holds its own.

    Raises DraftConfigError for a config that cannot be served.
    """

    spec: DraftSpec

    packed_modules_mapping = {
        packed: [name for name, (owner, _) in STACKED.items() if owner == packed]
        for packed in ("qkv_proj", "gate_up_proj")
    }
    # A quantised checkpoint may name its ignored modules with the prefix that its tensors have.
    hf_to_sglang_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})

    def __init__(self, config: Any, quant_config: Quantisation = None, prefix: str = "") -> None:
        """config: transformers config of the checkpoint; the DraftSpec is read from its raw config.json,
        because transformers drops fields on loading (a Qwen3 `sliding_window`, for one)."""
        super().__init__()
        self.config = config
        path, revision = config._name_or_path, getattr(config, "_commit_hash", None)
        self.spec = spec = DraftSpec.from_config(draft_config(path, revision), Flags.of(get_spec()))
        base = f"{prefix}." if prefix else ""
        self.num_features = len(spec.target_layer_ids)
        hidden, features = spec.hidden_size, self.num_features * spec.hidden_size
        self.fc = ReplicatedLinear(features, hidden, bias=False, quant_config=quant_config, prefix=f"{base}fc")
        self.hidden_norm = rms_norm(spec, hidden)
        self.layers = nn.ModuleList(
            self.layer_class(spec)(spec, i, quant_config, f"{base}layers.{i}") for i in range(spec.num_layers)
        )
        self.norm = rms_norm(spec, hidden)
        if spec.domino is not None:
            self.prefix_gru = PrefixGRU(hidden, spec.domino.state_size)
            self.embed_proj = embed_proj(spec.domino, hidden, spec.vocab_size)
        directory = weights_directory(path, revision, get_model().download_dir)
        self._add_own_modules(own_modules(directory, tensor_facts(directory)), quant_config, base)

    @staticmethod
    def layer_class(spec: DraftSpec) -> type[DraftLayer]:
        """The class of every decoder layer."""
        return DraftLayer if spec.convolution is None else ConvolvedLayer

    @property
    def edges(self) -> Edges | None:
        """Between the candidates of its proposals; None of a plain draft."""
        if self.spec.domino is None:
            return None
        return DominoEdges(self.prefix_gru, self.embed_proj, self.forward_embed)

    @property
    def context_norms(self) -> list[RMSNorm] | None:
        """What each layer norms context rows by before its K and V projections; None of a plain draft."""
        return None

    def joined_features(self, features: Tensor) -> Tensor:
        """features [T, n_ids * hidden] in the model's dtype -> what `fc` takes, of the same shape."""
        return features

    def serve_blocks_of(self, block_size: int) -> None:
        """How many tokens a served block has; before the first forward. Layers without convolutions do not need to
        know."""
        if self.spec.convolution is not None:
            for layer in self.layers:
                layer.serve_rows(self.spec.draft_rows(block_size))

    def _add_own_modules(self, own: OwnModules, quant_config: Quantisation, base: str) -> None:
        """Embedding and head are sharded over the vocabulary, as the target's are."""
        hidden, self.own_modules = self.spec.hidden_size, own_in_words(self.spec, own)
        if own.embedding is not None:
            self.embed_tokens = VocabParallelEmbedding(
                self.spec.vocab_size, hidden, quant_config=quant_config, prefix=f"{base}embed_tokens"
            )
        if own.head is not None:
            self.lm_head = ParallelLMHead(
                head_rows(self.spec, own), hidden, quant_config=quant_config, prefix=f"{base}lm_head"
            )
        if own.mask_embedding is not None:
            row = own.mask_embedding.row.to(self.norm.weight)
            self.mask_embedding = nn.Parameter(row, requires_grad=False)
        ids = own.target_ids()
        device = self.norm.weight.device
        self.register_buffer("target_ids", None if ids is None else ids.to(device), persistent=False)

    def bind_target(
        self,
        target_model: nn.Module,
        same_batch: int | None = None,
        token_map: Tensor | None = None,
        draft_head: DraftHeadForm = "as_is",
        vocab_size: int | None = None,
    ) -> Borrowed:
        """Borrows the target's embedding and head; once, after loading and before graph capture.

        same_batch: tensor-parallel ranks that draft the same batch, None for all. token_map: the tokens, ascending
        [n] int64, that alone are proposed, None for all. draft_head: the form of the head's weights. vocab_size:
        the target's; a head of the draft's own may have more rows.
        Raises ValueError where the target has no embedding or head that the draft can use in this form, or scales
        the embedding as the draft's config does too.
        """
        self._keep_what_no_update_brings()
        spec, scale = self.spec, self.spec.vocabulary.embedding_scale
        table, lm_head = getattr(self, "embed_tokens", None), getattr(self, "lm_head", None)
        if table is None:
            table = find_embedding(target_model, same_batch)
            # A target whose embedding is scaled outside of its module says by how much.
            by_target = getattr(target_model, "get_dflash_noise_embedding_scale", None)
            scale = _one_scale(scale, 1.0 if by_target is None else float(by_target()), target_model)
        mask_row = getattr(self, MASK_EMBEDDING, None)
        # A speculators draft was trained on the table as it is in the target's file.
        embedding = BlockEmbedding(table, scale, mask_row, spec.mask_token_id, as_stored=spec.speculators)
        ids = self.target_ids if token_map is None else token_map.to(self.norm.weight.device)
        tokens = vocab_size if self.has_own_head and self.target_ids is None else None
        of_rows = lm_head or find_head(target_model), spec.vocabulary, ids, token_map
        self.borrowed = Borrowed(embedding, *build_draft_head(*of_rows, draft_head, same_batch, tokens))
        return self.borrowed

    def _keep_what_no_update_brings(self) -> None:
        """Moves ids, RoPE tables, mask row and KV scales out of the memory that weights were loaded into, which
        --enable-memory-saver releases: an update after that restores only what every checkpoint brings."""
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())
        for name, parameter in self.named_parameters():
            if not still_missing(name, set()):
                parameter.data = parameter.data.clone()

    @property
    def has_own_head(self) -> bool:
        """Whether proposals come from a head of the draft's checkpoint."""
        return hasattr(self, "lm_head")

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Block ids [T] -> [T, hidden]. Its presence makes SGLang's graph runner embed inside of the graph."""
        return self._bound().embedding(input_ids).to(self.norm.weight.dtype)

    def drafted(
        self, ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, embedded: Tensor | None
    ) -> Tensor:
        """One pass over blocks [bs * block], up to the final norm."""
        hidden_states = self.forward_embed(ids) if embedded is None else embedded
        residual: Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads a whole checkpoint the first time; any part of one afterwards (a weight update), or nothing of it.

        Raises ValueError naming the tensor that is missing, unexpected or of the wrong shape.
        """
        hidden, shapes = self.spec.hidden_size, dense_shapes(self.spec) | layer_shapes(self.spec)
        own = [name for name in ("lm_head", "embed_tokens") if hasattr(self, name)]
        shapes |= {f"{name}.weight": (getattr(self, name).org_vocab_size, hidden) for name in own}
        (load_update if self._loaded else load_checkpoint)(self, shapes | {MASK_EMBEDDING: (hidden,)}, weights)
        self._loaded = True


def _one_scale(of_draft: float, of_target: float, target_model: nn.Module) -> float:
    if of_draft != 1.0 and of_target != 1.0:
        raise LoadError(
            f"draft config dflash_config.input_embedding_scale={of_draft!r}: expected 1.0 or none beside "
            f"{type(target_model).__name__}, which scales its embedding by {of_target!r} itself. Remove "
            "input_embedding_scale, or serve the target that the draft was trained for."
        )
    return of_draft * of_target


def under_its_names(model: type[DFlashDraftModel], family: Family) -> list[type[DFlashDraftModel]]:
    """A class for each architecture of the family: SGLang finds a model by the name of its class."""
    others = (name for name in family.architectures if name != model.__name__)
    return [model, *(type(name, (model,), {}) for name in others)]


EntryClass = [DFlashDraftModel]
