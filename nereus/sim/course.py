"""Which slots are there, and when do they come, go and fail?

Owner of the pool of a simulated run, and of what happens to it: supply and failures of the trace, failures at random.
What that means for what runs is the world's affair (``Yard``). Used by the asynchronous world (``simulation.py``) and
the synchronous one (``synchronous.py``). Invariants (tests/sim/test_course.py): equal seeds let equal slots fail at
equal times; the pool is never larger than the cluster; slots go from the highest number down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from msgspec import Struct

from nereus.core.plan import SlotId
from nereus.sim.noise import Noise
from nereus.sim.trace import StepLengths, Trace

NOTICE_S = 120.0
"""Of a slot that is taken back: what providers of spot machines commonly give."""


class Failures(Struct, frozen=True):
    """Slots that die at random, besides those of the trace."""

    mtbf_s: float = 0.0
    """Mean time between failures of the whole pool; 0: none."""
    hang_share: float = 0.1
    """Of these that fall silent in the place of ending."""


class Yard(Protocol):
    """What a course of events happens to."""

    def add(self, slots: Sequence[SlotId]) -> None:
        """Start slots that have come."""

    def take_back(self, slots: Sequence[SlotId], notice_s: float) -> Coroutine[Any, Any, None]:
        """Give notice of ``notice_s`` seconds (infinite: until they are left), then end what is left on ``slots``."""

    def running(self) -> Sequence[SlotId]:
        """Return the slots that are there and could fail, in order."""

    def fail(self, kind: str, slot: SlotId) -> None:
        """Let ``slot`` die (``kill``), fall silent (``hang``) or be gone for good (``reclaim``)."""


class Course:
    """The pool of one run and its events."""

    def __init__(self, trace: Trace, size: int, noise: Noise, failures: Failures, yard: Yard) -> None:
        """``size`` is the cluster's."""
        self._trace = trace
        self._size = size
        self._noise = noise
        self._failures = failures
        self._yard = yard
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.present = set(range(min(trace.slots_at(0, 0.0) or size, size)))
        """Slots that the job has, started or not."""

    def begin(self) -> None:
        """Let time bring what it brings from now on."""
        for supply in self._trace.supply:
            if supply.at_s > 0:
                self._loop.call_at(supply.at_s, self.supply, supply.slots, NOTICE_S)
        for failure in self._trace.failures:
            self._loop.call_at(failure.at_s, self.fail, failure.kind, failure.slot)
        if self._failures.mtbf_s:
            self._spawn(self._keep_failing())

    def end(self) -> None:
        """Let nothing more happen."""
        for task in self._tasks:
            task.cancel()

    def stepped(self, steps: int) -> None:
        """Note that so many steps are done: some traces change the pool with steps."""
        for supply in self._trace.step_supply:
            if supply.at_step == steps and steps:
                self.supply(supply.slots, math.inf)

    def supply(self, slots: int, notice_s: float) -> None:
        """Let there be ``slots`` slots; those that are taken back go when the plan has left them, or after a notice."""
        wanted = min(slots, self._size)
        if len(self.present) > wanted:
            gone = sorted(self.present)[wanted:]
            self.present.difference_update(gone)
            self._spawn(self._yard.take_back(gone, notice_s))
        else:
            absent = [slot for slot in range(self._size) if slot not in self.present]
            come = absent[: wanted - len(self.present)]
            self.present.update(come)
            self._yard.add(come)

    def fail(self, kind: str, slot: SlotId | None) -> None:
        """Let a slot fail; None: any of those that are there."""
        there = self._yard.running()
        if not there or (slot is not None and slot not in there):
            return
        victim = slot if slot is not None else self._noise.stream("victim", self._loop.time()).choice(there)
        if kind == "reclaim":
            self.present.discard(victim)
        self._yard.fail(kind, victim)

    async def _keep_failing(self) -> None:
        source = self._noise.stream("failures")
        while True:
            await asyncio.sleep(source.expovariate(1.0 / self._failures.mtbf_s))
            self.fail("hang" if source.random() < self._failures.hang_share else "kill", None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def usual_lengths(longest: int) -> StepLengths:
    """Return lengths for a trace that says nothing of them: half the longest in the mean."""
    return StepLengths(longest / 2, longest * 0.8)
