"""Of which moves is a transition made, and in which order may they run?

Values only: replicas, the primitives that make, move and drop them, the memory they may use, and the graph that orders
them. A *replica* is one complete copy of a model-stage's state on slots, laid out like an elastic model unit; inside a
transition it may have a layout that no unit of either plan has. Invariants (tests/transition/test_compile.py): a graph
lists its primitives in an order that its edges allow, so it is acyclic. Replicas and primitives cannot be part of a
reference cycle, so the garbage collector need not look at them (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId

PrimitiveId = str


class Replica(Struct, frozen=True, order=True, gc=False):
    """One complete copy of a model-stage's state; ``slots`` in the order of ``Layout.coordinates``."""

    model_stage: ModelStage
    layout: Layout
    slots: tuple[SlotId, ...]

    @classmethod
    def of(cls, emu: Emu) -> Replica:
        return cls(emu.model_stage, emu.layout, emu.slots)

    @property
    def unit(self) -> Emu:
        """The replica as a unit, for index arithmetic: its ordinal means nothing."""
        return Emu(self.model_stage, 0, self.layout, self.slots)

    def __str__(self) -> str:
        return f"{self.layout} on {','.join(map(str, self.slots))}"


class Split(Struct, frozen=True, tag=True, gc=False):
    """Turn one replica into several of a smaller layout on the same slots: each slot gathers what it lacks."""

    id: PrimitiveId
    source: Replica
    parts: tuple[Replica, ...]


class Destroy(Struct, frozen=True, tag=True, gc=False):
    """Drop a redundant replica and release its slots."""

    id: PrimitiveId
    replica: Replica


class Extend(Struct, frozen=True, tag=True, gc=False):
    """Make one more replica on free slots; every source sends a stripe of it."""

    id: PrimitiveId
    sources: tuple[Replica, ...]
    target: Replica


class Merge(Struct, frozen=True, tag=True, gc=False):
    """Turn the replicas that tile the slots of ``target`` into one; what a slot does not need any more is dropped.

    ``aligned``: every slot holds all it needs already, so that nothing is copied (up to layers that pipeline ranks
    share unevenly). Otherwise the new shards are received beside the old ones.
    """

    id: PrimitiveId
    parts: tuple[Replica, ...]
    target: Replica
    aligned: bool


class Park(Struct, frozen=True, tag=True, gc=False):
    """Move the only replica into host memory, each slot's shard to its own host, and release its slots."""

    id: PrimitiveId
    replica: Replica


class Unpark(Struct, frozen=True, tag=True, gc=False):
    """Make a replica on free slots from the one parked in host memory."""

    id: PrimitiveId
    source: Replica
    target: Replica


Primitive = Split | Destroy | Extend | Merge | Park | Unpark


def model_stage_of(primitive: Primitive) -> ModelStage:
    """Return the model-stage whose state ``primitive`` touches."""
    return _subject(primitive).model_stage


def layout_of(primitive: Primitive) -> Layout:
    """Return the layout of what ``primitive`` leaves behind, or of what it drops."""
    return primitive.parts[0].layout if isinstance(primitive, Split) else _subject(primitive).layout


def slots_of(primitive: Primitive) -> tuple[SlotId, ...]:
    """Return the slots whose ownership or memory ``primitive`` changes."""
    return _subject(primitive).slots


def _subject(primitive: Primitive) -> Replica:
    match primitive:
        case Split():
            return primitive.source
        case Destroy() | Park():
            return primitive.replica
        case Extend() | Merge() | Unpark():
            return primitive.target


class Memory(Struct, frozen=True):
    """How much state a slot and a host can hold while a plan changes.

    ``state_bytes`` is one whole replica of a model-stage. A slot holds an even share of it, unless ``shard_bytes``
    knows the largest share of that layout exactly. ``reserved_bytes`` of a slot are taken by what does not move.
    ``host_bytes`` per host are free for parked replicas: 0 forbids parking.
    """

    capacity_bytes: int
    state_bytes: Mapping[ModelStage, int]
    shard_bytes: Mapping[tuple[ModelStage, Layout], int] = {}
    reserved_bytes: Mapping[SlotId, int] = {}
    host_bytes: int = 0
    host_of: Mapping[SlotId, str] = {}

    def footprint(self, model_stage: ModelStage, layout: Layout) -> int:
        """Return the bytes that one slot of a replica holds."""
        exact = self.shard_bytes.get((model_stage, layout)) if self.shard_bytes else None
        return exact if exact is not None else -(-self.state_bytes[model_stage] // layout.slots)

    def parked(self, replica: Replica) -> dict[str, int]:
        """Return the bytes that parking ``replica`` takes on each host."""
        share = self.footprint(replica.model_stage, replica.layout)
        taken: dict[str, int] = {}
        for slot in replica.slots:
            host = self.host_of.get(slot, "")
            taken[host] = taken.get(host, 0) + share
        return taken


class TransitionDag(Struct, frozen=True):
    """The order in which primitives lead from ``current`` to ``target``.

    ``primitives`` stand in a topological order. ``local[i]`` and ``resource[i]`` are the indices of those that must be
    done before primitive ``i``: because it uses what they make (or they use what it drops), or because they release
    the slots or the memory that it needs. ``groups`` are the sets of model-stages that run at the same time and so may
    not share a slot.
    """

    current: Plan
    target: Plan
    groups: tuple[tuple[ModelStage, ...], ...]
    memory: Memory | None
    primitives: tuple[Primitive, ...]
    local: tuple[tuple[int, ...], ...]
    resource: tuple[tuple[int, ...], ...]


class Stuck(Struct, frozen=True):
    """No order of primitives leads to the target: each of ``cycle`` waits for the next, the last for the first.

    A ``cycle`` of one sentence waits for something that does not come: memory that no primitive frees, or a copy that
    does not exist.
    """

    cycle: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.cycle)
