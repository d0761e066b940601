"""Does a run survive whatever fails, without losing or repeating a sample?

Slots are killed and fall silent at random while the live supervisor runs a job on virtual time; the journal of each run
is checked (``nereus/algo/history.py``): every group trained once, in time, none skipped. A wait that nobody can end is
a ``Deadlock``. Owner: ``make storms`` and the evaluation. Invariant (tests/sim/test_evaluation.py): equal arguments
give equal storms.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from nereus.algo.history import check_history
from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.core.profiles import load_model
from nereus.errors import NereusError
from nereus.runtime.journal import plain, read_journal, replay
from nereus.runtime.surroundings import Unobserved
from nereus.sim.course import Failures
from nereus.sim.evaluation.jobs import base_job
from nereus.sim.loop import Deadlock, run_virtual
from nereus.sim.policy import Policy
from nereus.sim.simulation import Simulation
from nereus.sim.trace import Trace

CALM = Trace("calm", "nothing changes but what fails")
FOREVER_S = 1e8


class Stormed(Struct, frozen=True):
    """What came of one storm."""

    wrong: str
    """Empty: nothing. ``deadlock: ...``, ``ended: ...`` or ``history: ...``"""
    virtual_s: float
    steps: int
    lost: int
    reissued: int
    changes: int
    restores: int


class _Nobody(Unobserved):
    """An observer that only tells the simulation of steps."""

    simulation: Simulation

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        self.simulation.stepped(report.step + 1)


def storm_job(slots: int, steps: int) -> JobConfig:
    """Return the job for so many slots: half of them train as t4p2 or t2p2, half generate as t2."""
    config = base_job()
    train = f"d{slots // 16}t4p2" if slots >= 64 else f"d{slots // 8}t2p2"
    groups = max(16, slots // 2)
    return replace(
        config,
        run=replace(config.run, steps=steps),
        cluster=replace(config.cluster, slots=slots),
        rollout=replace(config.rollout, layout=f"d{slots // 4}t2p1", group_size=4, max_new_tokens=2048),
        train=replace(config.train, layout=train, groups_per_step=groups),
        checkpoint=replace(config.checkpoint, every=10),
    )


def storm(
    config: JobConfig, seed: int, mtbf_s: float, *, policy: Policy | None = None, until_s: float = math.inf
) -> Stormed:
    """Run one storm to the end of the job, or until ``until_s`` of virtual time."""
    wrong, now_s, restores = "", 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"

        async def main() -> None:
            nonlocal now_s, restores
            nobody = _Nobody()
            simulation = nobody.simulation = Simulation(
                config,
                load_model(config.model.path),
                CALM,
                journal,
                nobody,
                policy=policy,
                seed=seed,
                failures=Failures(mtbf_s),
            )
            try:
                async with asyncio.timeout(min(until_s, FOREVER_S)):
                    await simulation.run()
            finally:
                now_s, restores = simulation.now_s, simulation.restores

        try:
            run_virtual(main())
        except Deadlock as error:
            wrong = f"deadlock: {error}"
        except TimeoutError as error:
            wrong = "" if now_s >= until_s else f"ended: {error}"
        except NereusError as error:
            wrong = f"ended: {error}"
        entries = read_journal(journal).entries
    groups = config.train.groups_per_step
    problems = check_history(plain(entries), staleness=config.async_.staleness, groups_per_step=groups)
    done = replay(entries)
    wrong = f"history: {problems[0]}" if problems else wrong
    return Stormed(wrong, now_s, done.step, done.lost, done.reissued, done.changes, restores)
