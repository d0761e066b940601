"""Do slots belong to one node, and do groups get the link they span?"""

from __future__ import annotations

import pytest

from nereus.core.cluster import Cluster, Device, Link, LinkType, Node, uniform_nodes

DEVICE = Device("d", 64e9, 312e12, 1.5e12)


def cluster(slots: int = 10, per_node: int = 4) -> Cluster:
    return Cluster("c", DEVICE, uniform_nodes(slots, per_node), Link(9e-6, 300e9), Link(2e-5, 12.5e9))


def test_nodes_add_up_to_the_pool() -> None:
    pool = cluster()
    assert pool.size == 10 and [len(node.slots) for node in pool.nodes] == [4, 4, 2]
    assert [slot.id for slot in pool.slots()] == list(range(10))
    assert {slot.host for slot in pool.slots()} == {"node-0", "node-1", "node-2"}


def test_a_group_is_as_fast_as_its_slowest_link() -> None:
    pool = cluster()
    assert pool.between([0, 3]) is LinkType.IN_NODE and pool.between([3, 4]) is LinkType.CROSS_NODE
    assert pool.spans(4) is LinkType.IN_NODE and pool.spans(5) is LinkType.CROSS_NODE
    assert pool.link(LinkType.CROSS_NODE).bytes_per_s == 12.5e9


def test_lost_slots_leave_and_empty_nodes_go() -> None:
    left = cluster().without([8, 9, 0])
    assert left.size == 7 and [node.host for node in left.nodes] == ["node-0", "node-1"]
    assert cluster().resized(3).size == 3


def test_impossible_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cluster(0)
    with pytest.raises(ValueError, match="no slots"):
        cluster().without(range(10))
    with pytest.raises(ValueError, match="twice"):
        Cluster("c", DEVICE, (Node("a", (0,)), Node("b", (0,))), Link(0, 1), Link(0, 1))
