"""Which jobs are simulated for the evaluation?

The asynchronous one is that of ``launchers/simulated/grpo_8b.toml`` (tests/sim/test_evaluation.py holds them equal),
so that every figure can be made again with ``nereus simulate`` or ``nereus compare``, too.
"""

from __future__ import annotations

from msgspec.structs import replace

from nereus.config import (
    AdaptConfig,
    AsyncConfig,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrackConfig,
    TrainConfig,
)


def base_job() -> JobConfig:
    """Return asynchronous GRPO of an 8B model on 64 A100."""
    return JobConfig(
        run=RunConfig(name="simulated", steps=20),
        cluster=ClusterConfig(slots=64, device="cuda", transport="nccl", profile="a100-64g-256"),
        model=ModelConfig(path="llama-3.1-8b", dtype="bfloat16"),
        rollout=RolloutConfig(
            backend="simulated",
            layout="d8t4p1",
            group_size=8,
            max_prompt_tokens=512,
            max_new_tokens=4096,
            max_live=256,
        ),
        train=TrainConfig(layout="d4t4p2", groups_per_step=64, micro_batch_tokens=8192, recompute=True),
        async_=AsyncConfig(staleness=1),
        adapt=AdaptConfig(mode="on"),
        track=TrackConfig(tensorboard=False),
    )


def sized(
    config: JobConfig, *, profile: str, slots: int, train: str, rollout: str, steps: int, longest: int = 4096
) -> JobConfig:
    """Return the job on another cluster, beginning with these layouts."""
    return replace(
        config,
        run=replace(config.run, steps=steps),
        cluster=replace(config.cluster, profile=profile, slots=slots),
        train=replace(config.train, layout=train),
        rollout=replace(config.rollout, layout=rollout, max_new_tokens=longest),
    )
