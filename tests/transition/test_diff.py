"""Is what is kept, dropped, split, made and merged exactly the difference of two plans?"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.core.plan import Layout
from nereus.sim.scenarios import scenario
from nereus.transition.cost import traffic
from nereus.transition.diff import canonical_parts, common_layout, diff
from nereus.transition.primitive import Merge, Replica, Split
from nereus.transition.reshard import TensorSpec
from tests.transition.journeys import GENERATION, REFERENCE, TRAINING, plans, units

T1, T2, T4, P2, T2P2 = Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(1, 2), Layout(2, 2)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [(T4, T2, T2), (T4, P2, T1), (Layout(4, 2), Layout(2, 4), T2P2), (Layout(6, 1), Layout(4, 1), T2), (T2, T2, T2)],
)
def test_common_layout_takes_the_gcd_of_every_degree(one: Layout, other: Layout, common: Layout) -> None:
    assert common_layout(one, other) == common_layout(other, one) == common


def test_equal_units_stay_whatever_their_ordinals() -> None:
    before = units(GENERATION, T2, (0, 1), (2, 3))
    after = units(GENERATION, T2, (2, 3), (0, 1), first=7)
    (change,) = diff(*plans(before, after))
    assert change.stays == tuple(map(Replica.of, before))
    assert not (change.dropped or change.extended or change.splittings or change.mergings)


def test_a_unit_of_which_a_part_is_used_is_split_and_the_other_is_dropped_whole() -> None:
    before = units(GENERATION, T4, (0, 1, 2, 3), (4, 5, 6, 7))
    after = units(GENERATION, T2, (2, 3), (8, 9), first=2)
    (change,) = diff(*plans(before, after))
    (splitting,) = change.splittings
    assert [part.slots for part in splitting.kept] == [(2, 3)]
    assert [part.slots for part in splitting.dropped] == [(0, 1)]
    assert [replica.slots for replica in change.dropped] == [(4, 5, 6, 7)]
    assert [replica.slots for replica in change.extended] == [(8, 9)]


def test_whole_units_inside_a_wanted_one_are_merged_and_the_rest_of_it_is_made() -> None:
    before = units(TRAINING, T2, (0, 2), (4, 5))
    after = units(TRAINING, T4, (0, 1, 2, 3), first=2)
    (change,) = diff(*plans(before, after))
    (merging,) = change.mergings
    assert [replica.slots for replica in merging.resident] == [(0, 2)]
    assert [replica.slots for replica in merging.extended] == [(1, 3)]
    assert merging.aligned
    assert [replica.slots for replica in change.dropped] == [(4, 5)]


def test_the_same_slots_in_another_order_are_reshuffled_in_place() -> None:
    (change,) = diff(*plans(units(TRAINING, T2, (0, 1)), units(TRAINING, T2, (1, 0), first=1)))
    (merging,) = change.mergings
    assert (merging.resident[0].slots, merging.target.slots, merging.aligned) == ((0, 1), (1, 0), False)


def test_model_stages_come_in_stage_order_and_may_appear_or_go() -> None:
    before = units(TRAINING, T1, (0,)) + units(REFERENCE, T1, (1,))
    after = units(TRAINING, T1, (0,)) + units(GENERATION, T1, (1,))
    changes = diff(*plans(before, after))
    assert [change.model_stage for change in changes] == [GENERATION, REFERENCE, TRAINING]
    assert changes[0].extended and changes[1].dropped


@pytest.mark.parametrize("layout", [T4, P2, T2P2, Layout(2, 4), Layout(4, 2)])
@pytest.mark.parametrize("part", [T1, T2, P2])
def test_canonical_parts_merge_without_copying_and_split_only_what_lacks(layout: Layout, part: Layout) -> None:
    common = common_layout(layout, part)
    specs = [TensorSpec(f"layer.{i}", (8, 4), "float32", 0, i) for i in range(8)]
    slots = tuple(range(10, 10 + layout.slots))
    whole = Replica(TRAINING, layout, slots)
    parts = tuple(Replica(TRAINING, common, part) for part in canonical_parts(slots, layout, common))
    assert sorted(slot for replica in parts for slot in replica.slots) == list(slots)
    assert traffic(Merge("m", parts, whole, True), specs, 8) == ()
    copies = traffic(Split("s", whole, parts), specs, 8)
    elements = sum((copy.piece.stop[0] - copy.piece.start[0]) * 4 for copy in copies)
    assert elements == 8 * 8 * 4 * (len(parts) - 1)


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=60)
def test_what_is_kept_made_and_merged_is_the_target_and_every_source_unit_is_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    case = scenario(rng, rng.choice((8, 12, 16, 32)))
    for change in diff(case.current, case.target):
        merged = [part for merging in change.mergings for part in merging.resident + merging.extended]
        kept_parts = [part for splitting in change.splittings for part in splitting.kept]
        final = [*change.stays, *change.extended, *(merging.target for merging in change.mergings)]
        final += [part for part in kept_parts if part not in merged]
        assert Counter(final) == Counter(map(Replica.of, case.target.of(change.model_stage)))
        sources = [*change.stays, *change.kept, *change.dropped, *(split.source for split in change.splittings)]
        assert Counter(sources) == Counter(map(Replica.of, case.current.of(change.model_stage)))
        for splitting in change.splittings:
            slots = [slot for part in splitting.kept + splitting.dropped for slot in part.slots]
            assert sorted(slots) == sorted(splitting.source.slots)
        for merging in change.mergings:
            slots = [slot for part in merging.resident + merging.extended for slot in part.slots]
            assert sorted(slots) == sorted(merging.target.slots)
