"""Is the order of primitives right, acyclic, the same every time, and refused with a reason when there is none?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.cluster import Link
from nereus.core.plan import Emu, Layout, ModelStage, Plan
from nereus.sim.scenarios import scenario
from nereus.transition import compile as compile_module
from nereus.transition.compile import MAX_STRIPES, compile_transition, nominal_seconds
from nereus.transition.cost import PrimitiveSeconds, TransferRates, makespan, traffic
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    Replica,
    Split,
    Stuck,
    TransitionDag,
    Unpark,
    model_stage_of,
)
from nereus.transition.reshard import Piece, TensorSpec, intersection, pieces_of, remainder
from nereus.transition.run import TransitionRun
from tests.transition.journeys import (
    ALL_AT_ONCE,
    CRITIC,
    GENERATION,
    REFERENCE,
    TRAINING,
    compiled,
    plans,
    units,
)

T1, T2, T4, P2 = Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(1, 2)
SHARED = ((GENERATION,), (REFERENCE,), (TRAINING,))
"""A synchronous workflow: everything may share slots with everything."""


def kinds(dag: TransitionDag) -> list[type[Primitive]]:
    return [type(primitive) for primitive in dag.primitives]


# The local order


def test_split_destroy_extend_merge() -> None:
    before = units(GENERATION, T4, (0, 1, 2, 3), (4, 5, 6, 7))
    after = units(GENERATION, Layout(2, 2), (0, 1, 5, 8), first=2)
    dag = compiled(before, after)
    split, destroy, extend, lost, merge = dag.primitives
    assert isinstance(split, Split) and isinstance(destroy, Destroy) and destroy.replica.slots == (4, 5, 6, 7)
    assert isinstance(extend, Extend) and extend.target.slots == (5, 8) and extend.target.layout == T2
    assert isinstance(merge, Merge) and merge.target == Replica.of(after[0]) and merge.aligned
    assert isinstance(lost, Destroy) and lost.replica.slots == (2, 3)
    assert dag.local[2] == (0,) and dag.resource[2] == (1,) and 2 in dag.local[4]


def test_edges_point_forward_so_that_the_graph_is_acyclic() -> None:
    for seed in range(40):
        case = scenario(random.Random(seed), 16)
        dag = compile_transition(case.current, case.target, groups=case.groups, memory=case.memory)
        assert isinstance(dag, TransitionDag)
        for index, before in enumerate(zip(dag.local, dag.resource, strict=True)):
            assert all(0 <= i < index for i in itertools.chain(*before))
        assert len({primitive.id for primitive in dag.primitives}) == len(dag.primitives)


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_equal_plans_give_equal_graphs(seed: int) -> None:
    graphs = []
    for _ in range(2):
        case = scenario(random.Random(seed), 16)
        graphs.append(compile_transition(case.current, case.target, groups=case.groups, memory=case.memory))
    assert graphs[0] == graphs[1]


# Rule 1: release before acquire


def test_an_acquisition_follows_the_destroy_that_frees_its_slots() -> None:
    before = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,))
    after = units(GENERATION, T1, (0,)) + units(TRAINING, T1, (1,), (2,), first=1)
    dag = compiled(before, after)
    assert kinds(dag) == [Destroy, Extend]
    assert dag.resource == ((), (0,)) and dag.local == ((), ())


def test_model_stages_that_never_run_at_once_share_slots_without_waiting() -> None:
    before = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,))
    after = units(GENERATION, T1, (0,)) + units(TRAINING, T1, (1,), (2,), first=1)
    dag = compiled(before, after, SHARED)
    assert not any(dag.resource)


def test_the_copy_dropped_last_is_the_one_that_lets_everybody_go_on() -> None:
    """Generation and training exchange places; only if each keeps the right copy is there an order without parking."""
    before = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (2,), (3,))
    after = units(GENERATION, T1, (2,), (4,), first=2) + units(TRAINING, T1, (0,), (1,), first=2)
    dag = compiled(before, after)
    assert Park not in kinds(dag)


@pytest.mark.parametrize("stages", [(GENERATION, TRAINING), (CRITIC, TRAINING), (REFERENCE, CRITIC)])
def test_a_swap_of_last_copies_is_a_cycle_and_says_so(stages: tuple[ModelStage, ModelStage]) -> None:
    one, other = stages
    before = units(one, T2, (0, 1)) + units(other, T2, (2, 3))
    after = units(one, T2, (2, 3), first=1) + units(other, T2, (0, 1), first=1)
    stuck = compile_transition(*plans(before, after), groups=ALL_AT_ONCE)
    assert isinstance(stuck, Stuck) and len(stuck.cycle) == 2
    assert f"{one} waits for slots of t2p1 on 2,3, held by t2p1 on 2,3, the last copy of {other}" in stuck.cycle


def test_a_swap_parks_the_smaller_copy_in_host_memory_if_that_has_room() -> None:
    before = units(GENERATION, T2, (0, 1)) + units(TRAINING, T2, (2, 3))
    after = units(GENERATION, T2, (2, 3), first=1) + units(TRAINING, T2, (0, 1), first=1)
    memory = Memory(100, {GENERATION: 20, TRAINING: 80}, host_bytes=20)
    dag = compiled(before, after, memory=memory)
    assert kinds(dag) == [Park, Extend, Destroy, Unpark]
    assert model_stage_of(dag.primitives[0]) == GENERATION
    small = Memory(100, {GENERATION: 20, TRAINING: 80}, host_bytes=19)
    assert isinstance(compile_transition(*plans(before, after), groups=ALL_AT_ONCE, memory=small), Stuck)


def test_a_unit_that_moves_onto_its_own_slots_is_parked() -> None:
    dag = compiled(
        units(TRAINING, T2, (0, 1)),
        units(TRAINING, T2, (1, 2), first=1),
        memory=Memory(100, {TRAINING: 100}, host_bytes=100),
    )
    assert kinds(dag) == [Park, Unpark]


def test_a_model_stage_without_a_copy_cannot_be_made() -> None:
    after = units(CRITIC, T1, (1,), (2,)) + units(REFERENCE, T2, (3, 4))
    stuck = compile_transition(*plans(units(TRAINING, T1, (0,)), after), groups=ALL_AT_ONCE)
    assert isinstance(stuck, Stuck) and len(stuck.cycle) == 2
    reference, critic = stuck.cycle
    assert critic == (
        "critic.training has no copy in the current plan, so nothing can send the 2 that the target plan wants (the "
        "first is t1p1 on 1): load it from a checkpoint, or leave it out of the target plan"
    )
    assert "reference.inference has no copy" in reference and "t2p1 on 3,4" in reference


def test_a_model_stage_that_the_target_lacks_is_dropped_altogether() -> None:
    dag = compiled(units(TRAINING, T1, (0,)) + units(CRITIC, T1, (1,)), units(TRAINING, T1, (0,)))
    assert kinds(dag) == [Destroy]


# Rule 2: stage order


def contested() -> tuple[TransitionDag, Memory]:
    """Generation and training both want slot 0, where memory is for one until the reference model leaves it."""
    before = units(GENERATION, T1, (1,)) + units(TRAINING, T1, (2,)) + units(REFERENCE, T1, (0,), (3,))
    after = units(GENERATION, T1, (0,), (1,)) + units(TRAINING, T1, (0,), (2,)) + units(REFERENCE, T1, (3,), first=1)
    after = tuple(Emu(emu.model_stage, i, emu.layout, emu.slots) for i, emu in enumerate(after))
    memory = Memory(3, {GENERATION: 1, TRAINING: 1, REFERENCE: 1}, reserved_bytes={0: 1})
    return compiled(before, after, SHARED, memory), memory


def who_waits(dag: TransitionDag) -> list[tuple[str, bool]]:
    return [
        (str(model_stage_of(primitive)), bool(resource))
        for primitive, resource in zip(dag.primitives, dag.resource, strict=True)
        if isinstance(primitive, Extend)
    ]


IN_STAGE_ORDER = [("policy.generation", False), ("policy.training", True)]


def test_what_could_go_in_either_order_goes_in_stage_order() -> None:
    assert who_waits(contested()[0]) == IN_STAGE_ORDER


def test_another_tie_break_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "_stage_order", lambda stage: -stage.order)
    assert who_waits(contested()[0]) == [("policy.training", False), ("policy.generation", True)]


# How short


def test_a_stripe_that_does_not_help_is_left_to_others() -> None:
    """Two replicas make two others; over links that one sender fills, each makes one."""
    before = units(TRAINING, T1, (0,), (1,))
    after = (*before, *units(TRAINING, T1, (2,), first=2))
    link = Link(0.0, 10.0)
    price = PrimitiveSeconds(TransferRates(link, link, 10.0), Memory(100, {TRAINING: 100}))
    dag = compile_transition(*plans(before, after), groups=ALL_AT_ONCE, seconds=price)
    assert isinstance(dag, TransitionDag)
    (extend,) = dag.primitives
    assert isinstance(extend, Extend) and len(extend.sources) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_variant_is_longer_than_the_first_one(seed: int) -> None:
    case = scenario(random.Random(seed), 8)

    def seconds_of(most: int) -> float:
        dag = compile_transition(case.current, case.target, groups=case.groups, memory=case.memory, variants=most)
        assert isinstance(dag, TransitionDag)
        return makespan(TransitionRun(dag), nominal_seconds)

    assert seconds_of(40) <= seconds_of(6) <= seconds_of(0)


# Memory


def test_an_acquisition_follows_the_release_of_memory_that_it_needs() -> None:
    dag, _ = contested()
    (destroy,) = [i for i, primitive in enumerate(dag.primitives) if isinstance(primitive, Destroy)]
    (waiting,) = [resource for resource in dag.resource if resource]
    assert waiting == (destroy,)


def test_a_split_that_never_fits_is_refused_with_its_model_stage() -> None:
    before, after = units(TRAINING, T2, (0, 1)), units(TRAINING, T1, (0,), (1,), first=1)
    stuck = compile_transition(*plans(before, after), groups=(), memory=Memory(50, {TRAINING: 100}))
    assert stuck == Stuck(("policy.training waits for memory that nothing frees",))


def test_a_reshuffling_merge_counts_the_new_shards_beside_the_old() -> None:
    before, after = units(TRAINING, T2, (0, 1)), units(TRAINING, T2, (1, 0), first=1)
    assert kinds(compiled(before, after, memory=Memory(100, {TRAINING: 100}))) == [Merge]
    stuck = compile_transition(*plans(before, after), groups=(), memory=Memory(99, {TRAINING: 100}))
    assert isinstance(stuck, Stuck)


# Sources


def test_several_live_replicas_each_send_a_stripe() -> None:
    before = units(TRAINING, T1, *((slot,) for slot in range(8)))
    after = (*before, *units(TRAINING, T1, (8,), first=8))
    dag = compiled(before, after)
    (extend,) = dag.primitives
    assert isinstance(extend, Extend) and len(set(extend.sources)) == MAX_STRIPES


def test_sources_are_shared_out_and_new_replicas_send_in_their_turn() -> None:
    """One replica becomes eight in three rounds, not seven: nobody sends two at once."""
    before = units(TRAINING, T1, (0,))
    after = (*before, *units(TRAINING, T1, *((slot,) for slot in range(1, 8)), first=1))
    dag = compiled(before, after)
    assert makespan(TransitionRun(dag), nominal_seconds) == 3.0
    run = TransitionRun(dag)
    while not run.finished:
        sources = [source for extend in run.ready() if isinstance(extend, Extend) for source in extend.sources]
        assert len(sources) == len(set(sources))
        for primitive in run.running:
            run.done(primitive.id)


def test_a_copy_that_nobody_is_waiting_for_sends_before_it_goes() -> None:
    dag = compiled(units(TRAINING, T1, (0,), (1,)), units(TRAINING, T1, (2,), (3,), first=2))
    first, second = dag.primitives[:2]
    assert isinstance(first, Extend) and isinstance(second, Extend) and first.sources != second.sources
    assert kinds(dag) == [Extend, Extend, Destroy, Destroy]


# The state itself


SPECS = (
    TensorSpec("embed", (8, 3), "float32", 0, -1),
    *(TensorSpec(f"layer.{i}.q", (8, 6), "float32", 0, i) for i in range(8)),
    *(TensorSpec(f"layer.{i}.norm", (6,), "float32", None, i) for i in range(8)),
    TensorSpec("head", (8, 3), "float32", 0),
)


def held(replicas: Iterator[Replica]) -> dict[tuple[str, int], list[Piece]]:
    found: dict[tuple[str, int], list[Piece]] = {}
    for replica in replicas:
        for index, slot in enumerate(replica.slots):
            found[str(replica.model_stage), slot] = list(pieces_of(SPECS, 8, replica.layout, index))
    return found


@pytest.mark.deep
@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=25)
def test_the_traffic_of_all_primitives_brings_every_slot_what_its_unit_holds(seed: int, order: int) -> None:
    """Every sender has what it sends at that moment, and in the end every slot of the target has all its pieces."""
    case = scenario(random.Random(seed), 12)
    dag = compile_transition(case.current, case.target, groups=case.groups, memory=case.memory)
    assert isinstance(dag, TransitionDag)
    state = held(map(Replica.of, case.current.emus))
    run, rng = TransitionRun(dag), random.Random(order)
    while not run.finished:
        run.ready()
        primitive = rng.choice(run.running)
        name = str(model_stage_of(primitive))
        for move in traffic(primitive, SPECS, 8):
            owned = [piece for piece in state[name, move.from_slot] if piece.name == move.name]
            assert not remainder(move.piece, owned), (primitive, move)
            there = state.setdefault((name, move.to_slot), [])
            assert not any(intersection(move.piece, piece) for piece in there if piece.name == move.name)
            there.append(move.piece)
        match primitive:
            case Destroy(replica=replica) | Park(replica=replica):
                for slot in replica.slots:
                    del state[name, slot]
            case Split(parts=parts):
                state.update(held(iter(parts)))
            case Merge(target=target) | Extend(target=target) | Unpark(target=target):
                state.update(held(iter((target,))))
        run.done(primitive.id)
    assert state == held(map(Replica.of, case.target.emus))


def test_a_plan_of_nothing_becomes_nothing() -> None:
    dag = compile_transition(Plan(0, ()), Plan(1, ()), groups=())
    assert isinstance(dag, TransitionDag) and dag.primitives == ()
