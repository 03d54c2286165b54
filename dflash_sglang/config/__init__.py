"""What the operator and the draft checkpoint ask for, normalised: PluginConfig and DraftSpec."""

from dflash_sglang.config.draft_spec import DraftSpec, read_config
from dflash_sglang.config.fields import DraftConfigError
from dflash_sglang.config.layers import LayerAttention
from dflash_sglang.config.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.config.rope import RopeSpec
from dflash_sglang.config.speculators import flattened, is_speculators
from dflash_sglang.config.vocabulary import VocabularySpec

__all__ = [
    "DraftConfigError",
    "DraftSpec",
    "LayerAttention",
    "PluginConfig",
    "PluginConfigError",
    "RopeSpec",
    "VocabularySpec",
    "flattened",
    "is_speculators",
    "read_config",
]
