"""What answers in the target's place: forced accept lengths, as `verify.acceptance.Answers` asks for them."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_sglang.bench.forced.record import AcceptanceRecord, tokens_of_texts
from dflash_sglang.settings.plugin_config import FORCED_ENV
from dflash_sglang.settings.schema import PluginConfigError
from dflash_sglang.sglang_names.scheduler import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    ScheduleBatch,
    async_h2d,
)

if TYPE_CHECKING:
    from dflash_sglang.drafting.block import Block
    from dflash_sglang.drafting.proposals import Proposals
    from dflash_sglang.kernels.block.accept import Paths, Verification

TOKEN_ID = 100  # what is committed, as SGLang's workers do in their token mode "fixed"
_GOLDEN = (5**0.5 - 1) / 2  # its multiples spread evenly over 0 to 1


class Profiles:
    """Lengths by a coin of each request: it accepts proposals as long as the coin is below their survival."""

    trees = False

    def __init__(self, survival: Sequence[Sequence[float]], rows: int, device: str, alike: bool = False) -> None:
        """survival: P(proposals 1 to i are accepted), i = 1, 2, ..., of a block; a request has the list of its row
        of req_to_token, modulo their number. alike: one coin for all requests of a step."""
        row = torch.arange(rows)
        self.offsets = (torch.zeros(rows) if alike else (row * _GOLDEN) % 1).to(device)  # of each row's coin
        of_row = torch.tensor(survival, dtype=torch.float32)[row % len(survival)]
        self.survival = torch.nn.functional.pad(of_row, (1, 0), value=2.0).to(device)  # [rows, block], of tokens
        chances = of_row.clamp(min=1e-9).log()
        self._logprobs = chances.diff(dim=1, prepend=torch.zeros(rows, 1)).to(device)
        self._coin, self._coins = torch.zeros(1, device=device), random.Random(0)  # on all ranks the same

    def foretell(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Toss the coin of a step, whose proposals have the probabilities of the lists."""
        self._coin.fill_(self._coins.random())
        if proposals.logprobs is None:
            return proposals
        return proposals._replace(logprobs=self._logprobs[block.requests, : block.size - 1])

    def answered(self, blocks: Verification, paths: Paths | None) -> Verification:
        """Blocks [bs, block] that agree as far as the coin says; ragged ones too."""
        coins = (self.offsets[blocks.requests] + self._coin) % 1
        wrong = coins[:, None] >= self.survival[blocks.requests, : _width(blocks)]
        beyond = _width(blocks) - wrong.shape[1]  # rows of a copy's chain
        return _dense(blocks, wrong if beyond <= 0 else torch.nn.functional.pad(wrong, (0, beyond), value=True))


