"""Do proposals fit, keep what can be kept, survive the way to another process, and drive the controller?"""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nereus.control.breakdown import Pricing
from nereus.control.candidates import Space
from nereus.control.choose import Found, Pin, Question, intact, replications, start_plan
from nereus.control.controller import BeginTransition, Controller, PlanFound, Restart, Search, SlotsLost, Widening
from nereus.control.efficiency import Efficiencies
from nereus.control.monitor import Monitor
from nereus.control.problem import Infeasible, usable_bytes
from nereus.control.propose import answer, latency_now, propose, widened
from nereus.core.plan import POLICY_TRAINING, POLICY_WEIGHTS, Emu, Layout, Plan, Replication
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

CLUSTER = load_cluster("a100-64g", 32)
WORKLOAD = Workload(Lengths.fixed(512), Lengths.fixed(1536), groups=64)


def question(*, asynchronous: bool = False, slots: int = 32, algorithm: Algorithm = Algorithm.GRPO) -> Question:
    flow = workflow(algorithm, asynchronous=asynchronous, reward_model=False)
    shapes = {"policy": load_model("llama-3.1-8b")}
    return Question(Pricing(CLUSTER.resized(slots), shapes, flow, WORKLOAD, Efficiencies.prior()))


def started(asked: Question) -> Found:
    found = start_plan(asked)
    assert isinstance(found, Found)
    return found


def running(asked: Question) -> Question:
    """Return the question once its own first plan runs."""
    return replace(asked, current=started(asked).placement.plan)


def on(asked: Question, lost: range) -> Question:
    return replace(asked, pricing=replace(asked.pricing, cluster=asked.pricing.cluster.without(lost)))


