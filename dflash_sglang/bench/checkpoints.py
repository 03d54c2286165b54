"""The pair that is served: given directories, random weights of given shapes, or the pair of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.checkpoint import DraftConfigError, DraftSpec, read_config
from dflash_sglang.checkpoint.families import check_family, foreign, mixed_up
from dflash_sglang.checkpoint.fields import described, shown
from dflash_sglang.checkpoint.files import config_directory
from dflash_sglang.checkpoint.left_out import NO_FLAGS, Flags
from dflash_sglang.pair.target import NoTarget, pair_directories


@dataclass(frozen=True)
class Pair:
    """Facts of the two checkpoints. ``context``: the target's longest context, or None where it names none."""

    target: str
    draft: str
    spec: DraftSpec
    target_layers: int | None
    context: int | None
    vocabulary: int
    target_bytes: int  # of the weight files on this machine
    draft_bytes: int


def find(
    target: str | None, draft: str | None, shapes: str | None, layers: int | None, out: Path,
    say: Callable[[str], None], flags: Flags = NO_FLAGS,
) -> Pair:  # fmt: skip
    """The pair that the options name. flags: of the launch with DFLASH. Raises BadSetting."""
    if shapes is not None:
        if target or draft:
            raise BadSetting(f"--shapes {shapes}: takes the place of --target and --draft; leave one of them out")
        return facts(**random_weights(shapes, layers, out, say), flags=NO_FLAGS)
    if layers is not None:
        raise BadSetting(f"--layers {layers}: says how many layers the target of --shapes has; give --shapes")
    if bool(target) != bool(draft):
        given, missing = ("--target", "--draft") if target else ("--draft", "--target")
        raise BadSetting(f"{given} {target or draft}: a target and its draft belong together; give {missing} too")
    if target and draft:
        return facts(target, draft, flags=flags)
    try:
        return facts(**pair_directories(), flags=NO_FLAGS)
    except NoTarget as error:
        raise BadSetting(f"the packaged pair: {error}") from error


def random_weights(shapes: str, layers: int | None, out: Path, say: Callable[[str], None]) -> dict[str, str]:
    """Directories of random weights, written below `out` once and found there by the next run."""
    from dflash_sglang.bench.random_pair import SHAPES, write_pair

    if shapes not in SHAPES:
        raise BadSetting(f"--shapes {shapes}: expected one of {', '.join(SHAPES)}")
    directory = out / (f"random-{shapes}" if layers is None else f"random-{shapes}-{layers}")
    if not (directory / "draft" / "config.json").is_file():  # the last file to be written
        say(f"writing random weights in the shapes of {shapes} to {directory}")
        return write_pair(directory, shapes, layers)
    return {role: str(directory / role) for role in ("target", "draft")}


def facts(target: str, draft: str, *, flags: Flags = NO_FLAGS) -> Pair:
    """Raises BadSetting for a checkpoint that is not there, or a draft that another worker serves."""
    directory, config = _checkpoint("--target", target)
    draft_directory, draft_config = _checkpoint("--draft", draft)
    same = directory.resolve() == draft_directory.resolve()
    if (mistake := mixed_up(config, draft_config, same)) is not None:
        raise BadSetting(f"--target {target}: {mistake}")
    try:
        check_family(draft_config)
        reason = foreign(draft_config)
        if reason is not None:
            raise BadSetting(f"--draft {draft}: {reason}")
        spec = DraftSpec.from_config(draft_config, flags)
    except DraftConfigError as error:
        raise BadSetting(f"--draft {draft}: {error}") from error
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise BadSetting(_misread(target, "text_config", text, "an object"))
    fields = ("num_hidden_layers", "max_position_embeddings", "vocab_size")
    layers, context, vocabulary = (_count(target, text, field) for field in fields)
    sizes = [_weights(directory), _weights(draft_directory)]
    return Pair(target, draft, spec, layers, context, vocabulary or spec.vocab_size, *sizes)


def _count(target: str, text: Mapping[str, Any], field: str) -> int | None:
    """A field of the target's config that counts something; None where it is absent."""
    value = text.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadSetting(_misread(target, field, value, "an integer >= 1"))
    return value


def _misread(target: str, field: str, value: object, expected: str) -> str:
    return f"--target {target}: target config {field}={shown(value)}: expected {expected}. Correct it."


def check_template(target: str, option: str = "--chat") -> None:
    """Raise BadSetting where the target's tokenizer has no chat template, which the option needs."""
    from transformers import AutoTokenizer

    try:
        template = AutoTokenizer.from_pretrained(target).chat_template
    except (OSError, ValueError) as error:
        raise BadSetting(f"{option}: expected a tokenizer in {target}: {described(error)}") from error
    if template is None:
        raise BadSetting(
            f"{option}: expected a target with a chat template, and {target} has none. Leave out {option}, or put "
            "a chat_template.jinja beside its tokenizer."
        )


def why_no_built_in(pair: Pair, gpu: bool) -> str | None:
    """Why SGLang's own worker cannot serve the pair on this machine, or None."""
    if not gpu:
        return "without this package SGLang serves no DFLASH on a CPU"
    if pair.spec.speculators:
        return "it does not read drafts in the speculators format"
    if pair.target_layers and pair.target_layers - 1 in pair.spec.target_layer_ids:
        return "it cannot capture the output of the target's last layer, which the draft reads"
    return None


def _checkpoint(option: str, path: str) -> tuple[Path, dict[str, Any]]:
    """(directory, raw config.json)"""
    try:
        directory = config_directory(path, None)
        return directory, read_config(directory)
    except (OSError, ValueError) as error:
        raise BadSetting(f"{option} {path}: expected the directory of a checkpoint ({error})") from error


def _weights(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
