"""Which slots are there, on which nodes, and how fast are they and the links between them?

Values only. Invariants (tests/core/test_cluster.py): a slot belongs to one node; node sizes add up to the pool; a
group of slots communicates at the speed of its slowest link.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from msgspec import Struct

from nereus.core.plan import SlotId


class LinkType(enum.StrEnum):
    """What lies between two slots; efficiencies of communication are kept apart by it."""

    IN_NODE = "in_node"
    CROSS_NODE = "cross_node"


class Link(Struct, frozen=True):
    """A link as one slot sees it: ``latency_s`` to start a message, ``bytes_per_s`` in one direction at its peak."""

    latency_s: float
    bytes_per_s: float


class Device(Struct, frozen=True):
    """What a slot computes on: peaks as the vendor states them (dense, 16-bit), never what a program reaches."""

    name: str
    memory_bytes: float
    flops_per_s: float
    bytes_per_s: float


class Slot(Struct, frozen=True, order=True):
    """One accelerator: its number, its host and its place on the host."""

    id: SlotId
    host: str
    index: int


class Node(Struct, frozen=True):
    """One host and the slots that share its fast links."""

    host: str
    slots: tuple[SlotId, ...]


class Cluster(Struct, frozen=True):
    """The pool of slots: equal devices on nodes, fast links in a node and slower ones between nodes.

    ``host_bytes_per_s`` is the speed between a slot and its host's memory; ``host_memory_bytes`` is per node.
    """

    name: str
    device: Device
    nodes: tuple[Node, ...]
    in_node: Link
    cross_node: Link
    host_bytes_per_s: float = 16e9
    host_memory_bytes: float = 0.0

    def __post_init__(self) -> None:
        count = sum(len(node.slots) for node in self.nodes)
        if not count:
            raise ValueError(f"cluster {self.name} has no slots; give it at least one")
        if len({slot for node in self.nodes for slot in node.slots}) != count:
            raise ValueError(f"cluster {self.name} names a slot twice")

    @property
    def size(self) -> int:
        """Count the slots."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def slots_per_node(self) -> int:
        """Return the size of the largest node: how wide a group with fast links can be."""
        return max(len(node.slots) for node in self.nodes)

    def slots(self) -> Iterable[Slot]:
        """Yield every slot, node by node."""
        for node in self.nodes:
            for index, slot in enumerate(node.slots):
                yield Slot(slot, node.host, index)

    def node_of(self) -> dict[SlotId, str]:
        """Return the name of every slot's node."""
        return {slot: node.host for node in self.nodes for slot in node.slots}

    def link(self, link_type: LinkType) -> Link:
        return self.in_node if link_type is LinkType.IN_NODE else self.cross_node

    def between(self, slots: Collection[SlotId]) -> LinkType:
        """Return the slowest kind of link inside a group of slots."""
        wanted = set(slots)
        one_node = any(wanted <= set(node.slots) for node in self.nodes)
        return LinkType.IN_NODE if one_node else LinkType.CROSS_NODE

    def spans(self, width: int) -> LinkType:
        """Return the slowest kind of link inside a group of ``width`` adjacent slots placed as tightly as possible."""
        return LinkType.IN_NODE if width <= self.slots_per_node else LinkType.CROSS_NODE

    def without(self, lost: Collection[SlotId]) -> Cluster:
        """Return the pool that is left when ``lost`` slots are gone; ``ValueError`` if none is left."""
        nodes = tuple(Node(node.host, tuple(slot for slot in node.slots if slot not in lost)) for node in self.nodes)
        return self._with(tuple(node for node in nodes if node.slots))

    def joined_by(self, slots: Collection[SlotId]) -> Cluster:
        """Return the pool with more slots on its last node."""
        *others, last = self.nodes
        return self._with((*others, Node(last.host, (*last.slots, *slots))))

    def resized(self, slots: int) -> Cluster:
        """Return the same machine with ``slots`` slots on full nodes, the last one perhaps partial."""
        return self._with(uniform_nodes(slots, self.slots_per_node))

    def _with(self, nodes: tuple[Node, ...]) -> Cluster:
        return Cluster(
            self.name,
            self.device,
            nodes,
            self.in_node,
            self.cross_node,
            self.host_bytes_per_s,
            self.host_memory_bytes,
        )


def uniform_nodes(slots: int, slots_per_node: int) -> tuple[Node, ...]:
    """Return nodes of ``slots_per_node`` slots numbered from 0; ``ValueError`` when a count is below 1."""
    if slots < 1 or slots_per_node < 1:
        raise ValueError(f"{slots} slots at {slots_per_node} a node make no cluster; both must be at least 1")
    return tuple(
        Node(f"node-{first // slots_per_node}", tuple(range(first, min(first + slots_per_node, slots))))
        for first in range(0, slots, slots_per_node)
    )
