"""How would a fixed way of running a job do in its first steps? Tries it in the world itself.

What users of such systems do before a long run: start it a few times in different ways, and keep the best. Each trial
is a simulation of its own without failures, on a loop of its own in a thread, because the run that asks stands inside
one. Invariants (tests/sim/test_sweep.py): a trial leaves nothing behind; equal jobs give equal trials.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.errors import NereusError
from nereus.runtime.surroundings import Outcome, Unobserved
from nereus.sim.loop import run_virtual
from nereus.sim.policy import AsStated, Known
from nereus.sim.serving import Serving
from nereus.sim.simulation import Simulation
from nereus.sim.trace import Trace

TRIED_STEPS = 10
COUNTED = slice(2, 8)
"""Not the first of them, and not the last, before which nothing is begun for later ones."""


class Trial(Struct, frozen=True):
    """What came of one."""

    config: JobConfig
    step_s: float
    staleness: float
    """The most that was seen."""


class _Fixed(AsStated, frozen=True):
    """Layouts as stated, on units that serve in the given way."""

    served: Serving
    name: str = "trial"
    source: str = "the job that is tried"

    def serving(self, config: JobConfig) -> Serving:
        return self.served


class _Noted(Unobserved):
    """Keeps the time and the staleness of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.staleness: list[float] = []

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        self.seconds.append(metrics["timing_s/step"])
        self.staleness.append(metrics["staleness/max"])


def tried(config: JobConfig, slots: int, known: Known, serving: Serving) -> Trial | None:
    """Run the first steps of a job on ``slots`` slots; None if it does not get through them."""
    checkpoint, run = replace(config.checkpoint, every=0), replace(config.run, steps=TRIED_STEPS)
    short = replace(config, run=run, checkpoint=checkpoint)
    trace = Trace(known.trace.name, known.trace.source, steps=known.trace.steps[:TRIED_STEPS])
    noted = _Noted()

    async def simulate(folder: Path) -> Outcome:
        policy = _Fixed(serving)
        return await Simulation(short, known.shape, trace, folder / "journal", noted, policy=policy).run()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(lambda: run_virtual(simulate(Path(folder)))).result()
        except NereusError:
            return None
    return Trial(config, statistics.fmean(noted.seconds[COUNTED]), max(noted.staleness))


def best(trials: Iterable[Trial | None]) -> Trial:
    """Return the fastest; ``ValueError`` if none got through."""
    through = [trial for trial in trials if trial is not None]
    if not through:
        raise ValueError("no layouts that were tried got through the first steps")
    return min(through, key=lambda trial: trial.step_s)
