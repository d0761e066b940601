"""Which workers does the run have, and what is each of them doing?

Owner: the supervisor's registry of slots and units. Pure bookkeeping: no I/O.

Invariants (tests/runtime/test_fleet.py): a worker has one current incarnation; what an older one says is ignored; a
replacement starts from nothing.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nereus.actors.names import RELAY, REWARD, slot_of, slot_worker
from nereus.bus.messages import Hello, Peer
from nereus.core.plan import (
    POLICY_GENERATION,
    POLICY_TRAINING,
    POLICY_WEIGHTS,
    Emu,
    Plan,
    PolicyVersion,
    SlotId,
)


class State(enum.Enum):
    """The life of a worker, in order."""

    STARTING = "starting"
    JOINED = "joined"
    BUILDING = "building"
    READY = "ready"
    LIVE = "live"
    """A rollout unit that serves weights."""
    GONE = "gone"


@dataclass(eq=False)
class Worker:
    """One worker of the run and its present incarnation."""

    name: str
    emu: Emu | None = None
    state: State = State.STARTING
    incarnation: str = ""
    host: str = ""
    pid: int = 0
    service: str = ""
    version: PolicyVersion | None = None
    """What a rollout unit serves."""
    switching: PolicyVersion | None = None
    """What it was last told to switch to."""
    fault: str = ""
    restarts: int = 0
    guest: bool = False
    """It has joined by itself: nobody here starts it again."""
    retired: bool = False
    """It is to leave, or has left, because an operator wants its slot."""
    running: set[int] = field(default_factory=set)
    """Groups granted to it that are not yet accepted."""
    slot: SlotId = -1
    """The slot that it stands for; -1: none."""

    def __post_init__(self) -> None:
        slot = slot_of(self.name)
        self.slot = -1 if slot is None else slot

    @property
    def alive(self) -> bool:
        """Whether it has joined and is not known to be lost."""
        return self.state not in (State.STARTING, State.GONE)

    @property
    def role(self) -> str:
        return str(self.emu.model_stage) if self.emu is not None else self.name.rpartition("-")[0]


class Fleet:
    """All workers by name."""

    def __init__(self, workers: dict[str, Emu | None]) -> None:
        self._workers = {name: Worker(name, emu) for name, emu in workers.items()}
        self._by_stage: dict[object, list[Worker]] = {}
        """What ``of`` has found since the last plan; with a thousand slots it is asked for too often to look."""

    @classmethod
    def of_plan(cls, plan: Plan, slots: Iterable[SlotId] = ()) -> Fleet:
        """Name the workers that ``plan`` needs: the relay, the reward service, and one process per slot.

        The others of ``slots`` get an idle one, which a later plan may use.
        """
        idle: dict[str, Emu | None] = {slot_worker(slot): None for slot in slots}
        used = {slot_worker(slot): emu for emu in plan.emus if emu.model_stage != POLICY_WEIGHTS for slot in emu.slots}
        return cls({RELAY: plan.of(POLICY_WEIGHTS)[0], REWARD: None, **idle, **used})

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def slots(self) -> list[SlotId]:
        """Return the slots whose worker is alive and stays, in order."""
        return sorted([worker.slot for worker in self._present() if not worker.retired])

    def present(self) -> list[SlotId]:
        """Return the slots whose worker is alive, those that are to leave included, in order."""
        return sorted([worker.slot for worker in self._present()])

    def _present(self) -> list[Worker]:
        starting, gone = State.STARTING, State.GONE
        return [
            worker
            for worker in self._workers.values()
            if worker.slot >= 0 and worker.state is not starting and worker.state is not gone
        ]

    def hosts(self) -> dict[SlotId, str]:
        """Return where the workers of slots have said that they are."""
        return {worker.slot: worker.host for worker in self._workers.values() if worker.slot >= 0}

    def of(self, stage: object) -> list[Worker]:
        """Return the workers whose unit belongs to a model-stage; the list is shared: do not change it."""
        if stage not in self._by_stage:
            self._by_stage[stage] = [
                worker for worker in self if worker.emu is not None and worker.emu.model_stage == stage
            ]
        return self._by_stage[stage]

    def rollouts(self) -> list[Worker]:
        """Return the first slot's worker of each generation unit: it speaks for the unit; do not change the list."""
        if "rollouts" not in self._by_stage:
            self._by_stage["rollouts"] = [worker for worker in self.of(POLICY_GENERATION) if _leads(worker)]
        return self._by_stage["rollouts"]

    def admit(self, slot: SlotId) -> Worker:
        """Expect a guest as ``slot``."""
        name = slot_worker(slot)
        self._workers[name] = worker = Worker(name, guest=True)
        self._by_stage.clear()
        return worker

    def commit(self, plan: Plan) -> list[Worker]:
        """Give every slot its unit of ``plan``; return the slots that have another model-stage now.

        Workers of one model-stage are listed in the plan's order from here on.
        """
        units = {slot_worker(slot): emu for emu in sorted(plan.emus) for slot in emu.slots}
        changed = []
        for name, worker in self._workers.items():
            if name in (RELAY, REWARD):
                continue
            before, worker.emu = worker.emu, units.get(name)
            if worker.emu is None and worker.alive:
                worker.state, worker.version, worker.switching = State.READY, None, None  # idle
            if worker.emu is not None and (before is None or before.model_stage != worker.emu.model_stage):
                changed.append(worker)
        self._by_stage.clear()
        order = {name: position for position, name in enumerate(units)}
        self._workers = dict(sorted(self._workers.items(), key=lambda item: order.get(item[0], -1)))
        return changed

    def joined(self, hello: Hello) -> Worker:
        """Take note of a new incarnation; everything known of the older one is forgotten."""
        worker = self._workers[hello.worker]
        worker.state = State.JOINED
        worker.incarnation = hello.incarnation
        worker.host, worker.pid, worker.service = hello.host, hello.pid, hello.service
        worker.version = worker.switching = None
        worker.fault, worker.retired = "", False
        worker.running.clear()
        return worker

    def lost(self, name: str) -> set[int]:
        """Mark a worker gone and return the groups it was working on."""
        worker = self._workers[name]
        worker.state, worker.service = State.GONE, ""
        running, worker.running = worker.running, set()
        return running

    def missing(self, *, at_least: State) -> list[str]:
        """Return the names of the workers that the plan needs and that have not come as far as ``at_least``."""
        early = {State.GONE, *itertools.takewhile(lambda state: state is not at_least, State)}
        needed = (worker for worker in self if worker.state in early)
        return [worker.name for worker in needed if worker.emu is not None or worker.name == REWARD]

    def unit_of(self, worker: Worker) -> list[Worker]:
        """Return the workers of the unit that ``worker`` is a slot of; the first one leads it."""
        return [self[slot_worker(slot)] for slot in worker.emu.slots] if worker.emu is not None else []

    def peers(self) -> tuple[Peer, ...]:
        """Return where the servers that others talk to listen: the relay, the reward service and the lead trainer."""
        servers = (self[RELAY], self[REWARD], *self.of(POLICY_TRAINING)[:1])
        return tuple(Peer(worker.name, worker.service) for worker in servers if worker.service)


def _leads(worker: Worker) -> bool:
    return worker.emu is not None and worker.slot == worker.emu.slots[0]
