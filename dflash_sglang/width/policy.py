"""WidthPolicy: what the worker asks for the width of the next step, and tells of those that came back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_sglang.settings.width import PLAIN, WidthConfig
from dflash_sglang.width.acceptance import Acceptance
from dflash_sglang.width.choice import Choice, Chooser
from dflash_sglang.width.group import Group
from dflash_sglang.width.interruptions import Interruptions
from dflash_sglang.width.metrics import WidthMetrics
from dflash_sglang.width.ragged import Offers, RaggedSteps
from dflash_sglang.width.step_times import StepTimes, StepTimesError

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 8  # steps that were chosen and not verified; overlap scheduling has at most two


@dataclass(frozen=True)
class Decision:
    """Width of one step. `probe`: tried for this step alone; `reason` as in `choice.Choice`.

    `verify_budget`: tokens that are verified of all requests together, one of the budgets; None: `width` of each.
    """

    step: int
    width: int
    probe: bool
    reason: str
    verify_budget: int | None = None


@dataclass(frozen=True)
class _InFlight:
    step: int
    slots: np.ndarray
    width: int
    bucket: int
    context_tokens: float
    expected_seconds: float
    in_part: bool  # blocks are verified
    part: float  # of the time in which the width of every request would be verified


@dataclass(frozen=True)
class _Load:
    """What all ranks of the group ask of a step; `steps_needed` [widths] of all requests together."""

    requests: float
    batch: int
    context_tokens: float
    limit: int
    floor: int
    unknown: float
    steps_needed: list[float]


class WidthPolicy:
    """One width for every step of the whole batch.

    At start-up: `step_times.record` for every cell of `startup_cells`, then `start`. Serving: `prefill` for every
    prefill of any rank, `admit` when a request is prefilled, `choose` before each decode step, `verified` when its
    result is on the host, in the order of the steps. Overlap scheduling chooses a step or two ahead of what it was
    told; a result that comes back after its request's slot was given away is dropped.

    Records of steps in flight decide nothing but estimates. A result that fits no record, or a record that gets no
    result, is left out of the estimates, counted in `metrics.left_out`, and logged the first time.

    All ranks of a group that must choose alike make the same calls in the same order; only `seconds` may differ
    (`group.Group`). Nothing here reads a clock or draws.
    """

    def __init__(
        self,
        config: WidthConfig,
        block: int,
        buckets: Sequence[int],
        max_requests: int,
        group: Group | None = None,
        slots: int | None = None,
        budgets: Sequence[int] | None = None,
    ):
        """`block`: verify width of the served block; `buckets`: captured batch sizes, the largest at least
        `max_requests`, which run at once on this rank; requests are named by slots in [0, `slots`), by default
        [0, `max_requests`].

        `budgets`, ascending: how many tokens a step may verify together. With them each request has as many as
        the draft's probabilities say, up to the width, at which all are drafted; without, the width of each."""
        if buckets[-1] < max_requests:
            raise StepTimesError(
                f"buckets end at {buckets[-1]}: expected at least max_requests={max_requests}. Add the batch "
                "sizes that run without a graph."
            )
        self.config = config
        self.widths = config.states(block)
        self.step_times = StepTimes(buckets, self.widths)
        self.acceptance = Acceptance(
            self.widths,
            max_requests + 1 if slots is None else slots,
            config.prior_acceptance,
            config.prior_strength,
            config.memory,
        )
        # Of a rank alone nothing may decide where no rank has told its load: this is equal on all of them.
        usual = self.acceptance.steps_needed_by_a_new_request()
        self._no_load = _Load(1.0, 0, 0.0, self.widths[-1], PLAIN, 0.0, usual)
        self.metrics = WidthMetrics(self.widths)
        self._chooser = Chooser(self.widths, config.margin, config.probe_budget)
        self._interruptions = Interruptions()
        self._group = group or Group()
        self.ragged: RaggedSteps | None = None
        if budgets is not None:
            self.ragged = RaggedSteps(
                self.step_times, self.acceptance, budgets, max_requests, self._group, config.prior_acceptance
            )
        self._step = 0
        self._in_flight: deque[_InFlight] = deque()
        self._chosen: dict[int, _InFlight] = {}
        self._unshared: list[tuple[int, float]] = []  # step, seconds

    def start(self) -> None:
        """Ends start-up: builds the table of step times, rank 0's for every rank."""
        if self.config.fixed is not None:
            return
        self.step_times.fit()
        if self._group.share_times is not None:
            self.step_times.load(self._group.share_times(self.step_times.table()))

    def admit(
        self, slots: np.ndarray, max_widths: Sequence[int] | None = None, min_widths: Sequence[int] | None = None
    ) -> None:
        """New requests in these slots [n], with the `max_width` and the `min_width` of each."""
        self.acceptance.admit(slots, self._step, max_widths, min_widths)

    def prefill(self) -> None:
        """The next decode step comes after a prefill, of this rank's requests or of another's."""
        self._interruptions.prefill()

    def choose(self, slots: np.ndarray, context_tokens: int, needs_full_blocks: bool = False) -> Decision:
        """The width of the next step for the requests in `slots` [n] (none: another rank has requests), whose
        contexts have `context_tokens` together; `needs_full_blocks`: it has to be that of every request. With
        `MOST_IN_FLIGHT` steps in flight the oldest one is lost (`lose`)."""
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            self.lose(f"{MOST_IN_FLIGHT} steps were chosen and none verified")
        slots = np.array(slots, np.intp)
        bucket, context, expected_seconds, part = 0, 0.0, 0.0, 1.0
        tokens = None
        if self.config.fixed is not None:
            choice = Choice(0, 0, "hold" if self._step else "start")
        else:
            load = self._load(slots, context_tokens)
            self._share_times()
            bucket, context = self.step_times.bucket(max(load.batch, 1)), load.context_tokens
            seconds = self.step_times.seconds(bucket, context)
            if self.ragged is None or not len(slots):
                offers = Offers(load.steps_needed, seconds, load.steps_needed[-1])
            else:
                offers = self.ragged.offers(
                    slots, bucket, seconds, needs_full_blocks or load.floor > PLAIN, self._interruption_seconds
                )
            choice = self._choose(load, bucket, seconds[-1], offers)
            expected_seconds = offers.seconds[choice.width]
            part = expected_seconds / seconds[choice.width]
            if self.ragged is not None and offers.shares is not None:
                tokens, verified = offers.shares[choice.width]
                if not choice.probe:
                    self.ragged.hold(choice.width, verified)
                    whole = seconds[choice.width]
                    if tokens is not None and self.ragged.times.compares(expected_seconds, whole):
                        tokens, expected_seconds, part = None, whole, 1.0
        step, self._step = self._step, self._step + 1
        chosen = _InFlight(step, slots, choice.width, bucket, context, expected_seconds, tokens is not None, part)
        self._in_flight.append(chosen)
        if self.config.fixed is None and self._group.share_times is not None:
            self._chosen[step] = chosen
        self.metrics.steps[choice.width] += 1
        whole = len(slots) * self.widths[choice.width]
        self.metrics.tokens[choice.width] += whole if tokens is None else tokens
        self.metrics.probes[choice.width] += choice.probe
        if choice.reason not in ("hold", "probe"):
            self.metrics.changes += choice.reason != "start"
            self.metrics.last_change = choice.reason
        return Decision(step, self.widths[choice.width], choice.probe, choice.reason, tokens)

    def verified(
        self,
        accepted: Sequence[int] | np.ndarray,
        seconds: float | None = None,
        logprobs: np.ndarray | None = None,
        lens: np.ndarray | None = None,
    ) -> None:
        """The oldest step that is in flight came back: `accepted` [n] proposals, and how long it took. logprobs
        [n, steps], of what was drafted, where the draft gives them; lens [n]: verified tokens, or all.

        `seconds`: from the end of the step before to the end of this one, so that the host's share counts; None
        where something else ran in between (a prefill). A result is dropped if no step is in flight, and so are
        result and step if [n] is not that step's.
        """
        if not self._in_flight:
            self.stray(len(accepted))
            return
        done = self._in_flight[0]
        if len(accepted) != len(done.slots):
            self.lose(f"{len(accepted)} results for step {done.step} of {len(done.slots)} requests")
            return
        self._in_flight.popleft()
        self.metrics.seconds[done.width] += done.expected_seconds if seconds is None else seconds
        if self.config.fixed is not None:
            return
        self.acceptance.observe(done.step, done.slots, done.width, np.asarray(accepted, np.int64), lens)
        if self.ragged is not None and logprobs is not None:
            self.ragged.confidence.observe(logprobs, np.asarray(accepted, np.int64), lens)
        if self._group.share_times is not None:
            if seconds is not None:
                self._unshared.append((done.step, seconds))
        elif seconds is not None:
            self._observe(done, seconds)

    def lose(self, why: str) -> None:
        """The oldest step in flight gets no result that can be used."""
        if self._in_flight:
            self._in_flight.popleft()
        self._leave_out(why)

    def stray(self, requests: int) -> None:
        """A result of so many requests came back that no step in flight waits for."""
        self._leave_out(f"a result of {requests} requests that no step waits for")

    def _leave_out(self, why: str) -> None:
        self.metrics.left_out += 1
        if self.metrics.left_out == 1:
            logger.warning(
                "dflash_sglang verify width: %s: expected one result for each step. The estimates leave it out; "
                "steps go on, perhaps at a width that is not the fastest. Later ones are counted in "
                "/server_info as left_out and not logged.",
                why,
            )

    def _observe(self, done: _InFlight, seconds: float) -> None:
        error = self.step_times.observe(done.bucket, done.width, done.context_tokens, seconds / done.part)
        if self.ragged is not None:
            self.ragged.times.compare(done.in_part, error)

    def _load(self, slots: np.ndarray, context_tokens: float) -> _Load:
        """Of the whole group, one step late if its exchange is."""
        batch, limit, floor = len(slots), self.acceptance.cap(slots), self.acceptance.floor(slots)
        unknown = self.acceptance.unknown(slots) if self._chooser.plain else 0.0
        needed = []  # elsewhere found with the shares
        if self.ragged is None:
            needed = self.acceptance.steps_needed(slots, self._chooser.held)
        load = _Load(float(batch), batch, float(context_tokens), limit, floor, unknown, needed)
        if self._group.gather_loads is not None:
            row = np.array([batch, context_tokens, limit if batch else PLAIN, floor, unknown, *needed], np.float64)
            rows = self._group.gather_loads(row)
            # Ranks pad to the largest batch among them, and wait for the one with the longest contexts.
            most, total = rows.max(axis=0).tolist(), rows.sum(axis=0).tolist()
            load = _Load(total[0], int(most[0]), most[1], int(most[2]), int(most[3]), total[4], total[5:])
        return load if load.batch else self._no_load

    def _choose(self, load: _Load, bucket: int, whole_block: float, offers: Offers) -> Choice:
        # In the long run: tokens over the steps that they need. A plain step commits one: the first says how many.
        tokens = offers.steps_needed[0]
        committed = [load.requests * tokens / needed for needed in offers.steps_needed]
        whole = load.requests * tokens / offers.whole
        once = self._once()
        *seconds, whole_block = self._interruptions.added(
            [*offers.seconds, whole_block], [*committed, whole], once
        )
        choice = self._chooser.choose(
            bucket, load.limit, committed, seconds, load.unknown / load.requests, load.floor
        )
        if load is not self._no_load:
            self._interruptions.step(committed[choice.width])
        rate = committed[choice.width] / seconds[choice.width]
        self.metrics.gain_over_plain = rate * seconds[0] / committed[0]
        self.metrics.gain_over_full = rate * whole_block / whole
        return choice

    def _once(self) -> float:
        """Seconds of a prefill besides those of its tokens: of a pass over the target's weights, which is what a
        plain step of one request without context is."""
        return self.step_times.of_width(0, 0, 0.0)

    def _interruption_seconds(self, committed: np.ndarray) -> np.ndarray:
        """What prefills add to steps that commit so many tokens, of any shape."""
        return self._once() * self._interruptions.share(committed)

    def _share_times(self) -> None:
        """Every `exchange_every` choices, what rank 0 measured since corrects the table of every rank."""
        if self._group.share_times is None or self._step % self.config.exchange_every or not self._step:
            return
        row = np.full((self.config.exchange_every + MOST_IN_FLIGHT, 2), np.nan)
        row[: len(self._unshared)] = np.array(self._unshared).reshape(-1, 2)
        # By their numbers: ranks of data-parallel attention do not get their results at the same time.
        for step, seconds in self._group.share_times(row.ravel()).reshape(-1, 2).tolist():
            if step in self._chosen:
                self._observe(self._chosen[step], seconds)
        self._unshared.clear()
        still_open = range(self._step - MOST_IN_FLIGHT, self._step)  # on one rank or another
        self._chosen = {step: self._chosen[step] for step in still_open if step in self._chosen}
