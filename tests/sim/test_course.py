"""The pool of a simulated run: what comes, goes and fails, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nereus.core.plan import SlotId
from nereus.sim.course import NOTICE_S, Course, Failures
from nereus.sim.loop import run_virtual
from nereus.sim.noise import Noise
from nereus.sim.trace import Failure, StepSupply, Supply, Trace


class Seen:
    """A yard that writes down what happens to it."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, tuple[SlotId, ...]]] = []

    def _note(self, what: str, slots: Sequence[SlotId]) -> None:
        self.events.append((asyncio.get_running_loop().time(), what, tuple(slots)))

    def add(self, slots: Sequence[SlotId]) -> None:
        self._note("add", slots)

    async def take_back(self, slots: Sequence[SlotId], notice_s: float) -> None:
        self._note(f"take back {notice_s:g}", slots)

    def running(self) -> Sequence[SlotId]:
        return range(4)

    def fail(self, kind: str, slot: SlotId) -> None:
        self._note(kind, (slot,))


def played(trace: Trace, *, seed: int = 0, mtbf_s: float = 0.0, steps: int = 0) -> tuple[Seen, set[SlotId]]:
    async def main() -> tuple[Seen, set[SlotId]]:
        seen = Seen()
        course = Course(trace, 8, Noise(seed), Failures(mtbf_s), seen)
        course.begin()
        for step in range(steps):
            course.stepped(step)
        await asyncio.sleep(1000.0)
        course.end()
        return seen, course.present

    return run_virtual(main())


def test_supply_by_time_comes_with_notice_and_never_exceeds_the_cluster() -> None:
    seen, present = played(Trace("t", "test", supply=(Supply(0.0, 6), Supply(10.0, 4), Supply(20.0, 99))))
    assert seen.events == [(10.0, f"take back {NOTICE_S:g}", (4, 5)), (20.0, "add", (4, 5, 6, 7))]
    assert present == set(range(8))


def test_supply_by_steps_waits_until_slots_are_left() -> None:
    seen, present = played(
        Trace("t", "test", step_supply=(StepSupply(0, 4), StepSupply(2, 8), StepSupply(3, 2))), steps=5
    )
    assert [event[1:] for event in seen.events] == [("add", (4, 5, 6, 7)), ("take back inf", (2, 3, 4, 5, 6, 7))]
    assert present == {0, 1}


def test_failures_of_the_trace_hit_their_slot_and_reclaimed_ones_are_gone() -> None:
    trace = Trace(
        "t", "test", failures=(Failure(5.0, 3, "reclaim"), Failure(6.0, 7, "kill"), Failure(7.0, None, "kill"))
    )
    seen, present = played(trace)
    assert [event[:2] for event in seen.events] == [(5.0, "reclaim"), (7.0, "kill")], "slot 7 was not running"
    assert present == set(range(8)) - {3}


def test_random_failures_are_as_frequent_as_asked_and_equal_for_equal_seeds() -> None:
    one, two, other = (played(Trace("t", "test"), seed=seed, mtbf_s=20.0)[0].events for seed in (1, 1, 2))
    assert one == two != other
    assert 25 < len(one) < 80
