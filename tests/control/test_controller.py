"""Does the controller search, move, stay and give up when the method says so, and not on noise?"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nereus.control.controller import (
    AbortTransition,
    BeginTransition,
    Controller,
    Effect,
    Event,
    Hold,
    PlanFound,
    PoolChanged,
    Proposal,
    Record,
    Restart,
    Resume,
    Search,
    SlotsLost,
    StepReport,
    TransitionEnded,
    Widening,
)
from nereus.control.monitor import WINDOW, Monitor, Signals
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan

CAPACITY = 1100


def plan(epoch: int, slots: int = 4) -> Plan:
    return Plan(epoch, tuple(Emu(POLICY_TRAINING, epoch * 100 + slot, Layout(), (slot,)) for slot in range(slots)))


def controller(gamma: float = 0.5) -> Controller:
    return Controller(plan(0), Monitor(CAPACITY), gamma=gamma)


def report(step: int, tokens: float = 1000.0, gemm: float = 0.5, peak: int = 500) -> StepReport:
    return StepReport(step, Signals(tokens, 2 * tokens, {"gemm": gemm}, peak))


def proposal(epoch: int, now: float = 10.0, new: float = 5.0, way: float = 1.0, peak: int = 10) -> Proposal:
    return Proposal(plan(epoch), now, new, way, peak, usable_bytes=1000)


def kinds(effects: list[Effect]) -> list[str]:
    return [effect.kind if isinstance(effect, Record) else type(effect).__name__ for effect in effects]


def search_of(effects: list[Effect]) -> Search:
    return next(effect for effect in effects if isinstance(effect, Search))


def steps(one: Controller, first: int, count: int, tokens: float) -> list[Effect]:
    return [effect for step in range(first, first + count) for effect in one.on(report(step, tokens))]


def test_drift_searches_moves_and_resumes() -> None:
    one = controller()
    assert steps(one, 0, 5, 1000.0) == []
    search = search_of(steps(one, 5, WINDOW, 1400.0))
    assert not search.urgent and "+40% from 1000 to 1400" in search.because
    effects = one.on(PlanFound(search.search, (proposal(1),)))
    assert kinds(effects) == ["opportunistic", "Hold", "BeginTransition"]
    assert one.on(TransitionEnded(1, completed=True)) == [Resume(1)]
    assert one.plan == plan(1) and not one.held
    assert steps(one, 8, 10, 1400.0) == [], "references were not reset"


@given(st.integers(0, 1000), st.floats(0.0, 0.12))
@settings(max_examples=40, deadline=None)
def test_noise_never_starts_a_search(seed: int, noise: float) -> None:
    draw, one = random.Random(seed), controller()
    for step in range(60):
        factor = 1 + draw.uniform(-noise, noise)
        odd = 3.0 if step % 7 == 6 else 1.0
        assert one.on(report(step, 1000 * factor * odd, gemm=0.5 * (1 + draw.uniform(-0.08, 0.08)))) == []


def test_staying_resets_the_references_and_does_not_ask_again() -> None:
    one = controller()
    steps(one, 0, 3, 1000.0)
    search = search_of(steps(one, 3, WINDOW, 1500.0))
    effects = one.on(PlanFound(search.search, (proposal(1, way=1000.0),)))
    assert kinds(effects) == ["stay", "stay"] and "pays back in 200 steps; only 0.5 are allowed" in effects[0].because
    assert steps(one, 6, 20, 1500.0) == [] and one.plan == plan(0)


def test_alternating_demand_does_not_flap() -> None:
    one, begun = controller(), 0
    for step in range(200):
        tokens = 1000.0 if step // 5 % 2 else 1600.0
        for effect in one.on(report(step, tokens)):
            if isinstance(effect, Search):
                answer = one.on(PlanFound(effect.search, (proposal(step + 1, now=10, new=9, way=8.0),)))
                begun += any(isinstance(reply, BeginTransition) for reply in answer)
    assert begun == 0, "a way that costs eight steps' gain was taken for five steps"


def test_the_next_best_within_ten_percent_is_taken_when_the_best_does_not_fit() -> None:
    one = controller()
    offers = (
        proposal(1, new=5.0, peak=2000),
        proposal(2, new=5.4),
        proposal(3, new=5.6),
    )
    search = search_of(one.on(PoolChanged(0, added=(8,))))
    effects = one.on(PlanFound(search.search, offers))
    assert kinds(effects) == ["stay", "opportunistic", "Hold", "BeginTransition"]
    assert one.moving == plan(2)
    other = controller()
    search = search_of(other.on(PoolChanged(0, added=(8,))))
    assert kinds(other.on(PlanFound(search.search, (offers[0], offers[2])))) == ["stay", "stay"]


def test_lost_slots_hold_at_once_and_take_any_plan_that_fits() -> None:
    one = controller(gamma=0.0)
    effects = one.on(SlotsLost(4, (2,)))
    assert kinds(effects) == ["trigger", "Hold", "Search"]
    assert effects[1] == Hold("slots 2 were lost", at_once=True) and search_of(effects).urgent
    offers = (proposal(1, now=float("inf"), new=30.0, way=500.0),)
    found = one.on(PlanFound(search_of(effects).search, offers))
    assert kinds(found) == ["urgent", "BeginTransition"], "held twice, or not begun"


def test_lost_idle_slots_are_no_emergency() -> None:
    effects = controller().on(SlotsLost(4, (77,)))
    assert kinds(effects) == ["trigger", "Search"] and not search_of(effects).urgent


def test_revoked_slots_in_use_are_urgent() -> None:
    assert search_of(controller().on(PoolChanged(0, revoked=(1,)))).urgent
    assert not search_of(controller().on(PoolChanged(0, revoked=(50,)))).urgent


def test_memory_pressure_is_urgent_and_reported_once() -> None:
    one = controller()
    effects = one.on(report(0, peak=1001))
    assert search_of(effects).urgent
    assert one.on(report(1, peak=1001)) == []


def unanswered(one: Controller, search: Search) -> list[Effect]:
    """Let every search, however wide, find nothing; return the last effects."""
    while True:
        effects = one.on(PlanFound(search.search, (), "nothing fits"))
        if not any(isinstance(effect, Search) for effect in effects):
            return effects
        search = search_of(effects)


def test_memory_pressure_without_another_plan_is_borne_until_it_grows() -> None:
    one = controller()
    effects = unanswered(one, search_of(one.on(report(0, peak=1001))))
    assert kinds(effects) == ["stay", "Resume"] and not one.held
    assert [one.on(report(step, peak=peak)) for step, peak in enumerate((1001, 1020, 1003), 1)] == [[], [], []]
    assert search_of(one.on(report(4, peak=1030))).urgent


def test_memory_pressure_that_went_is_no_longer_borne() -> None:
    one = controller()
    unanswered(one, search_of(one.on(report(0, peak=1090))))
    assert one.on(report(1, peak=900)) == []
    assert search_of(one.on(report(2, peak=1001))).urgent


def test_a_step_that_does_not_fit_and_finds_no_other_plan_restarts() -> None:
    one = controller()
    one.on(report(0))
    search = search_of(one.on(replace(report(1, peak=1200), fits=False)))
    assert kinds(unanswered(one, search)) == ["restart", "Restart"]


def test_a_failed_transition_without_another_plan_leaves_the_old_one_in_force() -> None:
    one = controller()
    search = search_of(one.on(PoolChanged(0, added=(9,))))
    one.on(PlanFound(search.search, (proposal(1),)))
    search = search_of(one.on(TransitionEnded(1, completed=False, because="a send broke")))
    assert kinds(unanswered(one, search)) == ["stay", "Resume"]
    assert one.plan == plan(0) and not one.held


def test_an_urgent_search_is_widened_and_a_restart_comes_last() -> None:
    one = controller()
    search = search_of(one.on(SlotsLost(0, (0, 1, 2))))
    widenings = [search.widening]
    while True:
        effects = one.on(PlanFound(search.search, (), "memory is short of 3 GiB"))
        if not any(isinstance(effect, Search) for effect in effects):
            break
        search = search_of(effects)
        widenings.append(search.widening)
    assert widenings == [Widening.PLANS, Widening.MICRO_BATCH, Widening.RECOMPUTE, Widening.MARGIN]
    assert kinds(effects) == ["restart", "Restart"]
    restart = effects[-1]
    assert isinstance(restart, Restart) and "memory is short of 3 GiB" in restart.because


def test_slots_lost_during_a_transition_abort_it() -> None:
    one = controller()
    search = search_of(one.on(PoolChanged(0, added=(9,))))
    one.on(PlanFound(search.search, (proposal(1),)))
    effects = one.on(SlotsLost(1, (3,)))
    assert kinds(effects) == ["trigger", "AbortTransition", "Hold", "Search"]
    assert isinstance(effects[1], AbortTransition) and effects[1].epoch == 1
    assert kinds(one.on(TransitionEnded(1, completed=True))) == ["stale"] and one.plan == plan(0)


def test_a_failed_transition_is_replanned_at_once() -> None:
    one = controller()
    search = search_of(one.on(PoolChanged(0, added=(9,))))
    one.on(PlanFound(search.search, (proposal(1),)))
    effects = one.on(TransitionEnded(1, completed=False, because="a send broke"))
    assert kinds(effects) == ["failed", "Search"] and search_of(effects).urgent and one.plan == plan(0)


def test_triggers_during_a_transition_wait_for_its_end() -> None:
    one = controller()
    search = search_of(one.on(PoolChanged(0, added=(9,))))
    one.on(PlanFound(search.search, (proposal(1),)))
    assert kinds(one.on(PoolChanged(1, added=(10,)))) == ["trigger"]
    assert kinds(one.on(TransitionEnded(1, completed=True))) == ["Resume", "Search"]


def test_an_overtaken_search_changes_nothing() -> None:
    one = controller()
    old = search_of(one.on(PoolChanged(0, added=(9,))))
    new = search_of(one.on(SlotsLost(0, (0,))))
    assert kinds(one.on(PlanFound(old.search, (proposal(1),)))) == ["stale"] and one.moving is None
    assert "BeginTransition" in kinds(one.on(PlanFound(new.search, (proposal(2),))))


events = st.one_of(
    st.builds(
        lambda tokens, peak: ("step", tokens, peak), st.sampled_from([500.0, 1000.0, 2000.0]), st.integers(0, 1200)
    ),
    st.builds(lambda slot: ("lost", slot), st.integers(0, 6)),
    st.builds(lambda slot: ("pool", slot), st.integers(0, 6)),
    st.builds(lambda late, fits, way: ("found", late, fits, way), st.booleans(), st.booleans(), st.floats(0, 100)),
    st.builds(lambda good: ("ended", good), st.booleans()),
)


@given(st.lists(events, max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_history_keeps_the_invariants(history: list[tuple[object, ...]]) -> None:
    """One transition at a time, only plans that fit, every effect explained, no search left without an answer."""
    one, searches, moving, epoch = controller(), list[int](), None, 0
    for step, what in enumerate(history):
        event: Event
        match what:
            case ("step", float(tokens), int(peak)):
                event = report(step, tokens, peak=peak)
            case ("lost", int(slot)):
                event = SlotsLost(step, (slot,))
            case ("pool", int(slot)):
                event = PoolChanged(step, revoked=(slot,))
            case ("found", bool(late), bool(fits), float(way)):
                if not searches:
                    continue
                epoch += 1
                event = PlanFound(searches[0 if late else -1], (proposal(epoch, way=way, peak=10 if fits else 2000),))
            case ("ended", bool(good)):
                if moving is None:
                    continue
                event = TransitionEnded(moving, good, "it broke")
            case _:
                raise AssertionError(what)
        for effect in one.on(event):
            match effect:
                case Search(search=number):
                    assert number > max(searches, default=0)
                    searches.append(number)
                case BeginTransition(plan=target):
                    assert moving is None and isinstance(event, PlanFound) and event.proposals[0].peak_bytes == 10
                    moving = target.epoch
                case AbortTransition() | Resume():
                    moving = None
                case _:
                    pass
            assert isinstance(effect, Resume) or effect.because
        if isinstance(event, TransitionEnded):
            moving = None
        assert (one.moving.epoch if one.moving else None) == moving
        assert not (one.moving and one.searching and not one.held)
