"""Is the horizon what was seen of past intervals, and nothing else?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.control.horizon import Horizon


def test_one_before_the_first_interval() -> None:
    assert Horizon().steps(["length"]) == 1.0
    assert Horizon().crossed("length", 40).steps(["length"]) == 1.0


def test_the_newest_interval_weighs_half() -> None:
    horizon = Horizon().crossed("length", 0).crossed("length", 10)
    assert horizon.steps(["length"]) == 10.0
    assert horizon.crossed("length", 14).steps(["length"]) == 7.0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_stays_between_the_intervals_seen(intervals: list[int]) -> None:
    horizon, step = Horizon().crossed("length", 0), 0
    for interval in intervals:
        step += interval
        horizon = horizon.crossed("length", step)
    assert min(intervals) <= horizon.steps(["length"]) <= max(intervals)


def test_the_smallest_of_several_and_the_old_value_is_kept() -> None:
    before = Horizon().crossed("length", 0).crossed("length", 50).crossed("slots", 20)
    after = before.crossed("slots", 25)
    assert after.steps(["length", "slots"]) == 5.0 and after.steps(["length"]) == 50.0
    assert before.steps(["slots"]) == 1.0


def test_a_crossing_in_the_same_step_counts_once_and_time_does_not_run_back() -> None:
    horizon = Horizon().crossed("length", 3)
    assert horizon.crossed("length", 3) == horizon
    with pytest.raises(ValueError, match="after a crossing at step 3"):
        horizon.crossed("length", 2)
