"""What is left of the trained state after a loss, and to which step can its slots come?

Owner: the supervisor, while training is held. Every trainer slot that is alive says how far it has come; units all of
whose slots hold their share are intact, and their slots agree on a step: the one that was being made, if its update can
be completed everywhere, else the one before. Nothing is decided by a clock.

Invariants (tests/runtime/test_regroup.py): slots of different steps never train on together; a step that any intact
slot has applied is never redone; as many units as possible are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from nereus.actors.names import slot_worker
from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Message, Recall, Stand, Standing
from nereus.core.plan import POLICY_TRAINING, Emu, Plan, SlotId
from nereus.core.units import listed
from nereus.errors import NereusError
from nereus.runtime.surroundings import RunFailed
from nereus.transition.primitive import Replica


class StateLost(RunFailed):
    """No unit has all of the trained state any more: the newest checkpoint is what is left."""


MAX_RESTORES = 3
"""How often a run goes back to a checkpoint without coming further than before."""


class Restores:
    """Whether a run whose state is lost may go back to a checkpoint once more."""

    def __init__(self) -> None:
        self._furthest = -1
        self._tries = 0

    def allowed(self, step: int) -> bool:
        """Note that state was lost when ``step`` steps were done."""
        self._tries = 0 if step > self._furthest else self._tries + 1
        self._furthest = max(self._furthest, step)
        return self._tries < MAX_RESTORES


class Regrouped(Struct, frozen=True):
    """The intact units, in the plan's order, and the step that comes next for all of them."""

    units: tuple[Emu, ...]
    step: int
    silent: tuple[SlotId, ...] = ()
    """Slots that are alive and did not answer."""


def settle(units: Sequence[Emu], standings: Mapping[SlotId, Standing]) -> Regrouped:
    """Return the units to go on with, and the step; ``StateLost`` if there are none."""
    intact = [
        unit
        for unit in units
        if all(slot in standings and Replica.of(unit) in standings[slot].replicas for slot in unit.slots)
    ]

    def reach(unit: Emu, step: int) -> bool:
        return all(_reaches(standings[slot], step) for slot in unit.slots)

    newest = max((standings[slot].step for unit in intact for slot in unit.slots), default=0)
    best: tuple[Emu, ...] = ()
    at = 0
    # The later step first: of two that keep as many units, what was computed is not thrown away.
    for step in (newest + 1, newest):
        kept = tuple(unit for unit in intact if reach(unit, step))
        if len(kept) > len(best):
            best, at = kept, step
    if not best:
        gone = listed([f"{unit.id} on slots {listed(unit.slots)}" for unit in units], most=4)
        raise StateLost(f"no trainer unit is whole any more ({gone})")
    return Regrouped(best, at)


def _reaches(standing: Standing, step: int) -> bool:
    if standing.ready and standing.step + 1 == step:
        return True
    return standing.step == step and not standing.torn


async def regroup(endpoint: Endpoint, plan: Plan, alive: Collection[SlotId], *, timeout_s: float) -> Regrouped:
    """Ask the trainer slots of ``plan`` that are ``alive``, and bring those of the intact units to one step.

    Slots that do not answer count as lost. Bounded: every round has fewer slots.
    """
    units = plan.of(POLICY_TRAINING)
    slots = [slot for unit in units for slot in unit.slots if slot in alive]
    answers, silent = await _ask(endpoint, {slot: Stand() for slot in slots}, timeout_s)
    standings = {slot: answer for slot, answer in answers.items() if isinstance(answer, Standing)}
    while True:
        settled = settle(units, standings)
        orders: dict[SlotId, Message] = {slot: Recall(settled.step) for unit in settled.units for slot in unit.slots}
        followed, late = await _ask(endpoint, orders, timeout_s)
        silent += late
        lost = orders.keys() - followed.keys()
        if not lost:
            return Regrouped(settled.units, settled.step, tuple(silent))
        there = {slot: Standing(settled.step, False, False, standings[slot].replicas) for slot in followed}
        standings = {slot: there.get(slot, standing) for slot, standing in standings.items() if slot not in lost}


async def _ask(
    endpoint: Endpoint, orders: Mapping[SlotId, Message], timeout_s: float
) -> tuple[dict[SlotId, Message], list[SlotId]]:
    """Make requests of several slots at once; return the answers, and the slots that were silent for too long.

    One that is lost or has nothing to say (a process that was started anew) is in neither.
    """
    results = await asyncio.gather(
        *(endpoint.request(slot_worker(slot), order, timeout_s=timeout_s) for slot, order in orders.items()),
        return_exceptions=True,
    )
    answers: dict[SlotId, Message] = {}
    silent: list[SlotId] = []
    for slot, result in zip(orders, results, strict=True):
        if isinstance(result, TimeoutError):
            silent.append(slot)
        elif isinstance(result, BaseException):
            if not isinstance(result, NereusError):
                raise result
        else:
            answers[slot] = result
    return answers, silent
