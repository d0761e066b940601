"""Are ready primitives performed at once, in an allowed order, and cancelled together?"""

from __future__ import annotations

import asyncio
import random

import pytest

from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, POLICY_WEIGHTS, Emu, Layout, Plan, Replication
from nereus.errors import TransitionError
from nereus.runtime.placement import next_plan, ordinals_after
from nereus.runtime.transform import execute
from nereus.sim.loop import run_virtual
from nereus.transition.compile import compile_transition
from nereus.transition.primitive import Primitive, TransitionDag
from nereus.transition.run import TransitionRun


def plan_of(train: str, rollout: str, slots: int = 8) -> Plan:
    """Return a first plan with these layouts."""
    empty = Plan(-1, (Emu(POLICY_WEIGHTS, 0, Layout(), (4000,)),))
    return next_plan(empty, Replication.parse(train), Replication.parse(rollout), range(slots))


def dag_of(current: Plan, train: str, rollout: str, slots: int = 8) -> TransitionDag:
    target = next_plan(current, Replication.parse(train), Replication.parse(rollout), range(slots))
    dag = compile_transition(current, target, groups=[(POLICY_GENERATION, POLICY_TRAINING)])
    assert isinstance(dag, TransitionDag)
    return dag


@pytest.mark.parametrize("seed", range(20))
def test_primitives_run_at_once_and_after_what_they_wait_for(seed: int) -> None:
    draw = random.Random(seed)
    dag = dag_of(plan_of("d2t2p1", "d4t1p1"), "d1t2p2", draw.choice(["d2t1p1", "d4t1p1"]))
    spans: dict[str, tuple[float, float]] = {}

    async def perform(primitive: Primitive) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(draw.uniform(0.1, 2.0))
        spans[primitive.id] = (began, loop.time())

    async def main() -> None:
        run = TransitionRun(dag)
        await execute(run, perform)
        assert run.finished

    run_virtual(main())
    ids = [primitive.id for primitive in dag.primitives]
    assert sorted(spans) == sorted(ids)
    for index, before in enumerate(zip(dag.local, dag.resource, strict=True)):
        waits = [spans[ids[other]][1] for other in {*before[0], *before[1]}]
        assert spans[ids[index]][0] == max(waits, default=spans[ids[index]][0] if not waits else 0.0)


def test_whoever_watches_is_told_of_every_start_and_end() -> None:
    dag = dag_of(plan_of("d2t2p1", "d4t1p1"), "d1t2p2", "d2t1p1")
    seen: list[tuple[int, tuple[str, ...]]] = []
    started: list[str] = []
    run = TransitionRun(dag)

    async def perform(primitive: Primitive) -> None:
        started.append(primitive.id)
        await asyncio.sleep(len(started))

    run_virtual(execute(run, perform, lambda done, running: seen.append((done, running))))
    assert seen[-1] == (len(dag.primitives), ())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done + len(running) <= len(dag.primitives) for done, running in seen)
    assert {name for _, running in seen for name in running} == set(started)


def test_a_failure_cancels_the_siblings_and_starts_nothing_more() -> None:
    dag = dag_of(plan_of("d4t1p1", "d4t1p1"), "d2t2p1", "d2t1p1")
    first = [primitive.id for primitive in TransitionRun(dag).ready()]
    assert len(first) > 1
    started, cancelled = [], []

    async def perform(primitive: Primitive) -> None:
        started.append(primitive.id)
        try:
            if primitive.id == first[0]:
                await asyncio.sleep(1.0)
                raise TransitionError("slot-1 refused Take: damaged")
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            cancelled.append(primitive.id)
            raise

    async def main() -> None:
        with pytest.raises(TransitionError, match="slot-1 refused Take: damaged"):
            await execute(TransitionRun(dag), perform)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
    assert started == first
    assert cancelled == first[1:]


@pytest.mark.parametrize("seed", range(30))
def test_the_next_plan_keeps_the_lead_and_what_it_can(seed: int) -> None:
    draw = random.Random(seed)
    layouts = ["d1t1p1", "d2t1p1", "d1t2p1", "d1t1p2", "d2t2p1", "d1t2p2", "d3t1p1"]
    plan = plan_of("d2t1p1", "d3t1p1")
    units = {emu.id: emu for emu in plan.emus}
    ordinals = ordinals_after(plan, {})
    for _ in range(12):
        train, rollout = Replication.parse(draw.choice(layouts)), Replication(draw.randint(1, 4))
        lead = plan.of(POLICY_TRAINING)[0].slots[0]
        before, plan = plan, next_plan(plan, train, rollout, range(8), ordinals)
        ordinals = ordinals_after(plan, ordinals)
        assert plan.epoch == before.epoch + 1
        assert plan.of(POLICY_TRAINING)[0].slots[0] == lead
        assert len(plan.of(POLICY_TRAINING)) == train.dp
        assert len(plan.of(POLICY_GENERATION)) == rollout.dp
        assert not plan.overlaps([POLICY_GENERATION, POLICY_TRAINING])
        for emu in plan.emus:  # an id never means another unit later
            assert units.setdefault(emu.id, emu) == emu


def test_too_few_slots_are_named() -> None:
    with pytest.raises(ValueError, match="need 9 slots, there are 8"):
        next_plan(plan_of("d2t1p1", "d3t1p1"), Replication.parse("d2t2p1"), Replication(5), range(8))
