"""Does group_advantages compare siblings only, and never turn rounding into signal?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.algo.advantage import group_advantages, zero_std_groups

NAN = float("nan")
reward = st.one_of(st.just(NAN), st.floats(-1e6, 1e6))


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_known_group() -> None:
    rewards, groups = array(1, 0, 0, 1, 5, 5), np.array([0, 0, 0, 0, 1, 1])
    std = np.std([1, 0, 0, 1], ddof=1)
    expected = np.array([0.5, -0.5, -0.5, 0.5, 0, 0])
    np.testing.assert_allclose(group_advantages(rewards, groups, "mean"), expected, atol=1e-12)
    np.testing.assert_allclose(group_advantages(rewards, groups, "std"), expected / (std + 1e-6), rtol=1e-12)


@pytest.mark.parametrize("mode", ["std", "mean"])
def test_missing_rewards_do_not_poison_their_siblings(mode: str) -> None:
    full = group_advantages(array(3, 1, 2), np.array([7, 7, 7]), mode)
    with_gap = group_advantages(array(3, NAN, 1, 2), np.array([7, 7, 7, 7]), mode)
    np.testing.assert_array_equal(with_gap, [full[0], 0, full[1], full[2]])


@pytest.mark.parametrize("mode", ["std", "mean"])
@pytest.mark.parametrize(
    "values",
    [(1.0,), (NAN,), (NAN, NAN), (NAN, 4.0), (0.3, 0.1 + 0.2), (1e6, 1e6 + 0.1), (0.0, 0.0), (-1.0, -1.0 - 1e-9)],
)
def test_groups_that_teach_nothing_give_exactly_zero(mode: str, values: tuple[float, ...]) -> None:
    assert not group_advantages(array(*values), np.zeros(len(values), np.int32), mode).any()


def test_small_scale_is_not_amplified() -> None:
    assert np.abs(group_advantages(array(0.0, 1e-12), np.array([0, 0]), "std")).max() < 1e-5


def test_large_scale_does_not_overflow() -> None:
    values = group_advantages(array(-1e300, 1e300), np.array([0, 0]), "std")
    np.testing.assert_allclose(values, [-(0.5**0.5), 0.5**0.5])


@given(st.lists(st.tuples(reward, st.integers(-2, 3)), max_size=30), st.sampled_from(["std", "mean"]), st.randoms())
def test_finite_zero_mean_and_independent_of_order(pairs: list[tuple[float, int]], mode: str, random: object) -> None:
    rewards, groups = array(*(r for r, _ in pairs)), np.array([g for _, g in pairs], np.int32)
    advantages = group_advantages(rewards, groups, mode)
    assert np.isfinite(advantages).all()
    assert not advantages[np.isnan(rewards)].any()
    for label in np.unique(groups):
        mine = groups == label
        scale = np.abs(advantages[mine]).max(initial=1.0)
        assert abs(advantages[mine].sum()) <= 1e-9 * scale
        np.testing.assert_allclose(group_advantages(rewards[mine], groups[mine], mode), advantages[mine], rtol=1e-9)
        best, worst = np.nanmax(np.append(rewards[mine], -np.inf)), np.nanmin(np.append(rewards[mine], np.inf))
        assert (advantages[mine & (rewards == best)] >= 0).all() and (advantages[mine & (rewards == worst)] <= 0).all()
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    np.testing.assert_allclose(group_advantages(rewards[order], groups[order], mode), advantages[order], rtol=1e-9)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 is infinite"):
        group_advantages(array(0, np.inf), np.array([0, 0]), "std")
    with pytest.raises(ValueError, match="one length"):
        group_advantages(array(0, 1), np.array([0]), "std")
    with pytest.raises(ValueError, match="mode"):
        group_advantages(array(0), np.array([0]), "median")  # type: ignore[arg-type]


def test_dead_groups_are_counted() -> None:
    rewards, groups = array(1, 0, 2, 2, NAN, 3), np.array([0, 0, 1, 1, 2, 2])
    assert zero_std_groups(rewards, groups) == 2