class Recorded:
    """Lengths that were recorded, at every token of texts that follow one another in a circle.

    A request begins somewhere and reads on as it commits. So its steps begin where those of real decoding do,
    whatever they verify: mostly after a token that was hard to foretell. A tree's nodes have tokens that stand for
    their positions and ranks.
    """

    trees = True

    def __init__(self, record: AcceptanceRecord, block_size: int, rows: int, device: str) -> None:
        steps = block_size - 1
        self.accepted = torch.from_numpy(record.accepted).to(device)
        self._logprobs = torch.from_numpy(record.logprobs[:, :steps].astype("float32")).to(device)
        self._ranks = torch.from_numpy(record.ranks[:, :steps].astype("int64")).to(device)
        self._owners: dict[int, str] = {}  # of rows of req_to_token: their requests
        self._begun = 0  # requests
        spread = (torch.arange(rows) * _GOLDEN) % 1 * len(record.ranks)
        self.offsets = spread.long().to(device)  # of rows: the place less committed tokens

    def foretell(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Proposals with the recorded probabilities, and the recorded tokens for trees."""
        self._follow(batch)
        if proposals.logprobs is None:
            return proposals
        logprobs, best = self._logprobs[self.places(block.requests, block.prefix_lens)], proposals.best
        if best is not None:
            ids = torch.arange(logprobs[0].numel(), device=logprobs.device).repeat(len(logprobs), 1)
            best = best._replace(ids=ids.view(logprobs.shape), logprobs=logprobs)
        return proposals._replace(logprobs=logprobs[:, : block.size - 1, 0].contiguous(), best=best)

    def answered(self, blocks: Verification, paths: Paths | None) -> Verification:
        """Blocks [bs, block] that agree as far as was recorded, ragged ones too; or true children of nodes."""
        places = self.places(blocks.requests, blocks.prefix_lens)
        if paths is None:
            lane = torch.arange(_width(blocks), device=places.device)
            return _dense(blocks, lane > self.accepted[places][:, None])
        steps, count = self._logprobs.shape[1:]
        depths = paths.tree.depths.long().clamp(max=steps - 1)
        return blocks._replace(target_ids=depths * count + self._ranks[places].gather(1, depths))

    def places(self, requests: Tensor, prefix_lens: Tensor) -> Tensor:
        """[bs] of the last committed tokens, for the next step of requests [bs]."""
        return (self.offsets[requests.long()] + prefix_lens.long()) % len(self.accepted)

    def _follow(self, batch: ScheduleBatch) -> None:
        """Rows of req_to_token get the places of their new requests."""
        rows = batch.req_pool_indices_cpu.tolist()
        new = {row: req for row, req in zip(rows, batch.reqs, strict=True) if self._owners.get(row) != req.rid}
        if new:
            self._owners.update((row, req.rid) for row, req in new.items())
            places = [list(new), [self._begin(req.origin_input_ids) for req in new.values()]]
            on_device, begun = async_h2d(places, dtype=torch.int64, device=self.offsets.device)
            self.offsets[on_device] = begun

    def _begin(self, prompt: Sequence[int]) -> int:
        """The place that a new request has less its tokens. On all ranks the same."""
        self._begun += 1
        return int(self._begun * _GOLDEN % 1 * len(self.accepted))


class Texts(Recorded):
    """What the target commits is a text, what the draft proposes of it is recorded, copies match for real.

    The first token of a prompt is the number of its text, modulo their number; the prompt is the beginning of this
    text, and the answer its continuation. The first token of an answer is the target's own.
    """

    trees = False

    def __init__(self, record: AcceptanceRecord, tokens: Tensor, block_size: int, rows: int, device: str) -> None:
        """tokens [starts]: the token of each start."""
        super().__init__(record, block_size, rows, device)
        self.tokens = tokens.to(device, torch.int64)
        self._firsts = [0, *(1 + torch.from_numpy(record.prompts).int().diff().nonzero().flatten()).tolist()]

    def foretell(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Write over the tokens what the recorded draft proposes: the text as far as it was accepted, then other
        tokens."""
        proposals = super().foretell(batch, block, proposals)
        places = self.places(block.requests, block.prefix_lens)
        after = torch.arange(1, block.size, device=places.device)
        text = self._text(places[:, None] + after)
        right = after <= self.accepted[places][:, None]
        proposals.tokens[:, 1:] = torch.where(right, text, torch.where(text == 0, 1, text - 1))
        return proposals

    def answered(self, blocks: Verification, paths: Paths | None) -> Verification:
        """Blocks [bs, block] whose rows are answered with the text."""
        places, width = self.places(blocks.requests, blocks.prefix_lens), _width(blocks)
        tokens = blocks.tokens if blocks.ragged is None else blocks.ragged.dense(blocks.tokens, width)
        text = self._text(places[:, None] + 1 + torch.arange(width, device=places.device))
        return _in_blocks(blocks, tokens, text)

    def _text(self, places: Tensor) -> Tensor:
        return self.tokens[places % len(self.tokens)]

    def _begin(self, prompt: Sequence[int]) -> int:
        return self._firsts[prompt[0] % len(self._firsts)]


def from_environment(block_size: int, rows: int, device: str) -> Profiles | Recorded:
    """What SGLANG_SIMULATE_ACC_LEN or DFLASH_SGLANG_FORCED forces in this process. rows: of req_to_token, or more.

    SGLang's variable gives all requests of a step one length, as its workers do. Raises PluginConfigError for a
    value that cannot be forced, and for both variables at once.
    """
    source = os.environ.get(FORCED_ENV)
    if source is None:
        return _of_mean(block_size - 1, rows, device)
    if SIMULATE_ACC_LEN > 0:
        raise PluginConfigError(
            f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN}: expected unset beside {FORCED_ENV}={source}."
        )
    return forced_by(source, block_size, rows, device)


