"""Which synchronous job is simulated, and what is believed of it before its first step?

Values only: algorithm, models, cluster and batch, and from them what the decision core is given: the job as the live
runtime's configuration names it, prices and the space of plans. Invariants (tests/sim/test_synchronous.py): what the
planner is told follows from the job and the trace's first step alone, never from the world's truth.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from nereus.config import (
    AdaptConfig,
    CheckpointConfig,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from nereus.control.breakdown import Pricing
from nereus.control.candidates import Space
from nereus.control.efficiency import Efficiencies
from nereus.control.estimate import Estimate
from nereus.core.cluster import Cluster
from nereus.core.plan import SlotId
from nereus.core.shape import ModelShape
from nereus.core.workflow import Algorithm, Workflow, workflow
from nereus.core.workload import Lengths, Workload
from nereus.sim.course import usual_lengths
from nereus.sim.trace import StepLengths, Trace


class SynchronousJob(Struct, frozen=True, kw_only=True):
    """A synchronous run: every step generates, scores and trains, one after the other.

    The cluster holds the most slots that the job ever has; the trace says how many are there.
    """

    cluster: Cluster
    model: ModelShape
    """Of the policy, and of every other model that ``others`` does not name."""
    others: dict[str, ModelShape] = {}
    """By role: critic, reference, reward."""
    algorithm: Algorithm = Algorithm.PPO
    steps: int = 25
    prompts: int = 1024
    """Of one step."""
    group_size: int = 1
    """Responses for each prompt."""
    minibatches: int = 4
    """Updates of one step."""
    longest_prompt: int = 1024
    longest_response: int = 6144
    micro_batch_tokens: int = 8192
    """What trainers and scorers pack into one pass; a longer sequence goes alone."""
    gamma: float = 0.5
    calibrate_steps: int = 4
    """Steps after which the first plan is compared with what was measured."""
    patience_s: float = 60.0
    """How long a lost slot may take to come back before the plan does without it."""
    checkpoint_every: int = 10

    @property
    def workflow(self) -> Workflow:
        return workflow(self.algorithm, group_size=self.group_size)

    @property
    def shapes(self) -> dict[str, ModelShape]:
        return {"policy": self.model, **self.others}

    def shape_of(self, model: str) -> ModelShape:
        return self.others.get(model, self.model)

    def lengths(self, trace: Trace, step: int) -> StepLengths:
        """Return what responses of ``step`` are like."""
        return trace.lengths_at(step) or usual_lengths(self.longest_response)


def pool_of(cluster: Cluster, present: Collection[SlotId]) -> Cluster:
    """Return the part of ``cluster`` that is there."""
    absent = [slot.id for slot in cluster.slots() if slot.id not in present]
    return cluster.without(absent) if absent else cluster


def pricing_of(job: SynchronousJob, responses: Lengths) -> Pricing:
    """Return what the planner starts from: priors for speeds, and responses as they are expected."""
    load = Workload(
        Lengths.fixed(max(1, job.longest_prompt // 2)),
        responses,
        job.prompts,
        job.group_size,
        job.minibatches,
    )
    space = Space(uneven=True, generation_pp=False, micro_batch_tokens=job.micro_batch_tokens)
    return Pricing(job.cluster, job.shapes, job.workflow, load, Efficiencies.prior(), space=space)


def estimate_of(job: SynchronousJob, trace: Trace) -> Estimate:
    """Return what is believed before the first step; how long the first responses will be is known."""
    return Estimate.starting(pricing_of(job, job.lengths(trace, 0).lengths(job.longest_response)))


def config_of(job: SynchronousJob, seed: int) -> JobConfig:
    """Return the job in the terms of the live runtime, as far as it has them: its layouts are the policy's to say."""
    return JobConfig(
        run=RunConfig(seed=seed, steps=job.steps),
        cluster=ClusterConfig(slots=job.cluster.size, device="cuda", transport="nccl", profile=job.cluster.name),
        model=ModelConfig(dtype="bfloat16"),
        rollout=RolloutConfig(
            backend="simulated",
            group_size=job.group_size,
            max_prompt_tokens=job.longest_prompt,
            max_new_tokens=job.longest_response,
        ),
        train=TrainConfig(
            groups_per_step=job.prompts,
            minibatches=job.minibatches,
            micro_batch_tokens=job.micro_batch_tokens,
        ),
        checkpoint=CheckpointConfig(every=job.checkpoint_every),
        adapt=AdaptConfig(mode="on", gamma=job.gamma, calibrate_steps=job.calibrate_steps, patience_s=job.patience_s),
    )
