"""Do length distributions keep mass, mean and tail?"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core.workload import Lengths, Workload

SAMPLES = st.lists(st.integers(1, 20_000), min_size=1, max_size=300)


@given(SAMPLES, st.integers(1, 500))
def test_a_thinned_sample_keeps_mean_and_tail(sample: list[int], count: int) -> None:
    lengths = Lengths.of(sample)
    assert sum(lengths.shares) == pytest.approx(1)
    assert lengths.longest == max(sample) and len(lengths.tokens) <= 49
    assert lengths.mean == pytest.approx(sum(sample) / len(sample), rel=0.01, abs=1)
    curve = [lengths.survivors(step) for step in (0, *lengths.tokens)]
    assert curve[0] == pytest.approx(1) and curve[-1] == 0
    assert all(a >= b for a, b in itertools.pairwise(curve))
    assert lengths.mean - 1e-6 <= lengths.expected_longest(count) <= lengths.longest + 1e-6


@pytest.mark.parametrize(("mean", "p95"), [(1147.5, 1339.0), (3722.0, 4072.0), (1000.0, 3000.0)])
def test_a_log_normal_has_the_stated_mean_and_percentile(mean: float, p95: float) -> None:
    lengths = Lengths.log_normal(mean, p95, 100_000, atoms=400)
    assert lengths.mean == pytest.approx(mean, rel=0.02)
    assert lengths.quantile(0.95) == pytest.approx(p95, rel=0.02)


def test_impossible_distributions_are_refused() -> None:
    with pytest.raises(ValueError, match="95th"):
        Lengths.log_normal(100, 50, 1000)
    with pytest.raises(ValueError, match="no log-normal"):
        Lengths.log_normal(100, 100_000, 1000)
    with pytest.raises(ValueError, match="ascending"):
        Lengths((2, 1), (0.5, 0.5))
    with pytest.raises(ValueError, match="sum to 1"):
        Lengths((1, 2), (0.5, 0.1))


def test_a_workload_counts_samples_and_refuses_unequal_minibatches() -> None:
    workload = Workload(Lengths.fixed(100), Lengths.fixed(50), groups=8, group_size=4, minibatches=2)
    assert (workload.samples, workload.samples_per_minibatch, workload.longest) == (32, 16, 150)
    assert workload.mean_square_tokens == 150**2
    with pytest.raises(ValueError, match="equal minibatches"):
        Workload(Lengths.fixed(1), Lengths.fixed(1), groups=3, minibatches=2)
