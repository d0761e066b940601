"""Everything random comes from one seed, each thing from a stream of its own."""

from __future__ import annotations

from statistics import mean

from nereus.sim.noise import SLOWDOWN, STRAGGLE_STEPS, Noise


def test_equal_keys_draw_alike_and_others_do_not() -> None:
    assert Noise(3).jitter("a", 1) == Noise(3).jitter("a", 1)
    assert len({Noise(seed).jitter(name, 1) for seed in (3, 4) for name in "ab"}) == 4


def test_jitter_has_mean_one_and_can_be_left_out() -> None:
    noise = Noise(0)
    assert abs(mean(noise.jitter("step", step) for step in range(2000)) - 1) < 0.002
    quiet = Noise(0, scale=0.0)
    assert quiet.jitter("step", 1) == quiet.fragments(1) == quiet.slowest(range(8), 1) == 1.0


def test_a_straggler_is_slow_for_a_while() -> None:
    noise = Noise(1)
    slow = [noise.slowest(range(64), step) > SLOWDOWN * 0.98 for step in range(0, 400, STRAGGLE_STEPS)]
    assert 0 < sum(slow) < len(slow)
