from __future__ import annotations

import itertools

import pytest

from nereus.sim.generators import Shape, drift_walk, failures, growth, slot_walk
from nereus.sim.trace import StepLengths, Trace

FIRST, LAST = StepLengths(500.0, 600.0), StepLengths(8000.0, 9000.0)


@pytest.mark.parametrize("shape", ["linear", "geometric", "sigmoid", "late"])
def test_growth_has_its_ends_and_rises_between(shape: Shape) -> None:
    found = growth(FIRST, LAST, 50, shape=shape)
    assert (found[0], found[-1]) == (FIRST, LAST)
    means = [one.mean_tokens for one in found]
    assert means == sorted(means)
    assert len({round(mean) for mean in means}) > 40


def test_noise_moves_steps_but_not_the_ends_and_comes_from_the_seed() -> None:
    one, same, other = (growth(FIRST, LAST, 50, noise=0.1, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert (one[0], one[-1]) == (FIRST, LAST)


def test_a_walk_goes_to_neighbours_and_holds_as_long_as_asked() -> None:
    sizes = (8, 16, 24, 32)
    found = slot_walk(2000, sizes, hold=5, seed=3, start=16)
    assert (found[0].at_step, found[0].slots) == (0, 16)
    assert {one.slots for one in found} == set(sizes)
    assert all(abs(a.slots - b.slots) == 8 for a, b in itertools.pairwise(found))
    assert 2000 / len(found) == pytest.approx(5, rel=0.15)


def test_speeds_stay_within_bounds_and_make_a_valid_trace() -> None:
    found = drift_walk(1000, ("gemm", "decode"), hold=4, spread=2.0, seed=1, least=0.5)
    assert {drift.operation for drift in found} == {"gemm", "decode"}
    assert all(0.5 <= drift.factor <= 2.0 for drift in found)
    assert Trace("t", "s", efficiency=found).efficiency == found


def test_failures_come_at_their_rate() -> None:
    found = failures(1e6, every_s=1000.0, seed=2, kinds=("kill", "hang"))
    assert len(found) == pytest.approx(1000, rel=0.1)
    assert {failure.kind for failure in found} == {"kill", "hang"}
    assert [failure.at_s for failure in found] == sorted(failure.at_s for failure in found)
