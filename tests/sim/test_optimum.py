"""The planner's choice beside the best that was executed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nereus.sim.evaluation.optimum import optimum_job, steady, told
from nereus.sim.noise import Noise
from nereus.sim.optimum import compared
from nereus.sim.stages import Stages, sample_of

pytestmark = pytest.mark.deep


def test_no_choice_is_faster_than_the_best_and_both_were_executed_in_truth() -> None:
    job, trace = replace(optimum_job(8), prompts=32, calibrate_steps=2), steady(1024)
    one = compared(job, trace, most=4)
    assert one.executed > 4
    assert one.gap >= 0
    stages, sampled = Stages(job, Noise(0, scale=0.0), trace), sample_of(job, trace, 0, 2)
    for made in (one.chosen, one.best):
        assert made.seconds == stages.step_s(made.plan, sampled, 2)
        assert set(made.stages) == set(job.workflow.model_stages)
        for stage, (_, measured_s) in made.stages.items():
            assert measured_s == stages.took(made.plan, stage, sampled, 2).seconds
    assert f"best of {one.executed}" in told(one)
    assert one == compared(job, trace, most=4)
