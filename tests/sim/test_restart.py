from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nereus.sim.policies.restart import Growth, Pipes, System, fixed_s, moving_s
from nereus.sim.policies.whole_restart import WholeRestart
from nereus.sim.storm import storm, storm_job

pytestmark = pytest.mark.deep

GROWTH = Growth(2, 4, 200e9, 400e9)


@given(some.sampled_from(list(System)), some.floats(1.0, 5.0), some.booleans())
def test_more_state_and_slower_pipes_never_make_a_system_faster(system: System, factor: float, moves: bool) -> None:
    small = Growth(2, 4, 200e9, 400e9, moves)
    large = Growth(2, 4, 200e9 * factor, 400e9 * factor, moves)
    slow = Pipes(2e9 / factor, 0.8e9 / factor, 25e9 / factor, 256e9 / factor)
    assert moving_s(system, large, Pipes()) >= moving_s(system, small, Pipes())
    assert moving_s(system, small, slow) >= moving_s(system, small, Pipes())


def test_storage_is_dearer_than_memory_and_conversion_is_dearest() -> None:
    seconds = {system: moving_s(system, GROWTH, Pipes()) for system in System}
    assert seconds[System.UCP] > seconds[System.MCP] > seconds[System.TENPLEX] > seconds[System.GEMINI]
    assert seconds[System.UCP] == pytest.approx(200 / 4 + 200 / 0.8 + 400 / 2)


def test_fitting_meets_the_figure_unless_moving_alone_takes_longer() -> None:
    moving = moving_s(System.GEMINI, GROWTH, Pipes())
    assert fixed_s(System.GEMINI, GROWTH, Pipes(), moving + 20) == pytest.approx(20)
    assert fixed_s(System.GEMINI, GROWTH, Pipes(), moving - 1) == 0


def test_a_job_that_restarts_as_a_whole_goes_back_to_its_checkpoint_with_every_loss() -> None:
    config = storm_job(16, 16)
    calm, struck = (storm(config, 4, mtbf_s, policy=WholeRestart()) for mtbf_s in (0.0, 200.0))
    assert (calm.wrong, calm.steps, calm.restores) == ("", 16, 0)
    assert (struck.wrong, struck.steps) == ("", 16)
    assert struck.restores > 0
    assert struck.changes == 0
    assert struck.virtual_s > calm.virtual_s + 60.0 * struck.restores
