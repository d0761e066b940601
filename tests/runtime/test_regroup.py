from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.actors.names import slot_worker
from nereus.bus.endpoint import Delivery, PeerGone
from nereus.bus.memory import MemoryBus, MemoryEndpoint
from nereus.bus.messages import Message, Ok, Recall, Refused, Stand, Standing
from nereus.bus.session import Settings
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan, SlotId
from nereus.runtime.regroup import MAX_RESTORES, Regrouped, Restores, StateLost, regroup, settle
from nereus.sim.loop import run_virtual
from nereus.transition.primitive import Replica
from tests.tiers import spread

TIMEOUT_S = 20.0


def _units(dp: int, size: int) -> tuple[Emu, ...]:
    return tuple(
        Emu(POLICY_TRAINING, unit, Layout(size), tuple(range(unit * size, (unit + 1) * size))) for unit in range(dp)
    )


def _there(unit: Emu, step: int, *, ready: bool = False, torn: bool = False) -> dict[SlotId, Standing]:
    return {slot: Standing(step, ready, torn, (Replica.of(unit),)) for slot in unit.slots}


# What can be said of any answers


@st.composite
def _answers(draw: st.DrawFn) -> tuple[tuple[Emu, ...], dict[SlotId, Standing]]:
    """Draw units and what their slots answer; some do not, some hold something else, and any may be anywhere."""
    units = _units(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    standings = {}
    for unit in units:
        for slot in unit.slots:
            held = (Replica.of(unit),) if draw(st.integers(0, 5)) else draw(st.sampled_from([(), (_STRANGE,)]))
            if draw(st.integers(0, 6)):
                standings[slot] = Standing(
                    draw(st.integers(3, 5)), draw(st.booleans()), draw(st.integers(0, 3)) == 0, held
                )
    return units, standings


_STRANGE = Replica(POLICY_TRAINING, Layout(1), (99,))


def _can_come_to(standing: Standing, step: int) -> bool:
    """Say what ``TrainerBackend.recall`` promises."""
    return (standing.ready and step == standing.step + 1) or (not standing.torn and step == standing.step)


def _intact(units: tuple[Emu, ...], standings: dict[SlotId, Standing]) -> list[Emu]:
    return [
        unit
        for unit in units
        if all(s in standings and standings[s].replicas == (Replica.of(unit),) for s in unit.slots)
    ]


@given(_answers())
def test_as_many_units_as_can_be_go_on_from_one_step_and_nothing_is_redone(
    drawn: tuple[tuple[Emu, ...], dict[SlotId, Standing]],
) -> None:
    units, standings = drawn
    intact = _intact(units, standings)
    newest = max((standings[slot].step for unit in intact for slot in unit.slots), default=0)
    possible = {
        step: [unit for unit in intact if all(_can_come_to(standings[slot], step) for slot in unit.slots)]
        for step in range(newest, newest + 3)
    }
    most = max(map(len, possible.values()))
    if not most:
        with pytest.raises(StateLost, match=r"policy\.training/0 on slots 0"):
            settle(units, standings)
        return
    settled = settle(units, standings)
    assert settled.step >= newest, "a step that a slot of an intact unit has applied is redone"
    assert list(settled.units) == possible[settled.step]
    assert len(settled.units) == most
    assert settled.step == max(step for step, kept in possible.items() if len(kept) == most)


@pytest.mark.parametrize("dp", spread([3, 1, 2], 1))
@pytest.mark.parametrize("size", spread([2, 1], 1))
@given(data=st.data())
def test_after_a_step_in_two_phases_nobody_but_the_dead_is_left_out(dp: int, size: int, data: st.DataObject) -> None:
    """Either somebody has the step's update ready or applied, then all the living have it ready; or nobody has."""
    units = _units(dp, size)
    slots = [slot for unit in units for slot in unit.slots]
    agreed = data.draw(st.booleans())
    dead = set(data.draw(st.lists(st.sampled_from(slots), max_size=2)))
    standings = {}
    for unit in units:
        for slot in unit.slots:
            applied = agreed and data.draw(st.booleans())
            ready = (agreed and not applied) or (not agreed and data.draw(st.booleans()))
            standings[slot] = Standing(7 + applied, ready, False, (Replica.of(unit),))
    if not agreed and all(standing.ready for standing in standings.values()):
        agreed = True
    for slot in dead:
        del standings[slot]
    whole = [unit for unit in units if not dead & set(unit.slots)]
    if not whole:
        with pytest.raises(StateLost):
            settle(units, standings)
        return
    settled = settle(units, standings)
    assert list(settled.units) == whole
    if agreed:
        assert settled.step == 8


def test_a_unit_with_half_its_updates_applied_is_left_out() -> None:
    """With several updates in a step nobody can undo the first."""
    torn, well = _units(2, 2)
    standings = _there(well, 4) | _there(torn, 4, torn=True)
    assert settle((torn, well), standings) == Regrouped((well,), 4)
    with pytest.raises(StateLost):
        settle((torn,), _there(torn, 4, torn=True))


def test_units_with_half_their_updates_applied_can_still_finish_when_the_last_is_ready() -> None:
    units = _units(2, 1)
    standings = _there(units[0], 4, ready=True, torn=True) | _there(units[1], 5)
    assert settle(units, standings) == Regrouped(units, 5)


def test_of_two_steps_with_as_many_units_the_later_is_taken() -> None:
    units = _units(2, 1)
    assert settle(units, {**_there(units[0], 4, ready=True), **_there(units[1], 4, ready=True)}).step == 5


# Asking


@dataclass
class _Slot:
    """A scripted trainer slot: what it says when it is asked, and what it does when it is told."""

    standing: Standing | None
    """None: it has been started anew and knows nothing."""
    asked: Literal["answers", "silent", "dies"] = "answers"
    told: Literal["follows", "refuses", "silent", "dies"] = "follows"
    recalls: list[int] = field(default_factory=list)

    def recall(self, step: int) -> Message:
        self.recalls.append(step)
        if self.standing is None or self.told == "refuses" or not _can_come_to(self.standing, step):
            return Refused("cannot")
        self.standing = Standing(step, False, False, self.standing.replicas)
        return Ok()


def _regroup(units: tuple[Emu, ...], slots: dict[SlotId, _Slot]) -> Regrouped:
    """Regroup with scripted slots on virtual time; a slot that is not given is known to be dead."""

    async def play(script: _Slot, client: MemoryEndpoint) -> None:
        while True:
            event = await client.receive()
            if isinstance(event, PeerGone):
                return
            if not isinstance(event, Delivery):
                continue
            match event.message:
                case Stand():
                    does, answer = script.asked, script.standing or Refused("no unit yet")
                case Recall(step):
                    does, answer = script.told, script.recall(step)
                case other:
                    raise AssertionError(other)
            if does == "dies":
                client.abort()
                return
            if does != "silent":
                await client.reply(event, answer)

    async def main() -> Regrouped:
        bus = MemoryBus(Settings(heartbeat_s=1.0, liveness_s=5.0))
        supervisor = bus.server("supervisor")
        players = []
        for slot, script in slots.items():
            client = bus.client(slot_worker(slot), server="supervisor")
            await client.send("supervisor", Ok())
            while not isinstance(await supervisor.receive(), Delivery):
                pass
            players.append(asyncio.create_task(play(script, client)))
        try:
            return await regroup(supervisor, Plan(3, units), slots.keys(), timeout_s=TIMEOUT_S)
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)

    return run_virtual(main())


