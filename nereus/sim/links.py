"""When does a transfer arrive that shares its way with others?

Every slot has one way out and one in, and every node one in each direction; a way carries what it is given in turn, so
two transfers over one link take as long as both together. Owner: ``devices.py``. Invariants (tests/sim/test_links.py):
a transfer alone takes bytes over the slowest link; two that share a link take as long as both; transfers that share
nothing do not wait for each other.
"""

from __future__ import annotations

from collections import defaultdict

from nereus.core.cluster import Cluster
from nereus.core.plan import SlotId

REACHED = 0.78
"""Ours: share of a link's bandwidth that large transfers reach."""

COMMUNICATOR_S = 1.2
COMMUNICATOR_RANK_S = 3e-3
"""Ours: setting up process groups, and for each rank of them."""

ENGINE_START_S = 6.0
"""Ours: building a generation engine: cache, kernels, graphs."""


def communicators_s(ranks: int) -> float:
    """Return the seconds of setting up a process group."""
    return COMMUNICATOR_S + COMMUNICATOR_RANK_S * ranks


class Links:
    """The ways between the slots of a cluster, and until when each is taken."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._node_of = cluster.node_of()
        self._node_bytes_per_s = cluster.cross_node.bytes_per_s * cluster.slots_per_node
        self._taken: defaultdict[tuple[str, str], float] = defaultdict(float)

    def near(self, one: SlotId, other: SlotId) -> bool:
        """Say whether two slots are on one node."""
        return self._node_of.get(one) == self._node_of.get(other)

    def transfer(self, source: SlotId, target: SlotId, size_bytes: float, now: float) -> float:
        """Take the way from slot to slot for ``size_bytes``; return when the last byte is there."""
        near = self.near(source, target)
        link = self._cluster.in_node if near else self._cluster.cross_node
        ways = [("out", f"slot-{source}"), ("in", f"slot-{target}")]
        arrives = max(self._carry(way, size_bytes / (link.bytes_per_s * REACHED), now) for way in ways)
        if not near:
            seconds = size_bytes / (self._node_bytes_per_s * REACHED)
            nodes = (("out", self._node_of.get(source, "")), ("in", self._node_of.get(target, "")))
            arrives = max(arrives, *(self._carry(way, seconds, now) for way in nodes))
        return arrives + link.latency_s

    def broadcast_s(self, size_bytes: float, nodes: int) -> float:
        """Return the seconds until a pipelined broadcast to the hosts of ``nodes`` nodes is through."""
        if nodes <= 1:
            return size_bytes / (self._cluster.host_bytes_per_s * REACHED)
        slowest = min(self._node_bytes_per_s, self._cluster.host_bytes_per_s)
        return size_bytes / (slowest * REACHED) + nodes * self._cluster.cross_node.latency_s

    def into_node_s(self, size_bytes: float) -> float:
        """Return the seconds of bringing bytes into a node with the network of all its slots."""
        return size_bytes / (self._node_bytes_per_s * REACHED) + self._cluster.cross_node.latency_s * (size_bytes > 0)

    def in_node_s(self, size_bytes: float) -> float:
        """Return the seconds of bringing bytes to a slot from others of its node."""
        return size_bytes / (self._cluster.in_node.bytes_per_s * REACHED)

    def from_host_s(self, size_bytes: float) -> float:
        """Return the seconds of copying from a host's memory to one of its slots."""
        return size_bytes / (self._cluster.host_bytes_per_s * REACHED)

    def nodes_of(self, slots: frozenset[SlotId]) -> int:
        return len({self._node_of.get(slot, "") for slot in slots})

    def _carry(self, way: tuple[str, str], seconds: float, now: float) -> float:
        self._taken[way] = max(self._taken[way], now) + seconds
        return self._taken[way]
