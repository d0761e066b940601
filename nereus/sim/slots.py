"""What do the workers of a simulated run say to the supervisor?

The same as live ones: each worker here speaks for a slot, the relay or the reward service, and answers every message of
the supervisor in the time that its device would take (``devices.py``). What live workers say to each other (samples,
pieces of weights) passes inside the world.

Invariants (tests/sim/test_simulation.py): every message of the supervisor is answered; what a slot holds is what it was
told to take; a unit whose slot is lost generates nothing before it is assigned anew.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from nereus.actors.host import Actor
from nereus.actors.names import SUPERVISOR
from nereus.actors.slot import SlotActor
from nereus.actors.wiring import Wiring
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import (
    Abandon,
    Assign,
    Commit,
    GroupAccepted,
    GroupRef,
    Lend,
    Lent,
    Manifest,
    Message,
    Ok,
    Peers,
    Publish,
    Ready,
    Recall,
    Receipt,
    Refused,
    Release,
    Return,
    Save,
    Saved,
    Stand,
    Standing,
    StepDone,
    StepFailed,
    StepReport,
    Take,
    Train,
    VersionReady,
)
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Emu, ModelStage, Plan, SlotId, Stage
from nereus.errors import OutOfMemory, ProtocolError, TransitionError
from nereus.sim.devices import Batch, Devices, Held
from nereus.sim.links import communicators_s
from nereus.sim.rollouts import Draw, Rollout, checksum
from nereus.sim.serving import Serving
from nereus.sim.truth import tensors_of
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, TensorSpec, elements

STATE_BYTES = 12.0
"""Of a parameter: master and both moments."""


class SimulatedSlot(SlotActor):
    """A slot whose devices are the world's."""

    def __init__(
        self,
        slot: SlotId,
        config: JobConfig,
        control: Endpoint,
        wiring: Wiring,
        devices: Devices,
        draw: Draw,
        serving: Serving,
    ) -> None:
        super().__init__(slot, config, control, wiring, Path())
        self._devices = devices
        self._draw = draw
        self._serving = serving
        devices.came(slot)

    def _build(self, model_stage: ModelStage, source: Path) -> Actor:
        if model_stage.stage is Stage.TRAINING:
            return Trainer(self._slot, self._control, self._devices)
        return Rollout(self._slot, self._config, self._control, self._devices, self._draw, self._serving)


