"""Small simulated runs for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nereus.algo.history import check_history
from nereus.bus.messages import StepReport
from nereus.config import (
    AdaptConfig,
    AsyncConfig,
    CheckpointConfig,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from nereus.core.plan import Plan
from nereus.core.profiles import load_model
from nereus.runtime.fleet import Worker
from nereus.runtime.journal import plain, read_journal
from nereus.runtime.surroundings import Outcome, TransitionProgress
from nereus.sim.loop import run_virtual
from nereus.sim.simulation import Simulation
from nereus.sim.trace import Trace

QUIET = Trace("quiet", "test: nothing changes")
SHAPE = load_model("llama-3.1-8b")


def job(*, slots: int = 16, steps: int = 8, train: str = "d2t2p2", rollout: str = "d4t2p1") -> JobConfig:
    """Return a small job of a real model: 16 groups of 4."""
    return JobConfig(
        run=RunConfig(steps=steps),
        cluster=ClusterConfig(slots=slots, device="cuda", transport="nccl", profile="a100-64g-256"),
        model=ModelConfig(path="llama-3.1-8b", dtype="bfloat16"),
        rollout=RolloutConfig(
            backend="simulated",
            layout=rollout,
            group_size=4,
            max_prompt_tokens=512,
            max_new_tokens=2048,
            max_live=64,
        ),
        train=TrainConfig(layout=train, groups_per_step=16, micro_batch_tokens=8192, recompute=True),
        async_=AsyncConfig(staleness=1),
        checkpoint=CheckpointConfig(every=5),
        adapt=AdaptConfig(mode="on"),
    )


class Watched:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self.reports: list[StepReport] = []
        self.seconds: list[float] = []
        self.plans: list[Plan] = []
        self.notes: list[str] = []

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        self.reports.append(report)
        self.seconds.append(metrics["timing_s/step"])
        assert self.simulation is not None
        self.simulation.stepped(report.step + 1)

    def fleet(self, workers: Iterable[Worker]) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def transition(self, progress: TransitionProgress) -> None:
        """Not shown."""


def simulate(
    config: JobConfig, folder: Path, *, trace: Trace = QUIET, watched: Watched | None = None, **options: Any
) -> tuple[Outcome, Watched]:
    """Run a job to its end."""
    watched = watched or Watched()

    async def main() -> Outcome:
        watched.simulation = Simulation(config, SHAPE, trace, folder / "journal.jsonl", watched, **options)
        async with asyncio.timeout(1e7):
            return await watched.simulation.run()

    return run_virtual(main()), watched


def problems(folder: Path, config: JobConfig) -> list[str]:
    """Return what is wrong with the history of a run."""
    records = list(plain(read_journal(folder / "journal.jsonl").entries))
    return check_history(records, staleness=config.async_.staleness, groups_per_step=config.train.groups_per_step)
