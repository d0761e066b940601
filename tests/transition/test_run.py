"""Does a transition finished in any order keep the books balanced and reach exactly the target?"""

from __future__ import annotations

import random
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.plan import Emu, Layout, Plan
from nereus.sim.scenarios import OVERLAPS, Scenario, overlaps, scenario
from nereus.transition import compile as compile_module
from nereus.transition.compile import compile_transition
from nereus.transition.ledger import Ledger
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Replica,
    Split,
    Stuck,
    TransitionDag,
    Unpark,
)
from nereus.transition.run import TransitionRun
from tests.transition.journeys import (
    ALL_AT_ONCE,
    GENERATION,
    TRAINING,
    compiled,
    finish_in_random_order,
    plans,
    reached,
    units,
)

T1, T2 = Layout(1, 1), Layout(2, 1)
quick = settings(deadline=None, max_examples=80)


def compile_scenario(case: Scenario) -> TransitionDag | Stuck:
    return compile_transition(case.current, case.target, groups=case.groups, memory=case.memory)


def balanced(case: Scenario, run: TransitionRun) -> None:
    """Check the promises of a transition from outside, by the public books."""
    for model_stage in case.target.model_stages():
        assert run.ledger.replicas(model_stage) or run.ledger.parked(model_stage), model_stage
    for slot in case.current.slots() | case.target.slots():
        owners = {replica.model_stage for replica in run.ledger.owners(slot)}
        assert all(len(owners.intersection(group)) <= 1 for group in case.groups)
    assert all(size <= case.memory.capacity_bytes for size in run.ledger.slot_bytes().values())
    assert all(0 <= size <= case.memory.host_bytes for size in run.ledger.host_bytes().values())


@pytest.mark.deep
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
@quick
def test_any_finishing_order_balances_and_reaches_the_target(seed: int, order: int) -> None:
    rng = random.Random(seed)
    case = scenario(rng, rng.choice((8, 12, 16, 24)))
    dag = compile_scenario(case)
    assert isinstance(dag, TransitionDag), dag
    run = finish_in_random_order(dag, random.Random(order), lambda run: balanced(case, run))
    assert reached(run, dag)


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32), st.floats(0.6, 1.0))
@quick
def test_with_little_memory_it_is_refused_or_keeps_every_promise(seed: int, order: int, tightness: float) -> None:
    rng = random.Random(seed)
    case = scenario(rng, rng.choice((8, 12, 16)), tightness=tightness)
    dag = compile_scenario(case)
    if isinstance(dag, Stuck):
        assert "memory" in str(dag)
        return
    run = finish_in_random_order(dag, random.Random(order), lambda run: balanced(case, run))
    assert reached(run, dag)


def test_the_random_transitions_include_every_kind_of_overlap_and_every_primitive() -> None:
    kinds: set[str] = set()
    primitives: set[type] = set()
    for seed in range(60):
        dag = compile_scenario(scenario(random.Random(seed), 16))
        assert isinstance(dag, TransitionDag)
        kinds.update(overlaps(dag))
        primitives.update(map(type, dag.primitives))
    assert kinds == set(OVERLAPS)
    assert primitives == {Split, Destroy, Extend, Merge, Park, Unpark}


# Mutations: each rule that the compiler obeys is needed, and its absence does not go unnoticed


def broken(dag: TransitionDag, orders: int = 20) -> bool:
    """Whether some finishing order breaks the books, deadlocks or misses the target."""
    for order in range(orders):
        try:
            run = finish_in_random_order(dag, random.Random(order))
        except (ValueError, AssertionError):
            return True
        if not reached(run, dag):
            return True
    return False


def test_without_release_before_acquire_a_slot_is_owned_twice() -> None:
    noticed = tried = 0
    for seed in range(25):
        dag = compile_scenario(scenario(random.Random(seed), 12))
        assert isinstance(dag, TransitionDag)
        if any(dag.resource):
            tried += 1
            noticed += broken(msgspec.structs.replace(dag, resource=((),) * len(dag.primitives)))
            assert not broken(dag)
    assert tried >= 20 and noticed == tried


