"""How can a whole run live in one process? The real supervisor and the real actors on the in-process bus.

Only devices, rewards and processes are stand-ins (``backends/fake.py``). A worker "process" is a task that ``kill``
cancels without a word to anybody, and that ``hang`` cuts off from everybody.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from nereus.actors.host import Actor, host
from nereus.actors.names import RELAY, REWARD, SUPERVISOR, slot_of
from nereus.actors.rollout import RolloutActor
from nereus.actors.slot import SlotActor
from nereus.actors.trainer import TrainerActor
from nereus.actors.weights import Relay, WeightsActor
from nereus.backends.fake import FakeCollectives, FakeReward, FakeRollout, FakeText, FakeTrainer, Pace
from nereus.bus.endpoint import Endpoint
from nereus.bus.memory import MemoryBus
from nereus.bus.messages import Hello, StepReport, Welcome
from nereus.bus.session import Settings
from nereus.config import JobConfig
from nereus.core.plan import ModelStage, Plan, SlotId, Stage
from nereus.core.shape import ModelShape
from nereus.errors import NereusError
from nereus.runtime.adaptation import Adaptation
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import open_dataset
from nereus.runtime.fleet import Worker
from nereus.runtime.journal import Journal, RunStarted
from nereus.runtime.placement import initial_plan
from nereus.runtime.pool import cluster_of, starting_estimate
from nereus.runtime.processes import Exited
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered, Asked, solve
from nereus.runtime.supervisor import Supervisor
from nereus.runtime.surroundings import Origin, Outcome, TransitionProgress

SETTINGS = Settings(heartbeat_s=1.0, liveness_s=5.0)


def model_files(folder: Path) -> Path:
    """Make the least that a checkpoint needs of a model."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return model


class World:
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
        self.bus = MemoryBus(SETTINGS)
        self.exits: asyncio.Queue[Exited] = asyncio.Queue()
        self.steps: list[tuple[StepReport, dict[str, float]]] = []
        self.notes: list[str] = []
        self.plans: list[Plan] = []
        self.transitions: list[TransitionProgress] = []
        self.trainers: dict[SlotId, FakeTrainer] = {}
        self.collectives = FakeCollectives(self.pace, step_s, timeout_s=config.cluster.group_timeout_s)
        self.on_step: Callable[[int], None] = lambda step: None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[str, list[Endpoint]] = {}
        self._hung: set[str] = set()
        self._pids = itertools.count(100)
        loop = asyncio.get_running_loop()
        self.journal = Journal(folder / "journal.jsonl", clock=loop.time)
        self.checkpoints = CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep)
        self.origin = origin or Origin(folder, model_files(folder))
        self.supervisor = Supervisor(
            config,
            initial_plan(config),
            run_id="virtual",
            store="",
            origin=self.origin,
            endpoint=self.bus.server(SUPERVISOR),
            launcher=self,
            journal=self.journal,
            dataset=open_dataset(config.data),
            checkpoints=self.checkpoints,
            observer=self,
            adapt=self._adaptation(adapt) if adapt is not None else None,
        )

    def _adaptation(self, shape: ModelShape) -> Callable[[Callable[[Answered], None]], Planning]:
        cluster = cluster_of(self.config)
        return lambda report: Adaptation(
            self.config,
            initial_plan(self.config),
            step=self.origin.step,
            estimate=starting_estimate(self.config, shape, cluster),
            cluster=cluster,
            searcher=_SearchHere(),
            journal=self.journal,
            report=report,
        )

    def announce(self) -> None:
        """Say in the journal from where this attempt goes on."""
        started = RunStarted(
            run="virtual",
            attempt=1,
            config="",
            data="",
            seed=self.config.run.seed,
            wall=0.0,
            step=self.origin.step,
            version=self.origin.version,
            cursor=self.origin.cursor.frontier,
        )
        self.journal.append(started)

    async def run(self) -> Outcome:
        """Run to the end and leave nothing behind."""
        try:
            return await self.supervisor.run()
        finally:
            await self.supervisor.leave("the test is over")
            self.journal.close()

    # Launcher

    async def start(self, worker: str) -> int:
        self._hung.discard(worker)
        self.bus.heal(worker)
        pid = next(self._pids)
        self._tasks[worker] = asyncio.create_task(self._process(worker, pid), name=worker)
        return pid

    def kill(self, worker: str) -> None:
        """Let a worker vanish."""
        if worker in self._tasks:
            if (slot := slot_of(worker)) is not None:
                self.collectives.gone(slot)
            for endpoint in self._endpoints.pop(worker, []):
                endpoint.abort()  # type: ignore[attr-defined]
            self._tasks[worker].cancel()

    def hang(self, worker: str) -> None:
        """Let a worker fall silent, with all its connections open, until somebody kills it."""
        if worker in self._tasks:
            self.stall(worker)
            self._hung.add(worker)
            self.bus.cut(worker)

    def stall(self, worker: str) -> None:
        """Let a slot hang in its steps, and be well otherwise."""
        if worker in self._tasks and (slot := slot_of(worker)) is not None:
            self.collectives.hung(slot)

    def drop(self, seconds: float, *workers: str) -> None:
        """Lose everything that a worker says or is told, or what passes between two, for a while; they work on."""
        if all(worker in self._tasks for worker in workers):
            self.bus.cut(*workers)
            asyncio.get_running_loop().call_later(seconds, self._heal, *workers)

    def _heal(self, *workers: str) -> None:
        if len(workers) > 1 or not self._hung.intersection(workers):
            self.bus.heal(*workers)

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        return tuple(sorted(self._tasks))

    async def stop(self, *, grace_s: float) -> None:
        for worker in tuple(self._tasks):
            self.kill(worker)
        await self.wait(timeout_s=grace_s)

    async def _process(self, worker: str, pid: int) -> None:
        code = 1
        try:
            service = self.bus.server(worker)
            control = self.bus.client(worker, server=SUPERVISOR)
            self._endpoints[worker] = [service, control]
            await asyncio.sleep(0.2)
            hello = Hello(worker, control.incarnation, "here", pid, f"{worker}#{pid}")
            welcome = await control.request(SUPERVISOR, hello, timeout_s=30)
            assert isinstance(welcome, Welcome)
            control.advance(welcome.epoch)
            code = await host(self._actor(worker, control, service), control, [service])
            await control.close()
            await service.close()
        except asyncio.CancelledError:
            code = -9
        except (NereusError, TimeoutError) as error:
            self.notes.append(f"{worker}: {error}")
            for endpoint in self._endpoints.pop(worker, []):
                endpoint.abort()  # type: ignore[attr-defined]
        finally:
            self._tasks.pop(worker, None)
            self.exits.put_nowait(Exited(worker, pid, code))

    def _actor(self, worker: str, control: Endpoint, service: Endpoint) -> Actor:
        wiring = _Wiring(self, worker)
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

    def __init__(self, world: World, slot: SlotId, control: Endpoint, wiring: _Wiring) -> None:
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


class _SearchHere:
    """Searches in this process; it takes a moment of virtual time."""

    async def prepare(self) -> None:
        """Nothing to prepare."""

    async def search(self, asked: Asked) -> Answered:
        await asyncio.sleep(0.05)
        return solve(asked)

    async def close(self) -> None:
        """Nothing to close."""


class _Wiring:
    def __init__(self, world: World, worker: str) -> None:
        self._world = world
        self._worker = worker

    async def connect(self, server: str, address: str) -> Endpoint:
        await asyncio.sleep(0.02)
        endpoint = self._world.bus.client(self._worker, server=server)
        self._world._endpoints.setdefault(self._worker, []).append(endpoint)
        return endpoint
