"""What a member of the zoo is, and how its checkpoints are made."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import draft_config, draft_tensors, write_checkpoint

LAYERS = 5
BLOCK = 8
FEATURES = (2, 4, 0)  # unsorted: a middle layer, the last, the first
# Fields of a text model; a draft of `tests.support.tiny` fits it.
TEXT: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=320,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Member:
    """A target and the draft that goes with it.

    model_class: of transformers, by name, which is the architecture unless `config` names one. config: gives the
    target's transformers config. arguments: of any server that serves it. draft: overrides of the draft's
    config.json. on_gpu_only: why the CPU platform cannot run it, or None. finish: changes the random model.
    processor: gives the transformers processor that lies beside it. image_prompt: ids of a prompt with an image,
    of a target that reads images. refused: what start-up says, or None. renamed: parts of tensors' names as
    transformers writes them, and SGLang's in their place. flush_fails: SGLang empties the prefix cache and then
    answers with an error, because its processor of this class has no cache of its own to empty.
    """

    name: str
    model_class: str
    config: Callable[[], Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] = field(default_factory=dict)
    on_gpu_only: str | None = None
    finish: Callable[[Any], None] = lambda model: None
    processor: Callable[[], Any] | None = None
    image_prompt: tuple[int, ...] = ()
    refused: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    flush_fails: bool = False
    prefix_grid: int = 16  # tokens between the ends of prefixes that the cache hands on, pages of 16 or less

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that the draft reads, in the draft's order."""
        return tuple(self.draft.get("dflash_config", {}).get("target_layer_ids", FEATURES))


ZOO: dict[str, Member] = {}


def register(*members: Member) -> None:
    for member in members:
        assert member.name not in ZOO, member.name
        ZOO[member.name] = member


def config(config_class: str, *without: str, **fields: Any) -> Callable[[], Any]:
    """Gives a transformers config of this class with TEXT's fields, but for `without`, and `fields`."""
    text = {name: value for name, value in TEXT.items() if name not in without}
    return _maker(config_class, {**text, **fields})


def wrapped(config_class: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Callable[[], Any]:
    """Gives a transformers config of a text model behind a vision tower."""
    return _maker(config_class, dict(text_config=text, vision_config=vision, **fields))


def _maker(config_class: str, fields: dict[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, config_class)(**copy.deepcopy(fields))

    return make


@functools.cache
def pair_for(name: str, dtype: str) -> tuple[Path, Path]:
    """`pair` with a config.json of the target that says `dtype`, for a server with that --dtype.

    SGLang makes some layers in the checkpoint's dtype, whatever --dtype is: the projections of gpt-oss, the gated
    norms of Qwen3-Next. Loading casts, so the weights are `pair`'s own files.
    """
    target, draft = pair(name)
    if dtype == "float32":
        return target, draft
    directory = target.with_name(f"target in {dtype}")
    directory.mkdir()
    for path in target.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = (target / "config.json").read_text()
    assert '"dtype": "float32"' in config
    (directory / "config.json").write_text(config.replace('"dtype": "float32"', f'"dtype": "{dtype}"'))
    return directory, draft


@functools.cache
def pair(name: str) -> tuple[Path, Path]:
    """The directories of the member's target and draft checkpoints, float32, made at the first call."""
    member = ZOO[name]
    directory = directory_of(name)
    model = _random_model(member)
    model.save_pretrained(directory / "target")
    for theirs, sglangs in member.renamed.items():
        weights = directory / "target" / "model.safetensors"
        tensors = {name.replace(theirs, sglangs): tensor for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, {"format": "pt"})
    if member.processor is not None:
        member.processor().save_pretrained(directory / "target")
    text = model.config.get_text_config()
    overrides = dict(member.draft)
    nested = {"target_layer_ids": list(FEATURES), **overrides.pop("dflash_config", {})}
    config = draft_config(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_target_layers=text.num_hidden_layers,
        block_size=BLOCK,
        dflash_config=nested,
        **overrides,
    )
    return directory / "target", write_checkpoint(directory / "draft", config, draft_tensors(config))


def directory_of(name: str) -> Path:
    """Where checkpoints of this name lie, which is removed when the test run ends."""
    return Path(_directory().name) / name.replace(" ", "_")


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zoo")


def reference(name: str) -> Any:
    """The member's target as transformers reads it from its checkpoint."""
    import transformers

    model_class = getattr(transformers, ZOO[name].model_class)
    return model_class.from_pretrained(pair(name)[0], dtype=torch.float32, attn_implementation="eager").eval()


def _random_model(member: Member) -> Any:
    """Seeded weights: matrices that keep the scale of their input, the rest near what the class starts with."""
    import transformers

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # of the class's own start
    model = getattr(transformers, member.model_class)(member.config()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
        member.finish(model)
    return model
