"""How long does a collective take at full link speed?

Latency plus bytes times the algorithm's factor over bandwidth, per link type. A ring that crosses nodes enters and
leaves each node once, so it may use the network share of every member on that node, up to the speed inside the node.
Values broadcast: arguments are numbers or arrays of one shape.
"""

from __future__ import annotations

import numpy as np

from nereus.control.efficiency import Array, Flags
from nereus.core.cluster import Cluster

Values = Array | float


def all_reduce_share(width: Values) -> Array:
    """Return bytes on the wire per byte reduced: 2 (n - 1) / n, for a ring or its equal."""
    return np.asarray(2.0 * (np.asarray(width) - 1.0) / np.asarray(width))


def all_gather_share(width: Values) -> Array:
    """Return bytes on the wire per byte gathered, or reduced and scattered: (n - 1) / n."""
    return np.asarray((np.asarray(width) - 1.0) / np.asarray(width))


def members_per_node(cluster: Cluster, width: Values, stride: Values) -> Array:
    """Return how many of ``width`` slots, each ``stride`` slots after the one before, stand on one node."""
    room = np.maximum(1.0, cluster.slots_per_node // np.asarray(stride, dtype=float))
    return np.asarray(np.minimum(room, width))


def ring_bytes_per_s(cluster: Cluster, width: Values, stride: Values) -> tuple[Array, Flags]:
    """Return the link speed a ring has, and whether it crosses nodes."""
    members = members_per_node(cluster, width, stride)
    crosses = np.asarray(members < width)
    network = np.minimum(cluster.in_node.bytes_per_s, cluster.cross_node.bytes_per_s * members)
    return np.asarray(np.where(crosses, network, cluster.in_node.bytes_per_s)), crosses


def latency_s(cluster: Cluster, width: Values, crosses: Flags) -> Array:
    """Return the start-up time of one collective: a tree of messages over the slowest link; 0 for one slot."""
    one = np.where(crosses, cluster.cross_node.latency_s, cluster.in_node.latency_s)
    return np.asarray(one * np.ceil(np.log2(np.maximum(width, 1.0))))