class Trainer:
    """One slot of a trainer unit."""

    def __init__(self, slot: SlotId, control: Endpoint, devices: Devices) -> None:
        self._slot = slot
        self._control = control
        self._devices = devices
        self._plan: Plan | None = None
        self._units: tuple[Emu, ...] = ()
        self._writers: frozenset[SlotId] = frozenset()
        self._apart = False
        """Whether this slot has left its process groups, because a peer is lost or has not come."""
        self._groups: dict[GroupRef, GroupAccepted] = {}
        self._arrived: asyncio.Queue[GroupAccepted] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Assign() as assign:
                await self._assign(assign)
            case Train() as train:
                await self._train(train)
            case Release(groups):
                gone = frozenset(groups)
                self._groups = {ref: held for ref, held in self._groups.items() if ref.group not in gone}
            case Publish(version):
                return (
                    Ok()
                    if await asyncio.shield(self._push(version))
                    else Refused(f"version {version} has not become visible")
                )
            case Stand():
                held = self._held
                return Standing(held.step, held.ready, False, tuple(sorted(held.replicas)))
            case Recall(step):
                return self._recall(step)
            case Save(step, _):
                await self._control.send(SUPERVISOR, Saved(step, self._emu.id, b"{}"))
            case Lend() as lend:
                size = round(sum(elements(move.piece) for move in lend.moves) * STATE_BYTES)
                return Lent(f"slot-{self._slot}", Receipt(size, (), {"step": self._held.step}))
            case Take() as take:
                return await self._take(take)
            case Return():
                return Ok()
            case Abandon():
                held = self._held
                held.replicas = {held.committed} if held.committed else set()
                held.received_bytes = 0.0
            case Commit(plan):
                return await self._commit(plan)
            case Peers():
                """Where servers are is known here."""
            case other:
                return Refused(f"a trainer does not understand {type(other).__name__}")
        return None

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer."""

    async def background(self) -> None:
        """Tell the supervisor of groups that are here."""
        while True:
            await self._control.send(SUPERVISOR, await self._arrived.get())

    async def close(self) -> None:
        if self._devices.collect == self._collect:
            self._devices.collect = None

    @property
    def _held(self) -> Held:
        return self._devices.held[self._slot]

    @property
    def _now(self) -> Plan:
        if self._plan is None:
            raise ProtocolError(f"slot {self._slot} has no unit yet")
        return self._plan

    def _collect(self, group: GroupAccepted) -> None:
        ref = GroupRef(group.group, group.attempt)
        if ref not in self._groups:
            self._groups[ref] = group
            self._arrived.put_nowait(group)

    def _follow(self, plan: Plan) -> None:
        """Take the place that ``plan`` gives this slot; the lead slot is where finished groups come."""
        self._plan, self._units = plan, plan.of(POLICY_TRAINING)
        self._emu = next(emu for emu in self._units if self._slot in emu.slots)
        self._writers = frozenset(slot for emu in self._units for slot in emu.slots)
        if self._units[0].slots[0] == self._slot:
            self._devices.collect = self._collect
        elif self._devices.collect == self._collect:
            self._devices.collect = None

    async def _assign(self, assign: Assign) -> None:
        began = asyncio.get_running_loop().time()
        self._control.advance(assign.plan.epoch)
        self._follow(assign.plan)
        share = self._devices.truth.shape.parameters / assign.emu.layout.slots
        await asyncio.sleep(self._devices.links.from_host_s(share * STATE_BYTES) + _communicators_s(assign.plan))
        held = self._held
        held.committed = Replica.of(assign.emu)
        held.replicas, held.step = {held.committed}, assign.version
        lead = self._units[0].slots[0] == self._slot
        tensors = tensors_of(self._devices.truth.shape) if lead else ()
        seconds = asyncio.get_running_loop().time() - began
        await self._control.send(SUPERVISOR, Ready(assign.emu.id, seconds, tensors))

    async def _train(self, train: Train) -> None:
        if self._apart:
            return  # the supervisor has not heard of it yet
        plan, units = self._now, self._units
        lead = units[0].slots[0] == self._slot
        batch = self._batch(train) if lead else None
        try:
            took = await self._devices.collectives.enter(self._slot, plan, train.step, batch)
        except (TransitionError, OutOfMemory) as error:
            self._apart = True
            needed = sum(error.needed_bytes.values()) if isinstance(error, OutOfMemory) else 0
            await self._control.send(SUPERVISOR, StepFailed(train.step, str(error), needed))
            return
        report = StepReport(train.step, train.version, 0.0, 0)
        if batch is not None:
            tokens = sum(prompt + response for prompt, response in batch.lengths)
            metrics = self._metrics(train, tokens, took.seconds)
            report = StepReport(
                train.step,
                train.version,
                took.seconds,
                tokens,
                metrics,
                peak_bytes=took.peak_bytes,
                operations=took.operations,
            )
        await self._control.send(SUPERVISOR, StepDone(report, self._emu.id))
        self._push(train.version + 1)

    def _batch(self, train: Train) -> Batch:
        missing = [ref.group for ref in train.groups if ref not in self._groups]
        if missing:
            raise ProtocolError(f"the collector does not hold groups {missing}")
        held = [self._groups[ref] for ref in train.groups]
        return Batch(tuple((group.prompt_tokens, sample.tokens) for group in held for sample in group.samples))

    def _metrics(self, train: Train, tokens: int, seconds: float) -> dict[str, float]:
        samples = [sample for ref in train.groups for sample in self._groups[ref].samples]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        mean = sum(rewards) / len(rewards)
        return {
            "reward/mean": mean,
            "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
            "response_length/mean": sum(sample.tokens for sample in samples) / len(samples),
            "perf/tokens_per_s": tokens / seconds,
        }

    def _push(self, version: int) -> asyncio.Future[bool]:
        return self._devices.publications.push(version, self._slot, self._writers)

    def _recall(self, step: int) -> Message:
        held = self._held
        if held.ready and step == held.step + 1:
            held.step = step
        elif step != held.step:
            return Refused(f"this slot stands before step {held.step} and cannot come to step {step}")
        held.ready = False
        return Ok()

    async def _take(self, take: Take) -> Message:
        """Receive what is lacking over the links, if there is room for it."""
        devices, held = self._devices, self._held
        if devices.halted_s:  # it comes from storage, while nothing else is in memory
            held.replicas.add(take.replica)
            held.step = max((loan.receipt.counters["step"] for loan in take.loans), default=held.step)
            return Ok()
        sizes: defaultdict[SlotId, float] = defaultdict(float)
        for loan in take.loans:
            sizes[loan.lender] += _received_bytes(loan.moves, self._slot)
        now = asyncio.get_running_loop().time()
        resident = devices.truth.resident_bytes(held.committed.layout) if held.committed else 0.0
        needed = resident + held.received_bytes + sum(sizes.values())
        limit = devices.truth.cluster.device.memory_bytes
        if needed > limit:
            return Refused(f"slot {self._slot} would need {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB to take this")
        held.received_bytes += sum(sizes.values())
        arrives = [devices.links.transfer(lender, self._slot, size, now) for lender, size in sorted(sizes.items())]
        await asyncio.sleep(max(arrives, default=now) - now)
        if lost := [lender for lender in sizes if lender not in devices.held]:
            return Refused(f"slots {lost} are lost and what they lent has not arrived")
        held.replicas.add(take.replica)
        steps = [loan.receipt.counters["step"] for loan in take.loans]
        held.step = max(steps, default=held.step)
        return Ok()

    async def _commit(self, plan: Plan) -> Message:
        """Train the unit that the plan gives this slot; one whose peers all stay goes on as it is."""
        await asyncio.sleep(self._devices.halted_s)
        before = self._units
        self._follow(plan)
        units = self._units
        if before == units and not self._apart:
            return Ok()
        self._apart = True
        await asyncio.sleep(_communicators_s(plan))
        if lost := [slot for unit in units for slot in unit.slots if slot not in self._devices.held]:
            return Refused(f"slots {lost} have not come")
        held = self._held
        replica = Replica.of(self._emu)
        if replica not in held.replicas:
            raise ProtocolError(f"slot {self._slot} holds nothing of {replica}")
        held.committed, held.replicas, held.received_bytes = replica, {replica}, 0.0
        self._apart = False
        return Ok()


def _communicators_s(plan: Plan) -> float:
    return communicators_s(sum(len(emu.slots) for emu in plan.of(POLICY_TRAINING)))


def _received_bytes(moves: tuple[Move, ...], slot: SlotId) -> float:
    return sum(elements(move.piece) for move in moves if move.to_slot == slot) * STATE_BYTES


class SimulatedRelay:
    """The weight-sync relays of all nodes."""

    def __init__(self, control: Endpoint, devices: Devices) -> None:
        self._control = control
        self._devices = devices
        self._news: asyncio.Queue[VersionReady] = asyncio.Queue()
        self._tensors: tuple[TensorSpec, ...] = ()

    async def handle(self, delivery: Delivery) -> Message | None:
        match delivery.message:
            case Assign(emu, plan):
                self._control.advance(plan.epoch)
                await self._control.send(SUPERVISOR, Ready(emu.id))
                return None
            case Manifest(tensors):
                self._tensors = tensors
                self._devices.publications.reset()
                self._devices.publications.tell = self._tell
                return Ok()
            case Commit():
                self._devices.publications.reset()
                return Ok()
            case other:
                return Refused(f"a relay does not understand {type(other).__name__}")

    def _tell(self, version: int, seconds: float) -> None:
        size = round(self._devices.weights_bytes)
        self._news.put_nowait(VersionReady(version, checksum(version), len(self._tensors), size, seconds))

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer."""

    async def background(self) -> None:
        while True:
            await self._control.send(SUPERVISOR, await self._news.get())

    async def close(self) -> None:
        if self._devices.publications.tell == self._tell:
            self._devices.publications.relay_lost()


class SimulatedReward:
    """The reward service; how long scoring takes is part of each group's life."""

    async def handle(self, delivery: Delivery) -> Message | None:
        return Ok() if isinstance(delivery.message, Commit) else None

    async def peer_gone(self, event: PeerGone) -> None:
        """Nothing is kept for a peer."""

    async def background(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to close."""
