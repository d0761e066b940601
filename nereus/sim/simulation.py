"""How does a whole job run on virtual time, at its real size?

Owner of one simulated run: the world's truth and noise, the trace's events (slots that come and go, failures), and one
``World`` after another where a run goes back to a checkpoint. The journal, metrics and STATUS are those of a live run.

Invariants (tests/sim/test_simulation.py): equal seeds give byte-identical journals; what a group is like depends on the
seed and its place in the sample order, never on a plan; nothing waits for real time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nereus.actors.host import Actor
from nereus.actors.names import OPERATOR, RELAY, REWARD, SUPERVISOR, slot_of, slot_worker
from nereus.actors.wiring import Wiring
from nereus.algo.sampler import Cursor
from nereus.bus.endpoint import Endpoint
from nereus.bus.memory import MemoryBus
from nereus.bus.messages import DrainSlots, GroupSpec
from nereus.bus.session import Settings
from nereus.config import JobConfig
from nereus.core.cluster import Cluster
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan, SlotId
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError, NereusError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.runtime.dataset import Dataset, Row
from nereus.runtime.journal import Journal
from nereus.runtime.placement import FIRST_VIRTUAL_SLOT, next_plan
from nereus.runtime.pool import cluster_of, starting_estimate
from nereus.runtime.regroup import Restores, StateLost
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered
from nereus.runtime.surroundings import Observer, Origin, Outcome
from nereus.sim.course import NOTICE_S, Course, Failures, usual_lengths
from nereus.sim.devices import Devices
from nereus.sim.engine import Drawn
from nereus.sim.noise import Noise
from nereus.sim.policy import Circumstances, Known, Nereus, Policy
from nereus.sim.processes import VirtualProcesses
from nereus.sim.slots import SimulatedRelay, SimulatedReward, SimulatedSlot
from nereus.sim.trace import Trace
from nereus.sim.truth import Truth
from nereus.sim.world import SearchHere, Setting, World, ended
from nereus.transition.reshard import TensorSpec

BOOT_S = 20.0
"""Ours: from the start of a slot's process to its first word."""

RESTORE_S = 60.0
"""Ours: from the loss of all state until everything is started anew."""

SEARCH_S = 2.0
"""Ours: what a search of the planner takes."""

TICK_S = 10.0

SETTINGS = Settings(heartbeat_s=0.0, resend_s=1e6, ack_delay_s=1e6, window=4096)
"""The bus in memory loses nothing, so nothing is sent twice; who falls silent is noticed by the world's own clock."""

ROWS = 65536


class SimulatedCheckpoints(CheckpointStore):
    """Checkpoints of which only the place in the run is kept."""

    def __init__(self) -> None:
        super().__init__(Path(), keep=1)
        self.newest_extra: dict[str, Any] = {}

    def begin(self, step: int) -> Path:
        return Path(f"step_{step:08d}")

    def abandon(self, step: int) -> None:
        """Nothing was written."""

    def commit(
        self,
        step: int,
        entries: Sequence[bytes],
        extra: Mapping[str, Any],
        *,
        model: Path | None = None,
        tensors: Sequence[TensorSpec] = (),
    ) -> Path:
        self.newest_extra = dict(extra)
        return Path(f"step_{step:08d}")


def check_start(plan: Plan, present: int) -> None:
    """Refuse a first plan that uses more than the slots from 0 on that are ``present``; ``ConfigError`` says so."""
    missing = sum(present <= slot < FIRST_VIRTUAL_SLOT for slot in plan.slots())
    if missing:
        raise ConfigError(
            f"the first plan uses {missing} slots that are not there at the start",
            where="train.layout, rollout.layout",
            remedy=f"use layouts for {present} slots, or another trace",
        )


