"""Are plan changes read as they are written, and only in order?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core.change import Change, parse_changes
from nereus.core.plan import Layout, Replication

DEGREES = st.integers(1, 64)
LAYOUTS = st.builds(Replication, DEGREES, st.builds(Layout, DEGREES, DEGREES))
CHANGES = st.builds(Change, st.integers(1, 10**6), LAYOUTS, LAYOUTS)


@given(st.lists(CHANGES, max_size=5, unique_by=lambda change: change.step))
def test_what_is_read_is_written_the_same_way(changes: list[Change]) -> None:
    ordered = sorted(changes, key=lambda change: change.step)
    assert parse_changes("; ".join(map(str, ordered))) == tuple(ordered)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "'x' is not a plan change"),
        ("5 d1t1p1", "'5 d1t1p1' is not a plan change"),
        ("-5 d1t1p1 d1t1p1", "'-5 d1t1p1 d1t1p1' is not a plan change"),
        ("5 d1t1p1 d0", "'5 d1t1p1 d0' is not a plan change"),
        ("0 d1t1p1 d1t1p1", "'0 d1t1p1 d1t1p1' is not after step 0"),
        ("2 d1t1p1 d1t1p1; 2 d1t1p1 d1t1p1", "is not after step 2"),
    ],
)
def test_anything_else_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_changes(text)