def test_a_compiler_without_release_before_acquire_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant never looks whose slots an acquisition needs: it starts everything that has a source."""

    def blind(self: compile_module._Compiler) -> None:
        for stage in self._stages:
            stage.ready.extend(stage.acquisitions)

    cases = [scenario(random.Random(seed), 12) for seed in range(12)]
    waiting = [case for case in cases if any(cast(TransitionDag, compile_scenario(case)).resource)]
    assert len(waiting) >= 8
    monkeypatch.setattr(compile_module._Compiler, "_block", blind)
    assert all(broken(cast(TransitionDag, compile_scenario(case)), orders=4) for case in waiting)


def test_a_compiler_that_drops_every_copy_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant keeps no last copy: a model-stage that moves as a whole cannot arrive."""
    before = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,), (3,))
    after = units(GENERATION, T1, (2,), (4,), first=2) + units(TRAINING, T1, (0,), (1,), first=2)
    assert not broken(compiled(before, after))
    monkeypatch.setattr(compile_module._Compiler, "_last_copies", lambda self: {})
    mutant = compile_transition(*plans(before, after), groups=ALL_AT_ONCE)
    assert isinstance(mutant, Stuck) or broken(mutant)


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=40)
def test_units_and_their_slots_may_stand_in_any_order(seed: int, order: int) -> None:
    """Plans whose units and slots are shuffled, also between each other, are as good as sorted ones."""
    rng = random.Random(seed)
    case = scenario(rng, rng.choice((8, 12)))

    def shuffled(plan: Plan) -> Plan:
        emus = [
            Emu(emu.model_stage, emu.ordinal, emu.layout, tuple(rng.sample(emu.slots, len(emu.slots))))
            for emu in plan.emus
        ]
        return Plan(plan.epoch, tuple(rng.sample(emus, len(emus))))

    current = shuffled(case.current)
    for target in (shuffled(case.target), Plan(1, shuffled(current).emus)):
        mixed = Scenario(current, target, case.groups, case.memory)
        dag = compile_scenario(mixed)
        assert isinstance(dag, TransitionDag), dag
        assert reached(finish_in_random_order(dag, random.Random(order), lambda run: balanced(case, run)), dag)


def test_without_copying_before_the_last_destroy_a_model_stage_is_lost() -> None:
    before = units(TRAINING, T2, (0, 1))
    dag = compiled(before, units(TRAINING, T2, (2, 3), first=1))
    assert not broken(dag)
    assert [type(primitive) for primitive in dag.primitives] == [Extend, Destroy]
    assert dag.local == ((), (0,))
    assert broken(msgspec.structs.replace(dag, local=((), ())))


def test_every_single_local_edge_that_is_not_implied_is_needed() -> None:
    dag = compile_scenario(scenario(random.Random(3), 12))
    assert isinstance(dag, TransitionDag)
    removed = noticed = 0
    for after, before in enumerate(dag.local):
        if before and not dag.resource[after]:
            removed += 1
            local = (*dag.local[:after], (), *dag.local[after + 1 :])
            noticed += broken(msgspec.structs.replace(dag, local=local))
    assert removed and noticed == removed


# The run as its callers use it


def test_a_primitive_is_handed_out_once_and_only_after_what_it_waits_for() -> None:
    before = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,))
    after = units(GENERATION, T1, (0,)) + units(TRAINING, T1, (1,), (2,), first=2)
    run = TransitionRun(compiled(before, after))
    (destroy,) = run.ready()
    assert isinstance(destroy, Destroy) and run.ready() == () and run.running == (destroy,)
    run.done(destroy.id)
    (extend,) = run.ready()
    assert isinstance(extend, Extend) and not run.finished
    assert [replica.model_stage for replica in run.ledger.owners(1)] == [TRAINING]
    run.done(extend.id)
    assert run.finished and len(run.ledger.replicas(TRAINING)) == 2


