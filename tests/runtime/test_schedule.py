"""Which plan does a job file ask for, and when is it due?"""

from __future__ import annotations

import pytest

from nereus.config import AdaptConfig, ClusterConfig, JobConfig, RolloutConfig, TrainConfig
from nereus.control.estimate import StepFacts
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan
from nereus.runtime.placement import initial_plan, next_plan
from nereus.runtime.schedule import MAX_TRIES, GivenPlans, Schedule
from nereus.runtime.surroundings import RunFailed


def _job(at: str = "") -> JobConfig:
    return JobConfig(
        cluster=ClusterConfig(slots=4),
        rollout=RolloutConfig(layout="d2t1p1"),
        train=TrainConfig(layout="d2t1p1"),
        adapt=AdaptConfig(at=at),
    )


def _schedule(at: str = "", step: int = 0) -> tuple[Schedule, Plan]:
    job = _job(at)
    plan = initial_plan(job)
    return Schedule(job, plan, step), plan


def _layouts(plan: Plan) -> str:
    return f"{plan.replication(POLICY_TRAINING)} {plan.replication(POLICY_GENERATION)}"


def _degraded(plan: Plan) -> Plan:
    """Lose the first trainer unit."""
    gone = plan.of(POLICY_TRAINING)[0]
    return Plan(1, tuple(emu for emu in plan.emus if emu != gone))


def test_nothing_is_due_while_the_plan_is_what_was_asked_for() -> None:
    schedule, plan = _schedule()
    assert schedule.wish(7, plan, range(4)) is None


def test_a_change_is_due_from_its_step_on() -> None:
    schedule, plan = _schedule("3 d1t2p1 d2t1p1")
    assert schedule.wish(2, plan, range(4)) is None
    wish = schedule.wish(3, plan, range(4))
    assert wish is not None
    assert _layouts(wish.plan) == "d1t2p1 d2t1p1"
    assert "after step 3" in wish.why


def test_a_resumed_run_goes_back_to_the_newest_change_before_it() -> None:
    schedule, plan = _schedule("3 d1t2p1 d2t1p1; 6 d1t1p2 d1t1p1; 9 d2t1p1 d1t1p1", step=7)
    wish = schedule.wish(7, plan, range(4))
    assert wish is not None
    assert _layouts(wish.plan) == "d1t1p2 d1t1p1"


def test_what_was_lost_is_due_again_when_there_are_slots_enough() -> None:
    schedule, plan = _schedule()
    left = _degraded(plan)
    assert schedule.wish(5, left, [1, 2, 3]) is None
    wish = schedule.wish(5, left, range(4))
    assert wish is not None
    assert _layouts(wish.plan) == "d2t1p1 d2t1p1"


def test_a_change_that_fails_is_tried_again_but_not_for_ever() -> None:
    schedule, plan = _schedule("3 d1t2p1 d2t1p1")
    for _ in range(MAX_TRIES):
        wish = schedule.wish(3, plan, range(4))
        assert wish is not None
        schedule.began(wish.plan)
        schedule.ended(plan, "it broke", 1.0)
    assert schedule.wish(4, plan, range(4)) is None


def test_ordinals_of_tried_plans_are_not_used_again() -> None:
    schedule, plan = _schedule("3 d1t2p1 d2t1p1")
    wish = schedule.wish(3, plan, range(4))
    assert wish is not None
    schedule.began(wish.plan)
    again = schedule.wish(3, plan, range(4))
    assert again is not None
    assert again.plan.of(POLICY_TRAINING)[0].ordinal > wish.plan.of(POLICY_TRAINING)[0].ordinal


def test_a_drained_slot_is_left_when_another_takes_its_place() -> None:
    job = _job()
    plan = initial_plan(job)
    given = GivenPlans(Schedule(job, plan, 0))
    assert "need 4 slots and 3 would be left" in given.drain([3], [0, 1, 2])
    assert given.wish(1, plan, range(4)) is None
    assert given.drain([3], [0, 1, 2, 4]) == ""
    wish = given.wish(1, plan, [0, 1, 2, 4])
    assert wish is not None
    assert {slot for emu in wish.plan.of(POLICY_GENERATION) for slot in emu.slots} == {2, 4}
    there = next_plan(plan, *(plan.replication(stage) for stage in (POLICY_TRAINING, POLICY_GENERATION)), [0, 1, 2, 4])  # type: ignore[arg-type]
    assert given.wish(2, there, [0, 1, 2, 4]) is None


def test_a_step_that_does_not_fit_ends_a_job_whose_plans_are_given() -> None:
    job = _job()
    given = GivenPlans(Schedule(job, initial_plan(job), 0))
    with pytest.raises(RunFailed, match=r"slot 0 needs 7 MB; lower train.micro_batch_tokens"):
        given.out_of_memory(StepFacts((), (), {}), "slot 0 needs 7 MB")