def check(asked: Question, plan: Plan) -> None:
    """A plan holds all model-stages, on slots that are there, none twice at the same time."""
    flow = asked.pricing.workflow
    pool = {slot for node in asked.pricing.cluster.nodes for slot in node.slots}
    planned = [emu for emu in plan.emus if emu.model_stage in flow.model_stages]
    assert {emu.model_stage for emu in planned} == set(flow.model_stages)
    assert pool.issuperset(slot for emu in planned for slot in emu.slots)
    assert not flow.conflicts(Plan(0, tuple(planned)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_plan_is_epoch_0_and_needs_no_move(asynchronous: bool) -> None:
    asked = question(asynchronous=asynchronous)
    found = started(asked)
    assert found.placement.plan.epoch == 0
    check(asked, found.placement.plan)
    proposals = propose(asked)
    assert not isinstance(proposals, Infeasible)
    assert [one.plan for one in proposals] == [found.placement.plan]
    assert proposals[0].latency_now_s == math.inf and proposals[0].transition_s == 0.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_runs_is_priced_as_it_was_planned_and_kept_for_nothing(asynchronous: bool) -> None:
    asked = question(asynchronous=asynchronous)
    found = started(asked)
    now = running(asked)
    assert latency_now(now) == pytest.approx(found.solution.latency_s)
    proposals = propose(now)
    assert not isinstance(proposals, Infeasible)
    assert proposals[0].transition_s == 0.0
    assert proposals[0].plan.emus == found.placement.plan.emus and proposals[0].plan.epoch == 1


def test_longer_responses_bring_plans_that_keep_more() -> None:
    asked = running(question(algorithm=Algorithm.PPO))
    longer = replace(WORKLOAD, responses=Lengths.fixed(6144))
    proposals = propose(replace(asked, pricing=replace(asked.pricing, workload=longer)))
    assert not isinstance(proposals, Infeasible)
    best = proposals[0]
    assert best.latency_new_s <= best.latency_now_s and best.transition_s > 0
    for other in proposals:
        check(asked, other.plan)
        assert other.latency_new_s <= best.latency_new_s * 1.1 and other.peak_bytes <= other.usable_bytes


@settings(deadline=None, max_examples=12)
@given(lost=st.integers(0, 28), asynchronous=st.booleans())
def test_after_a_loss_plans_stand_on_what_is_left(lost: int, asynchronous: bool) -> None:
    asked = on(running(question(asynchronous=asynchronous)), range(lost, lost + 4))
    assert asked.current is not None
    proposals = propose(asked)
    assert not isinstance(proposals, Infeasible)
    for one in proposals:
        check(asked, one.plan)
        assert one.peak_bytes <= one.usable_bytes
        old = {emu.id: emu for emu in asked.current.emus}
        whole = {emu.id for emu in intact(asked).emus}
        for emu in one.plan.emus:
            assert emu.id not in old or (emu.id in whole and old[emu.id] == emu), "an ordinal was used twice"
    if set(asked.current.slots()) & set(range(lost, lost + 4)):
        assert proposals[0].latency_now_s == math.inf


def test_state_that_is_gone_leaves_no_move() -> None:
    asked = running(question())
    assert asked.current is not None
    units = asked.current.of(POLICY_TRAINING)
    lost = sorted({slot for emu in units for slot in emu.slots[:1]})
    pricing = replace(asked.pricing, cluster=CLUSTER.without(lost))
    proposals = propose(replace(asked, pricing=pricing))
    assert not isinstance(proposals, Infeasible)
    assert all("only a checkpoint has it" in one.stuck for one in proposals)


def test_units_of_no_algorithm_stay() -> None:
    asked = running(question())
    assert asked.current is not None
    relay = Emu(POLICY_WEIGHTS, 0, Layout(), (4000,))
    current = replace(asked.current, emus=(*asked.current.emus, relay), recomputed=(POLICY_TRAINING,))
    longer = replace(WORKLOAD, responses=Lengths.fixed(12288))
    asked = replace(asked, current=current, pricing=replace(asked.pricing, workload=longer))
    proposals = propose(asked)
    assert not isinstance(proposals, Infeasible)
    assert all(relay in one.plan.emus for one in proposals)
    assert latency_now(asked) < math.inf


def test_pins_hold() -> None:
    pinned = replace(question(), pins=(Pin(POLICY_TRAINING, dp=4, tp=4, pp=2),))
    found = started(pinned)
    assert replications(found.placement.plan)[POLICY_TRAINING] == Replication(4, Layout(4, 2))
    tight = replace(question(), pins=(Pin(POLICY_TRAINING, tp=1, pp=1),))
    lost = start_plan(tight)
    assert isinstance(lost, Infeasible) and lost.constraint == "memory" and "t1p1" in lost.because
    never = start_plan(replace(question(), pins=(Pin(POLICY_TRAINING, dp=3),)))
    assert isinstance(never, Infeasible) and never.constraint == "candidates"


def test_what_is_short_is_said_in_bytes() -> None:
    lost = start_plan(question(slots=1))
    assert isinstance(lost, Infeasible) and lost.constraint == "memory"
    assert lost.shortfall > 0 and "policy.training needs at least" in lost.because
    more = replace(CLUSTER.device, memory_bytes=CLUSTER.device.memory_bytes + 1.2 * lost.shortfall)
    roomy = question(slots=1)
    pricing = replace(roomy.pricing, cluster=replace(roomy.pricing.cluster, device=more))
    again = start_plan(replace(roomy, pricing=pricing))
    assert not (isinstance(again, Infeasible) and again.constraint == "candidates")
    assert usable_bytes(int(more.memory_bytes)) > usable_bytes(int(CLUSTER.device.memory_bytes))


def with_memory(asked: Question, size: float) -> Question:
    device = replace(CLUSTER.device, memory_bytes=size)
    return replace(asked, pricing=replace(asked.pricing, cluster=replace(asked.pricing.cluster, device=device)))


def test_the_margin_of_memory_is_given_up_last() -> None:
    """A device of which the leanest plan needs 96 %, more than the margin allows."""
    asked, size = question(slots=1), CLUSTER.device.memory_bytes
    while isinstance(lost := start_plan(with_memory(asked, size)), Infeasible):
        needed = usable_bytes(int(size)) + lost.shortfall
        size = needed * 1.101
    tight = with_memory(asked, needed / 0.96)
    assert answer(tight, 1, Widening.RECOMPUTE).proposals == ()
    (found, *_) = answer(tight, 1, Widening.MARGIN).proposals
    assert usable_bytes(int(needed / 0.96)) < found.peak_bytes <= found.usable_bytes < needed / 0.96


def test_widening_adds_and_never_takes_away() -> None:
    narrow = Space(recompute=(False,))
    assert widened(narrow, Widening.PLANS) == narrow
    assert widened(narrow, Widening.MICRO_BATCH).uneven
    assert widened(narrow, Widening.RECOMPUTE).recompute == (False, True)


def test_questions_and_answers_travel() -> None:
    asked = running(question(asynchronous=True))
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Question)
    assert there == asked
    found = answer(there, 3)
    assert found.search == 3 and found == answer(asked, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=PlanFound) == found


def drive(asked: Question, lost: tuple[int, ...]) -> list[object]:
    """Play a loss through the controller with real answers; return the effects."""
    assert asked.current is not None
    controller = Controller(asked.current, Monitor(int(CLUSTER.device.memory_bytes)))
    effects: list[object] = []
    pending = list(controller.on(SlotsLost(5, lost)))
    after = replace(asked, pricing=replace(asked.pricing, cluster=CLUSTER.without(lost)))
    while pending:
        effect = pending.pop(0)
        effects.append(effect)
        if isinstance(effect, Search):
            pending += controller.on(answer(after, effect.search, effect.widening))
    return effects


def test_the_controller_is_answered_after_a_loss() -> None:
    asked = running(question(asynchronous=True))
    assert asked.current is not None
    generation = asked.current.of(asked.pricing.workflow.model_stages[0])
    effects = drive(asked, generation[0].slots[:1])
    begun = [effect for effect in effects if isinstance(effect, BeginTransition)]
    assert len(begun) == 1
    check(on(asked, range(generation[0].slots[0], generation[0].slots[0] + 1)), begun[0].plan)


def test_the_controller_restarts_when_trained_state_is_gone() -> None:
    asked = running(question())
    assert asked.current is not None
    lost = tuple(sorted({emu.slots[0] for emu in asked.current.of(POLICY_TRAINING)}))
    effects = drive(asked, lost)
    assert isinstance(effects[-1], Restart)


def test_what_does_not_fit_otherwise_is_recomputed_and_the_plan_says_so() -> None:
    def found(recompute: tuple[bool, ...]) -> Plan | Infeasible:
        asked = question(slots=8)
        space = Space(recompute=recompute, micro_batch_tokens=16384)
        placed = start_plan(replace(asked, pricing=replace(asked.pricing, space=space)))
        return placed.placement.plan if isinstance(placed, Found) else placed

    assert isinstance(found((False,)), Infeasible)
    plan = found((False, True))
    assert isinstance(plan, Plan) and plan.recomputed == (POLICY_TRAINING,)


def test_a_plan_that_runs_is_priced_as_it_recomputes() -> None:
    asked = running(replace(question(), pricing=replace(question().pricing, space=Space(recompute=(False,)))))
    assert asked.current is not None and asked.current.recomputed == ()
    either = replace(asked, pricing=replace(asked.pricing, space=Space()))
    again = replace(either, current=replace(asked.current, recomputed=(POLICY_TRAINING,)))
    assert latency_now(asked) == latency_now(either) < latency_now(again)