def test_done_names_what_runs_when_told_of_something_else() -> None:
    run = TransitionRun(compiled(units(TRAINING, T1, (0,)), units(TRAINING, T1, (1,), first=1)))
    with pytest.raises(ValueError, match=r"'nonsense' is not running; running are \[\]"):
        run.done("nonsense")
    (extend,) = run.ready()
    run.done(extend.id)
    with pytest.raises(ValueError, match="is not running"):
        run.done(extend.id)


def test_equal_plans_are_finished_at_once() -> None:
    unit = units(TRAINING, T2, (0, 1))
    run = TransitionRun(compiled(unit, unit))
    assert run.finished and run.ready() == ()


# The books


@pytest.fixture
def ledger() -> Ledger:
    start = [Replica(GENERATION, T1, (0,)), Replica(TRAINING, T1, (1,))]
    memory = Memory(10, {GENERATION: 4, TRAINING: 8}, host_bytes=8)
    return Ledger(start, [GENERATION, TRAINING], ALL_AT_ONCE, memory)


def test_the_books_refuse_a_slot_that_is_taken(ledger: Ledger) -> None:
    source = Replica(GENERATION, T1, (0,))
    with pytest.raises(ValueError, match=r"slot 1 would be owned twice: by policy\.training"):
        ledger.start(Extend("e", (source,), Replica(GENERATION, T1, (1,))))


def test_the_books_refuse_a_source_that_does_not_exist(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="which is not a complete copy"):
        ledger.start(Extend("e", (Replica(GENERATION, T1, (5,)),), Replica(GENERATION, T1, (6,))))


def test_the_books_refuse_to_drop_the_last_copy(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match=r"t1p1 on 1 is the last copy of policy\.training"):
        ledger.start(Destroy("d", Replica(TRAINING, T1, (1,))))


def test_the_books_refuse_to_drop_what_is_being_read(ledger: Ledger) -> None:
    source = Replica(TRAINING, T1, (1,))
    ledger.start(Extend("e", (source,), Replica(TRAINING, T1, (2,))))
    with pytest.raises(ValueError, match="which another primitive still uses"):
        ledger.start(Destroy("d", source))


def test_the_books_refuse_memory_that_is_not_there() -> None:
    start = [Replica(GENERATION, T1, (0,)), Replica(TRAINING, T1, (1,))]
    groups = ((GENERATION,), (TRAINING,))
    ledger = Ledger(start, [], groups, Memory(10, {GENERATION: 4, TRAINING: 8}))
    with pytest.raises(ValueError, match="e takes 8 bytes on slot 0, which then holds 12 of 10"):
        ledger.start(Extend("e", (start[1],), Replica(TRAINING, T1, (0,))))


def test_the_books_refuse_a_host_that_is_full(ledger: Ledger) -> None:
    ledger.start(Park("p", Replica(TRAINING, T1, (1,))))
    with pytest.raises(ValueError, match="q needs 12 bytes on host '', which has 8"):
        ledger.start(Park("q", Replica(GENERATION, T1, (0,))))


def test_a_parked_copy_counts_and_comes_back_once(ledger: Ledger) -> None:
    replica = Replica(TRAINING, T1, (1,))
    park, unpark = Park("p", replica), Unpark("u", replica, Replica(TRAINING, T1, (2,)))
    with pytest.raises(ValueError, match="in host memory, where it is not"):
        ledger.start(unpark)
    ledger.start(park)
    ledger.done(park)
    assert ledger.parked(TRAINING) == replica and ledger.owners(1) == () and ledger.host_bytes()[""] == 8
    ledger.start(unpark)
    ledger.done(unpark)
    assert ledger.parked(TRAINING) is None and ledger.host_bytes()[""] == 0 and ledger.slot_bytes()[2] == 8
