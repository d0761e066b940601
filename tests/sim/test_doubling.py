from __future__ import annotations

import pytest

from nereus.core.plan import Layout
from nereus.core.profiles import load_cluster, load_model
from nereus.sim.doubling import BYTES_PER_PARAMETER, FULL_LINKS, doubling, resharding

H200, MODEL = load_cluster("h200-64"), load_model("llama-3.1-8b")


def test_new_nodes_are_filled_over_their_network_and_old_ones_over_fast_links() -> None:
    changes = [doubling(H200, MODEL, slots, FULL_LINKS) for slots in (4, 8, 16, 32)]
    state = 2 * BYTES_PER_PARAMETER * MODEL.parameters
    wire = state / 25e9
    assert changes[0].seconds < 2
    assert all(wire < change.seconds < wire + 2 for change in changes[1:])
    assert [(change.growth.nodes_before, change.growth.nodes_after) for change in changes] == [
        (1, 1),
        (1, 2),
        (2, 4),
        (4, 8),
    ]
    assert changes[1].growth.node_bytes == pytest.approx(state)


def test_a_slower_link_takes_longer_and_a_change_of_layout_moves_all() -> None:
    assert doubling(H200, MODEL, 8).seconds > doubling(H200, MODEL, 8, FULL_LINKS).seconds
    change = resharding(H200, MODEL, 16, Layout(4), Layout(2))
    assert change.growth.moves_all
    assert change.seconds > 0.5
