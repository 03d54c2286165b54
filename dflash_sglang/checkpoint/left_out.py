"""Fields that a draft's config.json has to have and leaves out: what flags give of them, and one error of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, shown

BLOCK_FLAG = "--speculative-dflash-block-size"
BLOCK_FLAGS = (BLOCK_FLAG, "--speculative-num-draft-tokens")
LAYER_INPUTS = "eagle_aux_hidden_state_layer_ids"
"""The target's layers by the number of layers before their output: one more than in `target_layer_ids`."""
VLLM_PLACES = ("dflash_config", "eagle_config", None)  # where vLLM looks; None is the top level

_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


class Flags(NamedTuple):
    """What a launch says of fields that a config.json may leave out; None: nothing. The config wins."""

    block_size: int | None = None  # tokens of a block
    window: int | None = None  # of sliding layers

    @classmethod
    def of(cls, settings: Any) -> Flags:
        """settings: SGLang's server arguments, or its resolved settings of speculation."""
        block = settings.speculative_dflash_block_size
        return cls(
            settings.speculative_num_draft_tokens if block is None else block,
            settings.speculative_draft_window_size,
        )

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Flags:
        """words: of a command line, such as `--speculative-dflash-block-size 16`; no numbers count as unset."""
        pairs = " ".join(words).replace("=", " ").split()
        given = {flag: int(value) for flag, value in zip(pairs, pairs[1:], strict=False) if value.isdecimal()}
        blocks = (given[flag] for flag in BLOCK_FLAGS if flag in given)
        return cls(next(blocks, None), given.get("--speculative-draft-window-size"))


NO_FLAGS = Flags()


def refuse_left_out(
    fields: Fields, flags: Flags, layer_ids: str, of_family: Sequence[str], readers: Sequence[Callable[[], object]]
) -> None:
    """Raise one DraftConfigError of all fields that are absent, and that neither flags nor a default give.

    layer_ids: how the checkpoint's format names the target's layers. of_family: names that only the draft's family
    has. readers: of parts of the config that know themselves what they need; they raise of null.
    """
    errors = [*_absent(fields, flags, layer_ids, of_family)]
    for read in readers:
        try:
            read()
        except DraftConfigError as error:
            if error.value is None and error.field not in [known.field for known in errors]:
                errors.append(error)
    if errors:
        first, *others = errors
        raise DraftConfigError(first.field, None, first.expected, first.fix, others)


def _absent(fields: Fields, flags: Flags, layer_ids: str, of_family: Sequence[str]) -> Iterator[DraftConfigError]:
    for name in _SHAPE:
        if fields.text.get(name) is None:
            fix = f"Add {name} to the draft's config.json."
            yield DraftConfigError(name, None, "the field to be present", fix)
    nested = "" if layer_ids != "target_layer_ids" else "dflash_config."
    if flags.block_size is None and fields.draft("block_size")[1] is None:
        fix = f"Set {BLOCK_FLAG} to the tokens of a block, or add {nested}block_size to the draft's config.json."
        yield DraftConfigError("block_size", None, "the trained block length", fix)
    if fields.draft("target_layer_ids")[1] is None:
        yield _no_layer_ids(fields, layer_ids, nested)
    if fields.draft("mask_token_id")[1] is None:
        fix = f"Add {nested}mask_token_id (the one it was trained with) to the draft's config.json."
        yield DraftConfigError("mask_token_id", None, "the id that stands for a position to be proposed", fix)
    for name in of_family:
        if fields.draft(name)[1] is None:
            fix = f"Add {nested}{name} (the one it was trained with) to the draft's config.json."
            yield DraftConfigError(name, None, "the field to be present in a draft of this family", fix)


def _no_layer_ids(fields: Fields, layer_ids: str, nested: str) -> DraftConfigError:
    for place in VLLM_PLACES:
        inputs = (fields.top if place is None else fields.mapping(place)).get(LAYER_INPUTS)
        if inputs is not None:
            path = LAYER_INPUTS if place is None else f"{place}.{LAYER_INPUTS}"
            fix = f"Write the numbers of {path} less 1 into {nested}{layer_ids} of the draft's config.json."
            return DraftConfigError(layer_ids, None, f"the target's layers beside {path}={shown(inputs)}", fix)
    expected = "the layers of the target that the draft was trained on, in the order of fc's columns"
    fix = f"Add {nested}{layer_ids} (its model card or training config has them) to the draft's config.json."
    return DraftConfigError(layer_ids, None, expected, fix)
