"""How can a whole run live in one process, on virtual time? The real supervisor on the in-process bus.

Owner: tests (``tests/virtual``, with the real actors over stand-in devices) and the simulator (``simulation.py``, with
devices that take the time of real ones). Supervisor, controller, planner, admission, compiler and executor are those of
the live runtime, driven by the same messages; what a world adds is the processes and what they compute with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from nereus.actors.names import SUPERVISOR
from nereus.bus.memory import MemoryBus
from nereus.config import JobConfig
from nereus.core.plan import Plan
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import Dataset
from nereus.runtime.journal import Journal, RunEnded, RunStarted
from nereus.runtime.readopt import Takeover
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered, Asked, solve
from nereus.runtime.supervisor import Supervisor
from nereus.runtime.surroundings import Observer, Origin, Outcome
from nereus.sim.processes import VirtualProcesses

Adapt = Callable[[Callable[[Answered], None]], Planning]
"""Makes what decides about plans, given whom to tell of answers."""


class Setting(Struct, frozen=True):
    """What a run is made of besides its processes."""

    config: JobConfig
    plan: Plan
    origin: Origin
    dataset: Dataset
    checkpoints: CheckpointStore
    journal: Journal
    run_id: str = "virtual"
    attempt: int = 1
    tick_s: float = 1.0
    """How often the supervisor looks at its deadlines."""


class World:
    """One attempt of one run."""

    def __init__(
        self,
        setting: Setting,
        bus: MemoryBus,
        processes: VirtualProcesses,
        observer: Observer,
        adapt: Adapt | None = None,
    ) -> None:
        self.setting = setting
        self.bus = bus
        self.processes = processes
        self.endpoint = bus.server(SUPERVISOR)
        self.supervisor = self.supervise(observer, adapt)

    def supervise(self, observer: Observer, adapt: Adapt | None, takeover: Takeover | None = None) -> Supervisor:
        """Make the supervisor of the present setting."""
        setting = self.setting
        return Supervisor(
            setting.config,
            setting.plan,
            run_id=setting.run_id,
            attempt=setting.attempt,
            store="",
            origin=setting.origin,
            endpoint=self.endpoint,
            launcher=self.processes,
            journal=setting.journal,
            dataset=setting.dataset,
            checkpoints=setting.checkpoints,
            observer=observer,
            adapt=adapt,
            tick_s=setting.tick_s,
            watched=False,
            takeover=takeover,
        )

    def announce(self, config: str = "", data: str = "") -> None:
        """Say in the journal from where this attempt goes on; fingerprints of configuration and data are optional."""
        self.setting.journal.append(self.started(config, data))

    def started(self, config: str = "", data: str = "") -> RunStarted:
        """Return the record with which this attempt begins."""
        origin = self.setting.origin
        return RunStarted(
            run=self.setting.run_id,
            attempt=self.setting.attempt,
            config=config,
            data=data,
            seed=self.setting.config.run.seed,
            wall=0.0,
            step=origin.step,
            version=origin.version,
            cursor=origin.cursor.frontier,
        )

    async def run(self) -> Outcome:
        """Run to the end and leave nobody behind; the journal stays open."""
        outcome: Outcome | None = None
        reason = "failed"
        try:
            outcome = await self.supervisor.run()
            reason = outcome.reason
            return outcome
        finally:
            await self.supervisor.leave(reason)


def ended(journal: Journal, outcome: Outcome | None, reason: str) -> None:
    """Write the last record of a run and close its journal."""
    journal.append(RunEnded(reason=reason, ok=outcome is not None))
    journal.close()


class SearchHere:
    """Searches in this process; each search takes ``seconds`` of virtual time."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds

    async def prepare(self) -> None:
        """Nothing to prepare."""

    async def search(self, asked: Asked) -> Answered:
        await asyncio.sleep(self._seconds)
        return solve(asked)

    async def close(self) -> None:
        """Nothing to close."""


def model_files(folder: Path, config: str = "{}") -> Path:
    """Make the least that a run needs of a model's folder."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(config)
    return model