def _scripts(units: tuple[Emu, ...], step: int, *, ready: bool = False) -> dict[SlotId, _Slot]:
    return {slot: _Slot(standing) for unit in units for slot, standing in _there(unit, step, ready=ready).items()}


def test_all_that_live_come_to_the_step_that_is_complete() -> None:
    units = _units(3, 1)
    slots = _scripts(units, 4, ready=True)
    slots[1].standing = Standing(5, False, False, slots[1].standing.replicas)
    del slots[2]
    assert _regroup(units, slots) == Regrouped(units[:2], 5)
    assert [slots[0].recalls, slots[1].recalls] == [[5], [5]]


def test_a_step_that_nobody_could_complete_is_forgotten_by_all() -> None:
    units = _units(2, 2)
    slots = _scripts(units, 4)
    slots[0].standing = Standing(4, True, False, slots[0].standing.replicas)
    assert _regroup(units, slots) == Regrouped(units, 4)
    assert all(slot.recalls == [4] and slot.standing and not slot.standing.ready for slot in slots.values())


def test_a_slot_that_was_started_anew_takes_its_unit_out() -> None:
    units = _units(2, 2)
    slots = _scripts(units, 4)
    slots[3].standing = None
    assert _regroup(units, slots) == Regrouped(units[:1], 4)
    assert slots[2].recalls == []


@pytest.mark.parametrize("how", ["silent", "dies"])
@pytest.mark.parametrize("when", ["asked", "told"])
def test_a_slot_that_is_lost_while_it_is_asked_or_told_takes_its_unit_out(how: str, when: str) -> None:
    units = _units(3, 1)
    slots = _scripts(units, 4, ready=True)
    setattr(slots[1], when, how)
    assert _regroup(units, slots) == Regrouped((units[0], units[2]), 5, (1,) if how == "silent" else ())
    assert [slots[slot].standing and slots[slot].standing.step for slot in (0, 2)] == [5, 5]


def test_slots_that_are_lost_one_after_the_other_leave_those_that_have_followed() -> None:
    units = _units(4, 1)
    slots = _scripts(units, 4, ready=True)
    slots[0].asked, slots[1].told, slots[3].told = "dies", "silent", "refuses"
    assert _regroup(units, slots) == Regrouped((units[2],), 5, (1,))
    assert slots[2].recalls == [5, 5]


@pytest.mark.parametrize("how", ["silent", "dies", "refuses"])
def test_when_the_last_unit_is_lost_too_it_is_said(how: str) -> None:
    units = _units(2, 1)
    slots = _scripts(units, 4)
    slots[0].told = slots[1].told = how  # type: ignore[assignment]
    with pytest.raises(StateLost, match="no trainer unit is whole any more"):
        _regroup(units, slots)


def test_a_run_goes_back_as_often_as_it_comes_further_and_a_few_times_more() -> None:
    restores = Restores()
    assert all(restores.allowed(step) for step in range(10))
    assert [restores.allowed(9) for _ in range(MAX_RESTORES)] == [True] * (MAX_RESTORES - 1) + [False]
