"""What does the planner take a job's slots to be?"""

from __future__ import annotations

import pytest

from nereus.config import AdaptConfig, ClusterConfig, EmulateConfig, JobConfig, RolloutConfig, TrainConfig
from nereus.control.choose import choose
from nereus.control.efficiency import OperationClass
from nereus.control.problem import Infeasible
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING
from nereus.core.profiles import load_cluster
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError
from nereus.runtime.placement import initial_plan
from nereus.runtime.pool import cluster_of, starting_estimate

SHAPE = ModelShape(4, 128, 4, 4, 32, 256, 512, 1024)


def _job(mode: str = "on", **emulate: float) -> JobConfig:
    return JobConfig(
        cluster=ClusterConfig(slots=6),
        rollout=RolloutConfig(layout="d3t1p1", max_prompt_tokens=32, max_new_tokens=32),
        train=TrainConfig(layout="d1t2p1"),
        adapt=AdaptConfig(mode=mode),  # type: ignore[arg-type]
        emulate=EmulateConfig(**emulate),  # type: ignore[arg-type]
    )


def test_emulated_figures_replace_those_of_the_profile() -> None:
    stated = load_cluster("cpu", 6)
    assert cluster_of(_job()).device == stated.device
    made = cluster_of(_job(memory_mb=64, gflops=2.0, memory_gb_s=3.0, link_gb_s=0.5, link_latency_us=70))
    assert (made.device.memory_bytes, made.device.flops_per_s, made.device.bytes_per_s) == (64e6, 2e9, 3e9)
    assert (made.in_node.bytes_per_s, made.in_node.latency_s) == (5e8, pytest.approx(7e-5))
    assert [len(node.slots) for node in made.nodes] == [6]


def test_an_emulated_slot_is_believed_to_reach_what_is_stated() -> None:
    job = _job(gflops=2.0)
    efficiencies = starting_estimate(job, SHAPE, cluster_of(job)).pricing.efficiencies
    assert efficiencies[OperationClass.GEMM] == 1.0
    assert efficiencies[OperationClass.DECODE] < 1.0


@pytest.mark.parametrize("mode", ["on", "replicas"])
def test_what_the_backends_cannot_do_is_not_offered(mode: str) -> None:
    job = _job(mode)
    estimate = starting_estimate(job, SHAPE, cluster_of(job))
    question = estimate.question(cluster_of(job), initial_plan(job), {})
    problem, best = choose(question)
    assert not isinstance(best, Infeasible)
    for member in problem.members():
        for candidate in member.candidates:
            if candidate.model_stage == POLICY_GENERATION:
                assert candidate.layout.slots == 1
            elif mode == "replicas":
                assert (candidate.model_stage, str(candidate.layout)) == (POLICY_TRAINING, "t2p1")


def test_a_profile_that_is_not_known_is_refused() -> None:
    job = JobConfig(cluster=ClusterConfig(slots=2, profile="no-such-machine"))
    with pytest.raises(ConfigError, match="no-such-machine"):
        cluster_of(job)
