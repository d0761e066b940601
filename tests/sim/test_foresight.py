"""The oracle of synchronous runs: nothing in its own terms is cheaper than its course, and the world follows it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nereus.core.plan import Plan
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm
from nereus.errors import ConfigError
from nereus.sim.job import SynchronousJob, estimate_of, pool_of
from nereus.sim.noise import Noise
from nereus.sim.policies import foresight
from nereus.sim.policies.foresight import Course, Foresight, course
from nereus.sim.policy import Nereus, Opening
from nereus.sim.stages import Stages, sample_of
from nereus.sim.synchronous import run_synchronous
from nereus.sim.trace import StepLengths, StepSupply, Supply, Trace

pytestmark = pytest.mark.deep

LENGTHS = (StepLengths(800, 1000), StepLengths(900, 1100), *[StepLengths(1800, 2100)] * 5)
TRACE = Trace("growing", "test", LENGTHS, step_supply=(StepSupply(0, 8), StepSupply(3, 16)))
JOB = SynchronousJob(
    cluster=load_cluster("a100-64g-256", 16),
    model=load_model("llama-3.1-8b"),
    algorithm=Algorithm.GRPO,
    steps=6,
    prompts=16,
    group_size=4,
    calibrate_steps=99,
)


def opening(trace: Trace = TRACE) -> Opening:
    pool = pool_of(JOB.cluster, range(8))
    question = estimate_of(JOB, trace).question(pool, Plan(-1, ()), {})
    return Opening(question, Stages(JOB, Noise(0, scale=0.0), trace), sample_of(JOB, trace, 0, 0), trace)


@pytest.fixture(scope="module")
def found() -> Course:
    return course(opening())


def test_no_single_plan_is_cheaper_and_the_bound_lies_below(found: Course) -> None:
    start = opening()
    assert len(found.choices) == JOB.steps
    assert found.bound_s <= found.seconds
    samples = [sample_of(JOB, TRACE, 0, step) for step in range(JOB.steps)]
    for choice in {one.plan: one for one in found.choices}.values():
        if len(choice.plan.slots()) > 8:
            continue  # there are not so many in the first steps
        alone = sum(start.stages.step_s(choice.plan, sampled, step) for step, sampled in enumerate(samples))
        assert found.seconds <= alone + 1e-6
    assert max(slot for choice in found.choices[:3] for slot in choice.plan.slots()) < 8


def test_changes_that_cost_more_than_they_save_are_not_made(found: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight._World, "change_s", lambda *_: 1e6)
    dear = course(opening())
    assert len({choice.plan for choice in dear.choices}) == 1
    assert len({choice.plan for choice in found.choices}) > 1


def test_the_world_follows_the_course(found: Course) -> None:
    done, other = run_synchronous(JOB, TRACE, Foresight(), noise=0.0), run_synchronous(JOB, TRACE, Nereus(), noise=0.0)
    assert len(done.steps) == JOB.steps and all(change.ok for change in done.changes)
    assert [change.step for change in done.changes] == [
        step for step in range(1, JOB.steps) if found.choices[step] is not found.choices[step - 1]
    ]
    assert done.virtual_s >= found.bound_s
    assert done.virtual_s <= 1.02 * other.virtual_s


def test_supply_by_time_cannot_be_foreseen() -> None:
    with pytest.raises(ConfigError, match="by time"):
        course(opening(replace(TRACE, step_supply=(), supply=(Supply(0.0, 8), Supply(100.0, 16)))))
