"""Who owns which slot, which copies are complete, and how much memory is taken, while primitives start and finish?

The rules of a transition, checked at every step: a primitive takes what it needs when it starts and releases what it
drops when it is done. Owner: ``TransitionRun``. Invariants (tests/transition/test_run.py): no slot is owned twice by
model-stages that run at the same time; no slot or host holds more than its capacity; every model-stage of the target
has a complete copy at every moment; nobody drops what another primitive reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from nereus.core.plan import ModelStage, SlotId
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    Replica,
    Split,
    Unpark,
    slots_of,
)


def growth_bytes(primitive: Primitive, memory: Memory) -> int:
    """Return the bytes that ``primitive`` takes on each of its slots while it runs."""
    match primitive:
        case Split(source=source, parts=parts):
            part = memory.footprint(source.model_stage, parts[0].layout)
            return part - memory.footprint(source.model_stage, source.layout)
        case Extend(target=target) | Unpark(target=target) | Merge(target=target, aligned=False):
            return memory.footprint(target.model_stage, target.layout)
        case Merge() | Destroy() | Park():
            return 0


def release_bytes(primitive: Primitive, memory: Memory) -> int:
    """Return the bytes that each slot of ``primitive`` has free again when it is done."""
    match primitive:
        case Merge(parts=parts, target=target):
            kept = memory.footprint(target.model_stage, target.layout) - growth_bytes(primitive, memory)
            return memory.footprint(target.model_stage, parts[0].layout) - kept
        case Destroy(replica=replica) | Park(replica=replica):
            return memory.footprint(replica.model_stage, replica.layout)
        case Split() | Extend() | Unpark():
            return 0


def groups_of(
    model_stages: Iterable[ModelStage], groups: Sequence[Sequence[ModelStage]]
) -> dict[ModelStage, tuple[int, ...]]:
    """Return for each model-stage in which concurrency groups it is; one that is in none has a group of its own."""
    return {
        model_stage: tuple([i for i, group in enumerate(groups) if model_stage in group]) or (len(groups) + own,)
        for own, model_stage in enumerate(model_stages)
    }


class Ledger:
    """The books of one transition. ``ValueError``: a primitive breaks a rule; its text names slot, size and owner."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        needed: Iterable[ModelStage],
        groups: Sequence[Sequence[ModelStage]],
        memory: Memory | None,
    ) -> None:
        self._needed = frozenset(needed)
        start = tuple(replicas)
        self._groups = groups_of(dict.fromkeys([*(replica.model_stage for replica in start), *self._needed]), groups)
        self._owned: dict[int, dict[SlotId, Replica]] = {}
        self._live: dict[ModelStage, dict[Replica, None]] = {}
        self._parked: dict[ModelStage, Replica] = {}
        self._used: Counter[Replica] = Counter()
        self._memory = memory
        self._bytes: Counter[SlotId] = Counter(memory.reserved_bytes if memory else ())
        self._host_bytes: Counter[str] = Counter()
        for replica in start:
            self._own(replica)
            self._add(replica)
            if memory:
                self._grow(replica.slots, memory.footprint(replica.model_stage, replica.layout), "the current plan")

    def replicas(self, model_stage: ModelStage) -> tuple[Replica, ...]:
        """Return the complete copies on slots."""
        return tuple(self._live.get(model_stage, ()))

    def parked(self, model_stage: ModelStage) -> Replica | None:
        """Return the copy in host memory."""
        return self._parked.get(model_stage)

    def owners(self, slot: SlotId) -> tuple[Replica, ...]:
        """Return the replicas that hold ``slot``, complete or being made."""
        found = (owned[slot] for owned in self._owned.values() if slot in owned)
        return tuple(dict.fromkeys(found))

    def slot_bytes(self) -> Mapping[SlotId, int]:
        """Return the bytes taken on each slot; empty if memory is not kept track of."""
        return self._bytes

    def host_bytes(self) -> Mapping[str, int]:
        """Return the bytes of parked replicas on each host."""
        return self._host_bytes

    def start(self, primitive: Primitive) -> None:
        """Take the slots, the memory and the reading rights that ``primitive`` needs."""
        match primitive:
            case Split(source=source):
                self._claim(source, primitive)
            case Merge(parts=parts):
                for part in parts:
                    self._claim(part, primitive)
            case Destroy(replica=replica):
                self._claim(replica, primitive)
                self._drop(replica)
            case Park(replica=replica):
                self._claim(replica, primitive)
                if self._memory:
                    self._take_host(self._memory, replica, primitive.id)
            case Extend(sources=sources, target=target):
                for source in sources:
                    self._read(source, primitive)
                self._own(target)
            case Unpark(source=source, target=target):
                if self._parked.get(source.model_stage) != source:
                    raise ValueError(f"{primitive.id} needs {source} in host memory, where it is not")
                self._own(target)
        if self._memory:
            self._grow(slots_of(primitive), growth_bytes(primitive, self._memory), primitive.id)

    def done(self, primitive: Primitive) -> None:
        """Release what ``primitive`` drops, and count what it has made as complete."""
        match primitive:
            case Split(source=source, parts=parts):
                self._exchange((source,), parts)
            case Merge(parts=parts, target=target):
                self._exchange(parts, (target,))
            case Destroy(replica=replica):
                self._disown(replica)
            case Park(replica=replica):
                self._parked[replica.model_stage] = replica
                self._drop(replica)
                self._disown(replica)
            case Extend(sources=sources, target=target):
                self._used.subtract(sources)
                self._add(target)
            case Unpark(source=source, target=target):
                self._add(target)
                del self._parked[source.model_stage]
                if self._memory:
                    self._host_bytes.subtract(self._memory.parked(source))
        if self._memory:
            released = release_bytes(primitive, self._memory)
            if released:
                self._bytes.subtract(dict.fromkeys(slots_of(primitive), released))

    def _add(self, replica: Replica) -> None:
        self._live.setdefault(replica.model_stage, {})[replica] = None

    def _drop(self, replica: Replica) -> None:
        live = self._live[replica.model_stage]
        del live[replica]
        self._used.pop(replica, None)
        if not live and replica.model_stage in self._needed and replica.model_stage not in self._parked:
            raise ValueError(f"{replica} is the last copy of {replica.model_stage}")

    def _exchange(self, old: Sequence[Replica], new: Sequence[Replica]) -> None:
        for replica in old:
            self._disown(replica)
        for replica in new:
            self._own(replica)
            self._add(replica)
        for replica in old:
            if replica not in new:
                self._drop(replica)

    def _claim(self, replica: Replica, primitive: Primitive) -> None:
        """Reserve ``replica`` for a primitive that consumes it: it must be complete and nobody may read it."""
        self._read(replica, primitive)
        if self._used[replica] > 1:
            raise ValueError(f"{primitive.id} would consume {replica}, which another primitive still uses")

    def _read(self, replica: Replica, primitive: Primitive) -> None:
        if replica not in self._live.get(replica.model_stage, ()):
            raise ValueError(f"{primitive.id} needs {replica}, which is not a complete copy of {replica.model_stage}")
        self._used[replica] += 1

    def _own(self, replica: Replica) -> None:
        for group in self._groups[replica.model_stage]:
            owned = self._owned.setdefault(group, {})
            if not owned.keys().isdisjoint(replica.slots):
                slot = next(slot for slot in replica.slots if slot in owned)
                other = owned[slot]
                raise ValueError(
                    f"slot {slot} would be owned twice: by {other.model_stage} {other} "
                    f"and by {replica.model_stage} {replica}"
                )
            owned.update(dict.fromkeys(replica.slots, replica))

    def _disown(self, replica: Replica) -> None:
        for group in self._groups[replica.model_stage]:
            owned = self._owned[group]
            for slot in replica.slots:
                del owned[slot]

    def _grow(self, slots: Sequence[SlotId], size: int, what: str) -> None:
        if not size or not self._memory:
            return
        self._bytes.update(dict.fromkeys(slots, size))
        worst = max(slots, key=self._bytes.__getitem__)
        if self._bytes[worst] > self._memory.capacity_bytes:
            raise ValueError(
                f"{what} takes {size} bytes on slot {worst}, which then holds {self._bytes[worst]} "
                f"of {self._memory.capacity_bytes}"
            )

    def _take_host(self, memory: Memory, replica: Replica, what: str) -> None:
        self._host_bytes.update(memory.parked(replica))
        worst = max(self._host_bytes, key=self._host_bytes.__getitem__)
        if self._host_bytes[worst] > memory.host_bytes:
            raise ValueError(
                f"{what} needs {self._host_bytes[worst]} bytes on host {worst!r}, which has {memory.host_bytes}"
            )
