from __future__ import annotations

import pytest

from nereus.sim.coordination import coordination
from nereus.sim.scenarios import OVERLAPS


@pytest.mark.parametrize("kind", OVERLAPS[:3])
def test_ours_always_arrives_and_equal_trials_count_equally(kind: str) -> None:
    found = coordination(kind, 16, 12)
    assert (found.trials, found.arrived) == (12, 12)
    assert found == coordination(kind, 16, 12)
    assert found.one_by_one <= found.side_by_side <= 12


def test_components_that_move_by_themselves_get_stuck() -> None:
    assert coordination(OVERLAPS[2], 16, 60).one_by_one < 60
