"""Transfers that share a link share its bandwidth; others do not wait."""

from __future__ import annotations

import pytest

from nereus.core.profiles import load_cluster
from nereus.sim.links import REACHED, Links

CLUSTER = load_cluster("a100-64g-256", 16)
LATENCY_S = CLUSTER.in_node.latency_s


def test_a_transfer_alone_takes_bytes_over_the_link() -> None:
    speed = CLUSTER.in_node.bytes_per_s * REACHED
    assert Links(CLUSTER).transfer(0, 1, speed, 5.0) == pytest.approx(6.0 + LATENCY_S)


def test_two_over_one_link_take_as_long_as_both() -> None:
    links, speed = Links(CLUSTER), CLUSTER.in_node.bytes_per_s * REACHED
    links.transfer(0, 1, speed, 0.0)
    assert links.transfer(2, 1, speed, 0.0) == pytest.approx(2.0 + LATENCY_S)
    assert links.transfer(3, 2, speed, 0.0) == pytest.approx(1.0 + LATENCY_S)


def test_a_node_has_one_way_out() -> None:
    links, speed = Links(CLUSTER), CLUSTER.cross_node.bytes_per_s * REACHED
    arrives = [links.transfer(slot, 4 + slot, speed, 0.0) for slot in range(4)]
    assert max(arrives) == pytest.approx(1.0 + CLUSTER.cross_node.latency_s)
    assert links.transfer(0, 8, speed, 0.0) > 1.2
    assert not links.near(0, 4)


def test_a_broadcast_over_more_nodes_takes_hardly_longer() -> None:
    links = Links(CLUSTER)
    assert links.broadcast_s(16e9, 2) <= links.broadcast_s(16e9, 64) < 1.01 * links.broadcast_s(16e9, 2)
