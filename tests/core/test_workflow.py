"""Which model-stages exist, and which may share slots?"""

from __future__ import annotations

import itertools

import pytest

from nereus.core.plan import Emu, Layout, ModelStage, Plan
from nereus.core.workflow import Algorithm, Boundary, Workflow, workflow

ALL = [
    workflow(algorithm, asynchronous=mode, reference=reference, reward_model=reward)
    for algorithm, mode, reference, reward in itertools.product(Algorithm, (False, True), (False, True), (False, True))
]


@pytest.mark.parametrize("flow", ALL, ids=str)
def test_every_model_stage_is_in_one_phase(flow: Workflow) -> None:
    listed = [stage for side in flow.sides for phase in side for stage in phase]
    assert len(set(listed)) == len(listed) and set(listed) == set(flow.model_stages)
    assert all(phase for side in flow.sides for phase in side)


def test_synchronous_ppo_has_six_model_stages_in_three_phases() -> None:
    flow = workflow(Algorithm.PPO)
    assert [len(phase) for phase in flow.sides[0]] == [1, 3, 2] and len(flow.model_stages) == 6
    assert flow.boundary is Boundary.RL_STEP and flow.trained == ("critic", "policy")


def test_asynchronous_generation_runs_beside_everything_else() -> None:
    flow = workflow(Algorithm.GRPO, asynchronous=True)
    generation, reference, training = map(
        ModelStage.parse, ("policy.generation", "reference.inference", "policy.training")
    )
    assert flow.concurrent(generation, training) and flow.concurrent(generation, reference)
    assert not flow.concurrent(reference, training) and flow.boundary is Boundary.WEIGHT_SYNC


def test_conflicts_are_slots_of_units_that_run_together() -> None:
    names = ("policy.generation", "policy.training")
    plan = Plan(1, tuple(Emu(ModelStage.parse(name), 0, Layout(2, 1), (0, 1)) for name in names))
    synchronous = workflow(Algorithm.GRPO, reference=False, reward_model=False)
    concurrent = workflow(Algorithm.GRPO, asynchronous=True, reference=False, reward_model=False)
    assert synchronous.conflicts(plan) == () and concurrent.conflicts(plan) == (0, 1)


def test_remax_generates_a_baseline_for_each_prompt() -> None:
    assert workflow(Algorithm.REMAX, group_size=1).responses_per_sample == 2
    assert workflow(Algorithm.GRPO, group_size=8).responses_per_sample == 1


def test_an_unknown_model_stage_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"grpo has no model-stage critic\.training.*policy\.training"):
        workflow(Algorithm.GRPO).place(ModelStage.parse("critic.training"))
