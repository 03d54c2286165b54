"""Reading a draft checkpoint: its config as a `DraftSpec`, its files, its family, what it has of its own."""

from dflash_sglang.checkpoint.draft_spec import DraftSpec
from dflash_sglang.checkpoint.family_specs import VocabularySpec
from dflash_sglang.checkpoint.fields import DraftConfigError
from dflash_sglang.checkpoint.files import read_config
from dflash_sglang.checkpoint.layers import LayerAttention
from dflash_sglang.checkpoint.rope import RopeSpec
from dflash_sglang.checkpoint.speculators import flattened, is_speculators

__all__ = [
    "DraftConfigError",
    "DraftSpec",
    "LayerAttention",
    "RopeSpec",
    "VocabularySpec",
    "flattened",
    "is_speculators",
    "read_config",
]
