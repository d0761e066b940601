"""Does the sample order visit every row once an epoch, and does the cursor count exactly what is finished?"""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.algo.sampler import Cursor, SampleOrder


@given(st.integers(1, 300), st.integers(0, 2**63), st.booleans(), st.integers(0, 10**6))
def test_every_epoch_visits_every_row_once(rows: int, seed: int, shuffle: bool, epoch: int) -> None:
    order = SampleOrder(rows, seed, shuffle)
    visited = [order.row(group) for group in range(epoch * rows, (epoch + 1) * rows)]
    assert sorted(visited) == list(range(rows))
    if not shuffle:
        assert visited == list(range(rows))


def test_epochs_and_seeds_differ_and_the_order_never_ends() -> None:
    order = SampleOrder(64, 1, True)
    epochs = [tuple(order.row(epoch * 64 + i) for i in range(64)) for epoch in range(5)]
    assert len(set(epochs)) == 5
    assert epochs[0] != tuple(SampleOrder(64, 2, True).row(i) for i in range(64))
    assert order.row(64 * 3) in range(64)  # the first group after an exact epoch end


def test_shuffle_is_even_enough() -> None:
    """Each row should stand first about equally often."""
    first = [SampleOrder(5, seed, True).row(0) for seed in range(2000)]
    assert all(330 < first.count(row) < 470 for row in range(5))


def test_order_is_stable() -> None:
    """A change of these numbers would reorder the data of every run that is resumed."""
    golden = [6, 2, 5, 8, 3, 7, 4, 9, 1, 0, 5, 1, 3, 8, 7, 9, 0, 4, 2, 6]
    assert [SampleOrder(10, 0, True).row(group) for group in range(20)] == golden


@given(st.permutations(range(12)), st.lists(st.integers(1, 4), min_size=1))
def test_cursor_covers_exactly_what_was_finished(order: list[int], sizes: list[int]) -> None:
    cursor, rest, done = Cursor(), list(order), set[int]()
    for size in itertools.cycle(sizes):
        batch, rest = rest[:size], rest[size:]
        if not batch:
            break
        cursor = cursor.advance(batch)
        done |= set(batch)
        assert {group for group in range(20) if group in cursor} == done
        assert list(itertools.islice(cursor.unfinished(), 5)) == [g for g in range(30) if g not in done][:5]
        assert msgspec.json.decode(msgspec.json.encode(cursor), type=Cursor) == cursor
    assert cursor == Cursor(12)


def test_nothing_is_finished_twice() -> None:
    cursor = Cursor().advance([0, 2])
    for group in (0, 2):
        with pytest.raises(ValueError, match=f"group {group} is finished already"):
            cursor.advance([group])
    with pytest.raises(ValueError, match="group 1 "):
        cursor.advance([1, 1])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        SampleOrder(0, 0, False)
    with pytest.raises(ValueError, match="count from 0"):
        SampleOrder(3, 0, False).row(-1)
