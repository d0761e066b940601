"""Fixed placements of other systems: who shares slots with whom, and that nothing changes."""

from __future__ import annotations

import pytest

from nereus.core.plan import POLICY_GENERATION, Layout, Plan, Stage
from nereus.core.profiles import load_cluster, load_model
from nereus.errors import ConfigError
from nereus.sim.job import SynchronousJob, estimate_of
from nereus.sim.noise import Noise
from nereus.sim.policies.openrlhf_style import OpenRLHFStyle
from nereus.sim.policies.verl_style import VerlStyle
from nereus.sim.policy import Opening
from nereus.sim.stages import Sampled, Stages
from nereus.sim.synchronous import run_synchronous
from nereus.sim.trace import StepLengths, Trace

pytestmark = pytest.mark.deep

STEADY = Trace("steady", "test", (StepLengths(500, 800),))


def job(slots: int = 16) -> SynchronousJob:
    cluster = load_cluster("a100-64g-256", slots)
    return SynchronousJob(cluster=cluster, model=load_model("llama-3.1-8b"), prompts=64, steps=2, calibrate_steps=9)


def opening(made: SynchronousJob, *, sharded: bool) -> Opening:
    question = estimate_of(made, STEADY).question(made.cluster, Plan(-1, ()), {})
    sampled = Sampled(tuple((256, (500,)) for _ in range(64)), tuple((256, 500) for _ in range(64)))
    return Opening(question, Stages(made, Noise(0), STEADY, sharded=sharded), sampled, STEADY)


def test_colocated_model_stages_use_all_slots() -> None:
    made = job()
    plan = VerlStyle().opening(opening(made, sharded=False))
    for stage in made.workflow.model_stages:
        assert {slot for unit in plan.of(stage) for slot in unit.slots} == set(range(16)), str(stage)


def test_engines_and_pairs_have_slots_of_their_own_and_trainers_share_state() -> None:
    plan = OpenRLHFStyle().opening(opening(job(), sharded=True))
    of = {str(stage): {slot for unit in plan.of(stage) for slot in unit.slots} for stage in plan.model_stages()}
    assert of["policy.training"] == of["reference.inference"]
    assert of["critic.training"] == of["critic.inference"] == of["reward.inference"]
    apart = [of[str(POLICY_GENERATION)], of["policy.training"], of["critic.training"]]
    assert sum(map(len, apart)) == len(set.union(*apart)) == 16
    assert all(plan.of(stage)[0].layout == Layout() for stage in plan.model_stages() if stage.stage is Stage.TRAINING)


def test_members_on_the_same_slots_take_turns() -> None:
    start = opening(job(), sharded=False)
    plan = VerlStyle().opening(start)
    done = run_synchronous(job(), STEADY, VerlStyle())
    one = start.stages.took(plan, start.question.pricing.workflow.model_stages[-1], start.sampled, 0).seconds
    assert done.steps[0].phases_s["training"] > 1.5 * one
    assert not done.changes and {band.epoch for band in done.bands} == {0}


@pytest.mark.parametrize("policy", [VerlStyle(), OpenRLHFStyle()])
def test_what_fits_nowhere_is_refused(policy: VerlStyle | OpenRLHFStyle) -> None:
    with pytest.raises(ConfigError, match="fits"):
        run_synchronous(job(2), STEADY, policy)
