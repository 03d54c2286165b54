"""Where the time of a step goes: draft, verify, and what lies between two steps. One step in many is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_sglang.verify.step_clock import StepClock

EVERY = 64  # steps, of which one is timed
LONGEST_REST = 1.0  # seconds between two steps; a longer one is a pause of the server, and not counted


class StepSplit:
    """Three marks in a timed step, which are read when the next one is timed: nothing waits for the device.

    draft: block, draft forward and proposals. verify: target forward, accept and context KV. rest: from the end of
    the step before to the start of this one, where the device waits for the host. A step after a prefill is not
    timed.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._left = 0  # steps until one is timed
        self._marks: list[Any] = []  # end of the step before, start, after the draft, end
        self.timed = 0  # steps
        self.seconds = {"draft": 0.0, "verify": 0.0, "rest": 0.0}  # of the timed steps together

    def begin(self, last_end: Any) -> None:
        """A decode step starts. last_end: mark of the step before, None if anything else ran in between."""
        self._left -= 1
        if self._left < 0 and last_end is not None:
            self._read()
            self._left = EVERY - 1
            self._marks = [last_end, self._clock.mark()]

    def drafted(self) -> None:
        """The step's proposals are launched."""
        if len(self._marks) == 2:
            self._marks.append(self._clock.mark())

    def end(self, mark: Any) -> None:
        """The step is launched, up to this mark."""
        if len(self._marks) == 3:
            self._marks.append(mark)

    def _read(self) -> None:
        if len(self._marks) == 4:
            pairs = zip(self._marks, self._marks[1:], strict=False)
            rest, draft, verify = (self._clock.seconds(start, end) for start, end in pairs)
            if rest <= LONGEST_REST:
                for part, seconds in (("draft", draft), ("verify", verify), ("rest", rest)):
                    self.seconds[part] += seconds
                self.timed += 1
        self._marks = []
