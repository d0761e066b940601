"""What was decided in a run is decided again when the same is told."""

from __future__ import annotations

import math

from msgspec.structs import replace

from nereus.control.controller import Calibrated, Controller, Event, PlanFound, PoolChanged, Proposal, StepReport
from nereus.control.controller import Record as Said
from nereus.control.monitor import Monitor, Signals
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, Layout, Plan
from nereus.runtime.journal import Decided, Entry, Happened, PlanCommitted, Record
from nereus.runtime.replaying import from_plain, replay_decisions, to_plain

CAPACITY = 80 * 10**9


def _plan(epoch: int, trains: int) -> Plan:
    units = [Emu(POLICY_TRAINING, slot, Layout(), (slot,)) for slot in range(trains)]
    return Plan(epoch, (*units, Emu(POLICY_GENERATION, 0, Layout(), (9,))))


PROPOSAL = Proposal(_plan(1, 2), math.inf, 5.0, 2.0, 10**9, 70 * 10**9)
EVENTS: tuple[Event, ...] = (
    StepReport(0, Signals(100.0, 200.0, {"gemm": 0.4}, 10**9)),
    Calibrated(4, 96),
    PlanFound(1, (replace(PROPOSAL, latency_now_s=5.5, transition_s=1e6),)),
    PoolChanged(6, (1, 2)),
    PlanFound(2, (PROPOSAL,)),
)


def _journal() -> list[Entry]:
    """Tell a controller the events and write everything down as a run does."""
    controller = Controller(_plan(0, 1), Monitor(CAPACITY), gamma=0.5)
    records: list[Record] = [PlanCommitted(plan=_plan(0, 1), why="start")]
    for event in EVENTS:
        records.append(Happened(event=to_plain(event)))
        said = [effect for effect in controller.on(event) if isinstance(effect, Said)]
        records += [Decided(decision=one.kind, because=one.because, numbers=one.numbers) for one in said]
    return [Entry(seq, float(seq), one) for seq, one in enumerate(records)]


def test_events_survive_the_journal() -> None:
    assert tuple(from_plain(to_plain(event)) for event in EVENTS) == EVENTS


def test_what_was_decided_is_decided_again() -> None:
    replayed = replay_decisions(_journal(), gamma=0.5, capacity_bytes=CAPACITY)
    assert replayed.differences == ()
    assert (replayed.events, replayed.decisions) == (5, 5)


def test_a_decision_that_was_changed_or_left_out_is_named() -> None:
    journal = _journal()
    last = next(index for index in reversed(range(len(journal))) if isinstance(journal[index].record, Decided))
    record = journal[last].record
    assert isinstance(record, Decided)
    changed = [*journal[:last], replace(journal[last], record=replace(record, decision="stay")), *journal[last + 1 :]]
    assert len(replay_decisions(changed, gamma=0.5, capacity_bytes=CAPACITY).differences) == 1
    shorter = [*journal[:last], *journal[last + 1 :]]
    assert len(replay_decisions(shorter, gamma=0.5, capacity_bytes=CAPACITY).differences) == 1


def test_another_gamma_would_have_decided_otherwise() -> None:
    assert replay_decisions(_journal(), gamma=0.0, capacity_bytes=CAPACITY).differences