def forced_by(source: str, block_size: int, rows: int, device: str) -> Profiles | Recorded:
    """A value of DFLASH_SGLANG_FORCED, JSON: a list of the chance of proposal 1, 2, ... once those before it are
    accepted; several such lists; {"record": PATH} or {"texts": PATH}, files that `bench.record` and
    `bench.copies` write. Raises PluginConfigError for another value.
    """
    try:
        value = json.loads(source)
    except json.JSONDecodeError as error:
        raise PluginConfigError(f"{FORCED_ENV}={source}: expected JSON, found {error}.") from error
    match value:
        case {"record": str(path), **rest} if not rest:
            return Recorded(AcceptanceRecord.load(Path(path), block_size), block_size, rows, device)
        case {"texts": str(path), **rest} if not rest:
            record = AcceptanceRecord.load(Path(path), block_size)
            tokens = torch.from_numpy(tokens_of_texts(Path(path), record))
            return Texts(record, tokens, block_size, rows, device)
    profiles = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(map(_is_profile, profiles)):
        raise PluginConfigError(
            f"{FORCED_ENV}={source}: expected a list of probabilities, 0 to 1, one for each proposal of a block, "
            'a list of such lists, {"record": PATH} or {"texts": PATH}.'
        )
    steps = block_size - 1
    if min(map(len, profiles)) < steps:
        raise PluginConfigError(
            f"{FORCED_ENV}={source}: expected at least {steps} probabilities, one for each proposal of a block of "
            f"{block_size}."
        )
    return Profiles([list(itertools.accumulate(one[:steps], operator.mul)) for one in profiles], rows, device)


def _is_profile(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(type(one) in (int, float) and 0 <= one <= 1 for one in value)
        and value != []
    )


def _of_mean(proposals: int, rows: int, device: str) -> Profiles:
    """Of the lengths that SGLang's method draws."""
    if SIMULATE_ACC_TOKEN_MODE != "fixed":
        raise PluginConfigError(f"SGLANG_SIMULATE_ACC_TOKEN_MODE={SIMULATE_ACC_TOKEN_MODE!r}: expected 'fixed'.")
    counts = range(1, proposals + 1)  # committed without the proposal in question
    if SIMULATE_ACC_METHOD == "multinomial":  # a normal distribution of deviation 1, rounded
        survival = [0.5 * math.erfc((count + 0.5 - SIMULATE_ACC_LEN) / math.sqrt(2)) for count in counts]
    elif SIMULATE_ACC_METHOD == "match-expected":
        mean = min(max(SIMULATE_ACC_LEN, 1.0), proposals + 1.0)
        survival = [min(max(mean - count, 0.0), 1.0) for count in counts]
    else:
        raise PluginConfigError(
            f"SGLANG_SIMULATE_ACC_METHOD={SIMULATE_ACC_METHOD!r}: expected 'multinomial' or 'match-expected'. "
            "Correct it."
        )
    return Profiles([survival], rows, device, alike=True)


def _width(blocks: Verification) -> int:
    """Rows of a block among the outcomes."""
    return blocks.tokens.shape[1] if blocks.ragged is None else blocks.ragged.block


def _dense(blocks: Verification, wrong: Tensor) -> Verification:
    """The same blocks of TOKEN_ID; wrong [bs, block] bool: tokens that the row before does not answer with."""
    tokens = wrong + TOKEN_ID
    return _in_blocks(blocks, tokens, torch.full_like(tokens, TOKEN_ID))


def _in_blocks(blocks: Verification, tokens: Tensor, target_ids: Tensor) -> Verification:
    """The same with these tokens and answers [bs, block]; a ragged step takes as many first rows as before."""
    ragged = blocks.ragged
    if ragged is not None:
        bs, width = tokens.shape
        starts = torch.arange(0, bs * width + 1, width, dtype=torch.int32, device=tokens.device)
        ragged, tokens, target_ids = ragged._replace(starts=starts), tokens.flatten(), target_ids.flatten()
    return blocks._replace(tokens=tokens, target_ids=target_ids, ragged=ragged)
