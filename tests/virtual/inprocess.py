"""How can a whole run live in one process? The simulator's world (``nereus/sim/world.py``) with the real actors.

Only devices, rewards and processes are stand-ins (``backends/fake.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from nereus.actors.host import Actor
from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_of
from nereus.actors.rollout import RolloutActor
from nereus.actors.slot import SlotActor
from nereus.actors.trainer import TrainerActor
from nereus.actors.weights import Relay, WeightsActor
from nereus.actors.wiring import Wiring
from nereus.backends.fake import FakeCollectives, FakeReward, FakeRollout, FakeText, FakeTrainer, Pace
from nereus.bus.endpoint import Endpoint
from nereus.bus.memory import MemoryBus
from nereus.bus.messages import StepReport
from nereus.bus.session import Settings
from nereus.config import JobConfig
from nereus.core.plan import ModelStage, Plan, SlotId, Stage
from nereus.core.shape import ModelShape
from nereus.runtime.adaptation import Adaptation
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import open_dataset
from nereus.runtime.fleet import Worker
from nereus.runtime.journal import Journal, read_journal
from nereus.runtime.placement import initial_plan
from nereus.runtime.pool import cluster_of, starting_estimate
from nereus.runtime.readopt import estate_of, gather, take_over
from nereus.runtime.surroundings import Origin, Outcome, TransitionProgress
from nereus.sim import world as sim
from nereus.sim.processes import VirtualProcesses
from nereus.sim.world import Adapt, SearchHere, Setting, model_files

GATHER_S = 20.0

SETTINGS = Settings(heartbeat_s=1.0, liveness_s=5.0)


class World(sim.World):
    """One run in one process."""

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        *,
        origin: Origin | None = None,
        pace: Pace | None = None,
        adapt: ModelShape | None = None,
        step_s: Callable[[FakeTrainer], float] | None = None,
    ) -> None:
        """``adapt``: the controller decides about plans of a model of that shape. ``step_s``: what a step takes."""
        self.config = config
        self.folder = folder
        self.pace = pace or Pace()
        self.steps: list[tuple[StepReport, dict[str, float]]] = []
        self.notes: list[str] = []
        self.plans: list[Plan] = []
        self.transitions: list[TransitionProgress] = []
        self.trainers: dict[SlotId, FakeTrainer] = {}
        self.collectives = FakeCollectives(self.pace, step_s, timeout_s=config.cluster.group_timeout_s)
        self.on_step: Callable[[int], None] = lambda step: None
        setting = Setting(
            config=config,
            plan=initial_plan(config),
            origin=origin or Origin(folder, model_files(folder)),
            dataset=open_dataset(config.data),
            checkpoints=CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep),
            journal=Journal(folder / "journal.jsonl", clock=asyncio.get_running_loop().time),
        )
        bus = MemoryBus(SETTINGS)
        processes = VirtualProcesses(
            bus,
            self._actor,
            died=self._of_slot("gone"),
            stalled=self._of_slot("hung"),
            note=self.note,
            orphan_s=config.bus.orphan_s,
        )
        super().__init__(setting, bus, processes, self, self._adaptation(setting, adapt) if adapt is not None else None)
        self._adapt = adapt
        self._killed = False
        self._running: asyncio.Task[Outcome] | None = None
        self._up = True
        self.kill, self.hang, self.stall, self.drop = processes.kill, processes.hang, processes.stall, processes.drop

    def _adaptation(self, setting: Setting, shape: ModelShape) -> Adapt:
        cluster = cluster_of(self.config)
        return lambda report: Adaptation(
            self.config,
            setting.plan,
            step=setting.origin.step,
            estimate=starting_estimate(self.config, shape, cluster),
            cluster=cluster,
            searcher=SearchHere(),
            journal=setting.journal,
            report=report,
        )

    async def run(self) -> Outcome:
        """Run to the end and leave nothing behind; a supervisor that is killed is replaced."""
        try:
            while True:
                self._running = asyncio.create_task(self._attempt(), name="supervisor")
                await asyncio.wait([self._running])
                if not self._killed:
                    return self._running.result()
                self._killed = False
        finally:
            if self._running is not None:
                self._running.cancel()
            await self.supervisor.leave("the test is over")
            self.setting.journal.close()

    async def _attempt(self) -> Outcome:
        if not self._up:
            await self._succeed()
        return await self.supervisor.run()

    @property
    def running(self) -> Mapping[str, int]:
        return self.processes.running

    @property
    def attempt(self) -> int:
        return self.processes.attempt

    def kill_supervisor(self) -> None:
        """Let the supervisor vanish; its successor comes at once."""
        if self._running is None or self._running.done() or self._killed:
            return
        self._killed = True
        self._running.cancel()
        if self._up:
            self._up = False
            self.endpoint.abort()
            self.setting.journal.close()

    async def _succeed(self) -> None:
        """Take the workers over that are left."""
        path = self.folder / "journal.jsonl"
        estate = estate_of(read_journal(path).entries)
        assert estate is not None, "the journal says that there is nothing to take over"
        self.endpoint = self.bus.server(SUPERVISOR, epoch=estate.plan.epoch)
        self._up = True
        journal = Journal(path, clock=asyncio.get_running_loop().time)
        self.processes.attempt += 1
        found = await gather(self.endpoint, estate, "virtual", lambda: self.running, timeout_s=GATHER_S)
        takeover = await take_over(self.endpoint, estate, found, timeout_s=self.config.cluster.group_timeout_s + 5)
        before = self.setting.origin
        origin = Origin(self.folder, before.model, takeover.step, takeover.version, takeover.cursor)
        self.setting = replace(
            self.setting, plan=estate.plan, origin=origin, journal=journal, attempt=self.processes.attempt
        )
        self.setting.checkpoints.clean()
        journal.append(*takeover.records(self.started()))
        self.supervisor = self.supervise(
            self, self._adaptation(self.setting, self._adapt) if self._adapt is not None else None, takeover
        )

    def _of_slot(self, what: str) -> Callable[[str], None]:
        """Return what tells the process groups that a slot is gone, or hangs."""

        def tell(worker: str) -> None:
            if (slot := slot_of(worker)) is not None:
                getattr(self.collectives, what)(slot)

        return tell

    def _actor(self, worker: str, control: Endpoint, service: Endpoint, wiring: Wiring) -> Actor:
        slot = slot_of(worker)
        if slot is not None:
            self.collectives.joined(slot)
        if worker == RELAY:
            return WeightsActor(Relay("virtual", worker, folder=self.folder), control, service)
        if worker == REWARD:
            return FakeReward()
        assert slot is not None
        return _FakeSlot(self, slot, control, wiring)

    # Observer

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        self.steps.append((report, metrics))
        self.on_step(report.step)

    def fleet(self, workers: Iterable[Worker]) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def transition(self, progress: TransitionProgress) -> None:
        self.transitions.append(progress)


class _FakeSlot(SlotActor):
    """A slot whose devices are stand-ins."""

    def __init__(self, world: World, slot: SlotId, control: Endpoint, wiring: Wiring) -> None:
        super().__init__(slot, world.config, control, wiring, world.folder)
        self._world = world
        self._place = (slot, control, wiring)

    def _build(self, model_stage: ModelStage, source: Path) -> Actor:
        slot, control, wiring = self._place
        world = self._world
        if model_stage.stage is Stage.TRAINING:
            world.trainers[slot] = FakeTrainer(world.pace, world.collectives)
            return TrainerActor(world.trainers[slot], slot, control, wiring)
        transcript = world.folder / "transcript.jsonl"
        return RolloutActor(FakeRollout(world.pace), FakeText(), world.config, slot, control, wiring, transcript)
