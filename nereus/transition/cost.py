"""How long does a transition take?

A transition is priced by playing its own graph: the seconds of one primitive from bytes over links, communicator set-up
and copies to host memory; the whole as the time at which the last one ends. Invariants
(tests/transition/test_makespan.py): the price is the longest path through the graph; more stripes, faster links and
less state never make a primitive slower.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from nereus.core.cluster import Cluster, Link
from nereus.core.plan import Layout, SlotId
from nereus.transition.primitive import (
    Destroy,
    Extend,
    Memory,
    Merge,
    Park,
    Primitive,
    PrimitiveId,
    Replica,
    Split,
    TransitionDag,
    Unpark,
)
from nereus.transition.reshard import Held, Move, TensorSpec, moves, piece_bytes, piece_of, pieces_of
from nereus.transition.run import TransitionRun


class TransferRates(Struct, frozen=True):
    """What moving state costs on a cluster, as measured or assumed: reached, not peak, rates of one slot.

    ``stream_bytes_per_s`` bounds what one sender gets through to one receiver: striping over several senders goes
    beyond it, up to the link. A communicator costs ``communicator_s`` and ``communicator_rank_s`` for each rank.
    ``pause_s`` is what stopping and resuming the run costs once a transition.
    """

    in_node: Link
    cross_node: Link
    host_bytes_per_s: float
    stream_bytes_per_s: float = math.inf
    communicator_s: float = 0.0
    communicator_rank_s: float = 0.0
    release_s: float = 0.0
    """Dropping a replica: freeing its memory and leaving its communicators."""
    pause_s: float = 0.0
    node_of: Mapping[SlotId, str] = {}
    """A slot that is not named is on one nameless node."""

    @classmethod
    def of(cls, cluster: Cluster, *, efficiency: float = 1.0, communicator_s: float = 0.0) -> TransferRates:
        """Return the rates of a cluster's links at one efficiency."""
        near, far = (
            Link(link.latency_s, link.bytes_per_s * efficiency) for link in (cluster.in_node, cluster.cross_node)
        )
        host_bytes_per_s = cluster.host_bytes_per_s * efficiency
        return cls(near, far, host_bytes_per_s, communicator_s=communicator_s, node_of=cluster.node_of())


class PrimitiveSeconds:
    """The predicted seconds of primitives: ``seconds = PrimitiveSeconds(rates, memory); seconds(primitive)``."""

    def __init__(self, rates: TransferRates, memory: Memory) -> None:
        self._rates = rates
        self._memory = memory

    def __call__(self, primitive: Primitive) -> float:
        rates = self._rates
        match primitive:
            case Extend(sources=sources, target=target):
                return self._extend(sources, target)
            case Destroy():
                return rates.release_s
            case Split(source=source, parts=parts):
                lacking = self._share(parts[0]) - self._share(source)
                link = self._link(source.slots)
                return self._communicator(len(source.slots)) + link.latency_s + max(0, lacking) / link.bytes_per_s
            case Merge(target=target, aligned=aligned):
                set_up = self._communicator(len(target.slots))
                if aligned:
                    return set_up
                link = self._link(target.slots)
                return set_up + link.latency_s + self._share(target) / link.bytes_per_s
            case Park(replica=replica):
                return self._share(replica) / rates.host_bytes_per_s
            case Unpark(source=source, target=target):
                return self._unpark(source, target)

    def _extend(self, sources: Sequence[Replica], target: Replica) -> float:
        """Every target slot receives its shard in stripes; no slot sends or receives faster than its link.

        Sources on the target's own node send all of it, if there are any (``reshard.moves``).
        """
        rates = self._rates
        sources = [one for one in sources if len(self._nodes([*one.slots, *target.slots])) == 1] or sources
        link = self._link([*target.slots, *(slot for source in sources for slot in source.slots)])
        received = self._share(target)
        sent = received * len(target.slots) / sum([len(source.slots) for source in sources])
        rate = min(link.bytes_per_s, rates.stream_bytes_per_s * len(sources))
        seconds = max(received / rate, sent / link.bytes_per_s)
        return self._communicator(2 * len(target.slots)) + link.latency_s + seconds

    def _unpark(self, source: Replica, target: Replica) -> float:
        """Each slot fetches its shard from its own host, or from the hosts that have it."""
        rates = self._rates
        set_up = self._communicator(len(target.slots))
        near = self._nodes(target.slots) <= self._nodes(source.slots)
        link = rates.in_node if near else rates.cross_node
        return set_up + link.latency_s + self._share(target) / min(rates.host_bytes_per_s, link.bytes_per_s)

    def _share(self, replica: Replica) -> int:
        return self._memory.footprint(replica.model_stage, replica.layout)

    def _communicator(self, ranks: int) -> float:
        return self._rates.communicator_s + self._rates.communicator_rank_s * ranks

    def _link(self, slots: Collection[SlotId]) -> Link:
        return self._rates.in_node if len(self._nodes(slots)) == 1 else self._rates.cross_node

    def _nodes(self, slots: Collection[SlotId]) -> set[str | None]:
        return set(map(self._rates.node_of.get, slots))


def makespan(run: TransitionRun, seconds: Callable[[Primitive], float]) -> float:
    """Return when the last primitive would end if each took ``seconds(primitive)``."""
    now, running = 0.0, list[tuple[float, PrimitiveId]]()
    while not run.finished:
        for primitive in run.ready():
            heapq.heappush(running, (now + seconds(primitive), primitive.id))
        now, primitive_id = heapq.heappop(running)
        run.done(primitive_id)
    return now


def transition_seconds(dag: TransitionDag, rates: TransferRates, memory: Memory) -> float:
    """Return the price of a transition: the pause and the makespan; an empty one is free."""
    if not dag.primitives:
        return 0.0
    return rates.pause_s + makespan(TransitionRun(dag), PrimitiveSeconds(rates, memory))


def largest_shard_bytes(specs: Iterable[TensorSpec], layers: int, layout: Layout) -> int:
    """Return the bytes of the fullest slot of a unit: what ``Memory.shard_bytes`` wants."""
    tensors = tuple(specs)
    by_name = {spec.name: spec for spec in tensors}
    return max(
        sum(piece_bytes(by_name[piece.name], piece) for piece in pieces_of(tensors, layers, layout, index))
        for index in range(layout.slots)
    )


def traffic(
    primitive: Primitive, specs: Iterable[TensorSpec], layers: int, *, held: Held = piece_of
) -> tuple[Move, ...]:
    """Return which pieces ``primitive`` copies between slots; what goes to and from host memory is not among them."""
    match primitive:
        case Split(source=source, parts=parts):
            return moves(specs, layers, [source.unit], [part.unit for part in parts], held=held)
        case Merge(parts=parts, target=target):
            return moves(specs, layers, [part.unit for part in parts], [target.unit], held=held)
        case Extend(sources=sources, target=target):
            return moves(specs, layers, [one.unit for one in sources], [target.unit], held=held)
        case Destroy() | Park() | Unpark():
            return ()
