"""How does a simulated run leave the same files behind as a live one?

Owner: ``nereus simulate`` and comparisons. A run folder with journal, metrics and STATUS, and what a person sees while
it goes on. Invariants (tests/commands/test_simulate.py): ``nereus explain``, ``status`` and ``report`` read a simulated
run as a live one; seconds are virtual everywhere but in STATUS.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import Struct

from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.core.shape import ModelShape
from nereus.errors import NereusError
from nereus.runtime.display import Display
from nereus.runtime.fleet import Worker
from nereus.runtime.folder import RunFolder
from nereus.runtime.journal import read_journal, replay
from nereus.runtime.logs import configure_logs
from nereus.runtime.metrics import read_metrics
from nereus.runtime.observer import RunObserver
from nereus.runtime.summary import Summary, summarize
from nereus.runtime.surroundings import Outcome
from nereus.sim.course import Failures
from nereus.sim.figures import Figures, figures
from nereus.sim.loop import run_virtual
from nereus.sim.policy import Policy
from nereus.sim.simulation import Simulation
from nereus.sim.trace import Trace


class Recorded(Struct, frozen=True):
    """What came of a simulated run."""

    summary: Summary
    policy: str
    trace: str
    seed: int
    virtual_s: float
    restores: int
    """How often the run went back to a checkpoint."""
    cpu_s: float
    """What simulating it took."""
    figures: Figures
    """Staleness, tails, and where the time went."""


class _Watch(RunObserver):
    """Passes reports on, the fleet once a step: with a thousand slots it changes too often to be shown each time."""

    simulation: Simulation
    _workers: Iterable[Worker] = ()

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        super().step(report, metrics)
        super().fleet(self._workers)
        self.simulation.stepped(report.step + 1)

    def fleet(self, workers: Iterable[Worker]) -> None:
        self._workers = workers


def record(
    config: JobConfig,
    shape: ModelShape,
    trace: Trace,
    folder: RunFolder,
    display: Display,
    *,
    policy: Policy,
    seed: int,
    failures: Failures,
) -> Recorded:
    """Simulate a job into ``folder``; raises what ended it if that was a failure, with everything on disk."""
    configure_logs(
        file=folder.logs / "supervisor.log", log_format=config.run.log_format, level="warning", run=folder.name
    )
    began = time.process_time()
    made: list[Simulation] = []
    virtual: list[float] = []

    async def main() -> Outcome:
        watch = _Watch(config, folder, display)
        watch.simulation = Simulation(
            config,
            shape,
            trace,
            folder.journal,
            watch,
            policy=policy,
            seed=seed,
            failures=failures,
            run_id=folder.name,
        )
        made.append(watch.simulation)
        try:
            return await watch.simulation.run()
        finally:
            virtual.append(watch.simulation.now_s)
            watch.close()

    folder.write_status("starting")
    failure = ""
    try:
        outcome = run_virtual(main())
    except NereusError as error:
        failure = str(error)
        raise
    finally:
        entries = read_journal(folder.journal).entries
        progress = replay(entries)
        reason = failure or "ended"
        folder.write_status(
            "failed" if failure else "finished", step=progress.step, version=progress.version, reason=reason
        )
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else ()
    summary = summarize(rows, progress, run=folder.name, outcome=outcome.reason)
    cpu_s = time.process_time() - began
    return Recorded(summary, policy.name, trace.name, seed, virtual[0], made[0].restores, cpu_s, figures(entries))