class Simulation:
    """One simulated run."""

    def __init__(
        self,
        config: JobConfig,
        shape: ModelShape,
        trace: Trace,
        journal: Path,
        observer: Observer,
        *,
        policy: Policy | None = None,
        seed: int = 0,
        failures: Failures = Failures(),  # noqa: B008 (frozen)
        noise: float = 1.0,
        run_id: str = "simulated",
    ) -> None:
        """``noise`` scales what is random in speeds and memory."""
        self.trace = trace
        self.policy: Policy = policy or Nereus()
        self.cluster: Cluster = cluster_of(config)
        self.noise = Noise(seed, scale=noise)
        self.truth = Truth(shape, self.cluster, self.noise, trace)
        self._shape = shape
        self._seed = seed
        self.config = prepared(config)
        self._known = Known(
            shape, self.cluster, self.truth, trace, lambda group: self._draw(GroupSpec(group, 0, group, b"", b""))
        )
        slots = min(trace.slots_at(0, 0.0) or self.cluster.size, self.cluster.size)
        self.config = self.policy.job(self.config, slots, self._known)
        self._run_id = run_id
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self.journal = Journal(journal, clock=self._loop.time)
        self._checkpoints = SimulatedCheckpoints()
        self._dataset = Dataset(ROWS, lambda index: Row(str(index), "", {}), fingerprint="simulated", description="")
        self._course = Course(trace, self.cluster.size, self.noise, failures, self)
        self._processes: VirtualProcesses | None = None
        self._endpoint: Any = None
        self._operator: Endpoint | None = None
        self._attempt = 0
        self._step = 0
        self.restores = 0

    @property
    def now_s(self) -> float:
        """Seconds since the start, of virtual time."""
        return self._loop.time()

    async def run(self) -> Outcome:
        """Run to the end; a run that has lost its state goes on from its newest checkpoint."""
        plan = self._first_plan()
        origin = Origin(Path(), Path())
        outcome: Outcome | None = None
        reason = "failed"
        self._course.begin()
        allowance = Restores()
        try:
            while True:
                try:
                    outcome = await self._attempt_from(origin, plan)
                    reason = outcome.reason
                    return outcome
                except StateLost as lost:
                    self.restores += 1
                    if not allowance.allowed(self._step):
                        raise
                    self._observer.note(f"{lost}; going on from the newest checkpoint")
                    await asyncio.sleep(RESTORE_S)
                    origin, plan = self._restored(), fitted(plan, self._course.present)
        except NereusError as error:
            reason = str(error)
            raise
        finally:
            self._course.end()
            ended(self.journal, outcome, reason)

    # One attempt

    async def _attempt_from(self, origin: Origin, plan: Plan) -> Outcome:
        self._attempt += 1
        config = self.config
        devices = Devices(
            self.truth,
            budget=config.train.micro_batch_tokens,
            minibatches=config.train.minibatches,
            group_timeout_s=config.cluster.group_timeout_s,
        )
        serving = self.policy.serving(config)
        bus = MemoryBus(SETTINGS, unpacked=True)

        def build(worker: str, control: Endpoint, service: Endpoint, wiring: Wiring) -> Actor:
            if worker == RELAY:
                return SimulatedRelay(control, devices)
            if worker == REWARD:
                return SimulatedReward()
            slot = slot_of(worker)
            assert slot is not None
            return SimulatedSlot(slot, config, control, wiring, devices, self._draw, serving)

        hosts = {slot_worker(slot): host for slot, host in self.cluster.node_of().items()}

        def on_slot(act: Any) -> Any:
            def tell(worker: str) -> None:
                if (slot := slot_of(worker)) is not None:
                    act(slot)

            return tell

        self._processes = processes = VirtualProcesses(
            bus,
            build,
            boot_s=self._boot_s,
            host_of=lambda worker: hosts.get(worker, "here"),
            died=on_slot(devices.gone),
            left=on_slot(devices.gone),
            stalled=on_slot(devices.collectives.hung),
            note=self._observer.note,
        )
        setting = Setting(
            config=config,
            plan=plan,
            origin=origin,
            dataset=self._dataset,
            checkpoints=self._checkpoints,
            journal=self.journal,
            run_id=self._run_id,
            attempt=self._attempt,
            tick_s=TICK_S,
        )

        def adapt(report: Callable[[Answered], None]) -> Planning:
            return self._planning(origin, plan, report, devices)

        world = World(setting, bus, processes, self._observer, adapt)
        world.announce(config=self.policy.name)
        self._endpoint = world.endpoint
        self._operator = bus.client(OPERATOR, server=SUPERVISOR)
        try:
            return await world.run()
        finally:
            self._processes = None

    def _planning(self, origin: Origin, plan: Plan, report: Callable[[Answered], None], devices: Devices) -> Planning:
        return self.policy.planning(
            Circumstances(
                self.config,
                plan,
                origin.step,
                self.cluster,
                starting_estimate(self.config, self._shape, self.cluster),
                SearchHere(SEARCH_S),
                self.journal,
                report,
                self._known,
                devices.halt,
            )
        )

    def _first_plan(self) -> Plan:
        present = len(self._course.present)
        plan = self.policy.first_plan(self.config, present, self._known)
        check_start(plan, present)
        return plan

    def _restored(self) -> Origin:
        extra = self._checkpoints.newest_extra
        if not extra:
            return Origin(Path(), Path())
        cursor = msgspec.convert(extra["cursor"], Cursor)
        return Origin(Path(), Path(), extra["step"], extra["version"], cursor)

    # What groups are like

    def _draw(self, spec: GroupSpec) -> Drawn:
        """Return what will come of a group: by its place in the sample order, so that every plan meets the same."""
        config = self.config
        step = spec.group // config.train.groups_per_step
        longest = config.rollout.max_new_tokens
        lengths = self.trace.lengths_at(step) or usual_lengths(longest)
        drawn = lengths.sample((self._seed, spec.group), config.rollout.group_size, longest)
        share = self.noise.stream("prompt", spec.row).uniform(0.25, 0.75)
        return Drawn(spec, max(1, round(share * config.rollout.max_prompt_tokens)), drawn)

    # Slots that come and go

    def _boot_s(self, worker: str) -> float:
        slot = slot_of(worker)
        return BOOT_S if slot is None or slot in self._course.present else float("inf")

    def stepped(self, steps: int) -> None:
        """Note that so many steps are done: some traces change the pool with steps."""
        self._step = steps
        self._course.stepped(steps)

    def add(self, slots: Sequence[SlotId]) -> None:
        """Start the processes of slots that have come."""
        for slot in slots:
            if self._processes is not None and slot_worker(slot) not in self._processes:
                self._processes.boot(slot_worker(slot), BOOT_S)

    async def take_back(self, slots: Sequence[SlotId], notice_s: float) -> None:
        """Give notice, then end what is left."""
        processes, operator = self._processes, self._operator
        if processes is None or operator is None:
            return
        there = tuple(slot for slot in slots if slot_worker(slot) in processes)
        try:
            if there:
                operator.advance(self._endpoint.epoch)
                await operator.request(SUPERVISOR, DrainSlots(there), timeout_s=30.0)
        except (NereusError, TimeoutError) as error:
            self._observer.note(f"{len(there)} slots are taken back without being let go: {error}")
            notice_s = min(notice_s, NOTICE_S)
        if notice_s == float("inf"):
            return
        await asyncio.sleep(notice_s)
        for slot in there:
            if slot not in self._course.present and processes is self._processes:
                processes.kill(slot_worker(slot))

    # What fails

    def running(self) -> Sequence[SlotId]:
        """Return the slots of the pool whose processes are there."""
        processes = self._processes
        if processes is None:
            return ()
        return [slot for slot in sorted(self._course.present) if slot_worker(slot) in processes]

    def fail(self, kind: str, slot: SlotId) -> None:
        """Let the process of ``slot`` die or fall silent."""
        processes = self._processes
        assert processes is not None, "only slots that are there fail"
        worker = slot_worker(slot)
        if kind == "hang":
            processes.hang(worker)
            self._loop.call_later(self.config.bus.liveness_s, self._silent, processes, worker)
            return
        processes.kill(worker)

    def _silent(self, processes: VirtualProcesses, worker: str) -> None:
        """Let the supervisor notice a worker that has said nothing for too long."""
        if processes is self._processes and processes.hangs(worker):
            self._endpoint.exclude(worker, f"silent for {self.config.bus.liveness_s:.1f} s")


def prepared(config: JobConfig) -> JobConfig:
    """Return the job as it is simulated: every slot of the pool has a process, whoever decides."""
    mode = config.adapt.mode if config.adapt.mode != "off" else "on"
    return replace(config, adapt=replace(config.adapt, mode=mode))


def fitted(plan: Plan, present: Collection[SlotId]) -> Plan:
    """Return ``plan`` with as many of its units as ``present`` slots hold; ``StateLost`` if not even one of each does.

    What a run that goes back to a checkpoint begins with, whoever decides later.
    """
    train, rollout = plan.replication(POLICY_TRAINING), plan.replication(POLICY_GENERATION)
    assert train is not None and rollout is not None, "a plan of a run trains and generates"
    while train.slots + rollout.slots > len(present):
        if max(train.dp, rollout.dp) == 1:
            raise StateLost(f"{len(present)} slots hold neither {train} nor {rollout}")
        if train.dp > 1 and (train.slots >= rollout.slots or rollout.dp == 1):
            train = replace(train, dp=train.dp - 1)
        else:
            rollout = replace(rollout, dp=rollout.dp - 1)
    return replace(next_plan(plan, train, rollout, sorted(present)), epoch=0)
