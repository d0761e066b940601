"""Is the price of a transition the longest path through its graph, and is a primitive's the time of its bytes?"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.cluster import Cluster, Device, Link, uniform_nodes
from nereus.core.plan import Layout
from nereus.sim.scenarios import scenario
from nereus.transition.compile import compile_transition
from nereus.transition.cost import (
    PrimitiveSeconds,
    TransferRates,
    largest_shard_bytes,
    makespan,
    traffic,
    transition_seconds,
)
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    Replica,
    Split,
    TransitionDag,
    Unpark,
)
from nereus.transition.reshard import TensorSpec
from nereus.transition.run import TransitionRun
from tests.transition.journeys import TRAINING, compiled, units

T1, T2, T4 = Layout(1, 1), Layout(2, 1), Layout(4, 1)
MEMORY = Memory(1000, {TRAINING: 800})
RATES = TransferRates(
    Link(0.5, 100.0),
    Link(1.0, 10.0),
    50.0,
    node_of={slot: f"node-{slot // 4}" for slot in range(16)},
)


def replica(layout: Layout, *slots: int) -> Replica:
    return Replica(TRAINING, layout, slots)


@pytest.mark.parametrize(
    ("primitive", "seconds"),
    [
        (Extend("e", (replica(T2, 0, 1),), replica(T2, 2, 3)), 0.5 + 400 / 100),
        (Extend("e", (replica(T2, 0, 1),), replica(T2, 4, 5)), 1.0 + 400 / 10),
        (Extend("e", (replica(T1, 0),), replica(T4, 4, 5, 6, 7)), 1.0 + 800 / 10),
        (Extend("e", (replica(T1, 0), replica(T1, 1)), replica(T4, 4, 5, 6, 7)), 1.0 + 400 / 10),
        (Extend("e", (replica(T2, 0, 1), replica(T2, 6, 7)), replica(T2, 4, 5)), 0.5 + 400 / 100),
        (Split("s", replica(T4, 0, 1, 2, 3), (replica(T2, 0, 2), replica(T2, 1, 3))), 0.5 + 200 / 100),
        (Merge("m", (replica(T2, 0, 2), replica(T2, 1, 3)), replica(T4, 0, 1, 2, 3), True), 0.0),
        (Merge("m", (replica(T2, 0, 1),), replica(T2, 1, 0), False), 0.5 + 400 / 100),
        (Destroy("d", replica(T1, 0)), 0.0),
        (Park("p", replica(T2, 0, 1)), 400 / 50),
        (Unpark("u", replica(T2, 0, 1), replica(T2, 2, 3)), 0.5 + 400 / 50),
        (Unpark("u", replica(T2, 0, 1), replica(T2, 4, 5)), 1.0 + 400 / 10),
    ],
)
def test_seconds_are_those_of_the_slowest_slot(primitive: Primitive, seconds: float) -> None:
    assert PrimitiveSeconds(RATES, MEMORY)(primitive) == pytest.approx(seconds)


def test_stripes_help_until_the_link_of_the_receiver_is_full() -> None:
    rates = msgspec.structs.replace(RATES, stream_bytes_per_s=40.0)
    price = PrimitiveSeconds(rates, MEMORY)
    sources = [replica(T1, slot) for slot in range(3)]
    prices = [price(Extend("e", tuple(sources[:count]), replica(T1, 3))) - 0.5 for count in (1, 2, 3)]
    assert prices == pytest.approx([800 / 40, 800 / 80, 800 / 100])


def test_communicators_cost_by_their_ranks() -> None:
    rates = msgspec.structs.replace(RATES, communicator_s=2.0, communicator_rank_s=0.25, release_s=0.125)
    price, free = PrimitiveSeconds(rates, MEMORY), PrimitiveSeconds(RATES, MEMORY)
    extend = Extend("e", (replica(T2, 0, 1),), replica(T2, 2, 3))
    assert price(extend) - free(extend) == pytest.approx(2.0 + 4 * 0.25)
    assert price(Destroy("d", replica(T1, 0))) == 0.125


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=40)
def test_the_makespan_is_the_longest_path(seed: int) -> None:
    case = scenario(random.Random(seed), 16)
    dag = compile_transition(case.current, case.target, groups=case.groups, memory=case.memory)
    assert isinstance(dag, TransitionDag)
    rng = random.Random(seed)
    seconds = {primitive.id: rng.random() for primitive in dag.primitives}
    ends: list[float] = []
    for index, primitive in enumerate(dag.primitives):
        before = (*dag.local[index], *dag.resource[index])
        ends.append(max((ends[i] for i in before), default=0.0) + seconds[primitive.id])
    found = makespan(TransitionRun(dag), lambda primitive: seconds[primitive.id])
    assert found == pytest.approx(max(ends, default=0.0))


def test_a_transition_costs_its_pause_and_an_empty_one_nothing() -> None:
    before = units(TRAINING, T1, (0,))
    rates = msgspec.structs.replace(RATES, pause_s=3.0)
    dag = compiled(before, (*before, *units(TRAINING, T1, (1,), first=1)))
    assert transition_seconds(dag, rates, MEMORY) == pytest.approx(3.0 + 0.5 + 800 / 100)
    assert transition_seconds(compiled(before, before), rates, MEMORY) == 0.0


def test_rates_come_from_a_cluster() -> None:
    cluster = Cluster("c", Device("d", 1, 1, 1), uniform_nodes(4, 2), Link(0.1, 8.0), Link(0.2, 4.0), 6.0)
    rates = TransferRates.of(cluster, efficiency=0.5, communicator_s=1.0)
    assert (rates.in_node, rates.cross_node, rates.host_bytes_per_s) == (Link(0.1, 4.0), Link(0.2, 2.0), 3.0)
    assert rates.node_of == {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}


def test_the_largest_shard_is_that_of_the_fullest_slot() -> None:
    specs = [TensorSpec("embed", (5, 2), "float32", 0, -1), TensorSpec("layer.0", (4, 2), "float32", 0, 0)]
    assert largest_shard_bytes(specs, 1, T1) == 72
    assert largest_shard_bytes(specs, 1, T2) == (3 * 2 + 2 * 2) * 4
    memory = Memory(100, {TRAINING: 72}, {(TRAINING, T2): 40})
    assert (memory.footprint(TRAINING, T2), memory.footprint(TRAINING, T4)) == (40, 18)


def test_what_goes_through_host_memory_is_no_traffic_between_slots() -> None:
    specs = [TensorSpec("layer.0", (4, 2), "float32", 0, 0)]
    assert traffic(Park("p", replica(T1, 0)), specs, 1) == ()
    (move,) = traffic(Extend("e", (replica(T1, 0),), replica(T1, 3)), specs, 1)
    assert (move.from_slot, move.to_slot) == (0, 3)
