from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.core.plan import (
    POLICY_GENERATION,
    POLICY_TRAINING,
    Emu,
    Layout,
    ModelStage,
    Plan,
    Replication,
    Stage,
)

degrees = st.integers(1, 64)
layouts = st.builds(Layout, degrees, degrees)


@given(st.builds(Replication, degrees, layouts))
def test_the_text_of_a_layout_round_trips(replication: Replication) -> None:
    assert Replication.parse(str(replication)) == replication
    assert Replication.parse(str(replication.layout)) == Replication(1, replication.layout)


@pytest.mark.parametrize("text", ["", "x", "d0t1p1", "t2d1", "2", "d2 t1", "t1p1p1"])
def test_what_is_no_layout_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="write it like d2t2p1"):
        Replication.parse(text)


@given(layouts)
def test_coordinates_count_tensor_ranks_first_and_name_each_slot_once(layout: Layout) -> None:
    seen = [layout.coordinates(index) for index in range(layout.slots)]
    assert seen == [(pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]


@given(layouts, st.integers(-2, 2))
def test_a_unit_has_exactly_the_slots_of_its_layout(layout: Layout, off: int) -> None:
    slots = tuple(range(layout.slots + off))
    if off == 0:
        assert Emu(POLICY_TRAINING, 0, layout, slots).slots == slots
    else:
        with pytest.raises(ValueError, match=rf"policy.training/0 .* needs {layout.slots} distinct slots"):
            Emu(POLICY_TRAINING, 0, layout, slots)


def test_a_unit_does_not_use_a_slot_twice() -> None:
    with pytest.raises(ValueError, match="2 distinct slots"):
        Emu(POLICY_TRAINING, 0, Layout(tp=2), (3, 3))


def test_units_of_one_model_stage_share_one_layout_and_have_their_own_ids() -> None:
    one, other = Emu(POLICY_TRAINING, 0, Layout(), (0,)), Emu(POLICY_TRAINING, 1, Layout(tp=2), (1, 2))
    with pytest.raises(ValueError, match="must share one layout"):
        Plan(0, (one, other))
    with pytest.raises(ValueError, match="ids repeat"):
        Plan(0, (one, Emu(POLICY_TRAINING, 0, Layout(), (1,))))


def test_a_plan_finds_its_units_and_what_overlaps() -> None:
    trains = [Emu(POLICY_TRAINING, ordinal, Layout(), (ordinal,)) for ordinal in (1, 0)]
    draws = Emu(POLICY_GENERATION, 0, Layout(tp=2), (1, 2))
    plan = Plan(3, (*trains, draws))
    assert [emu.ordinal for emu in plan.of(POLICY_TRAINING)] == [0, 1]
    assert plan.model_stages() == (POLICY_GENERATION, POLICY_TRAINING)
    assert set(plan.on(1)) == {trains[0], draws}
    assert plan.slots() == {0, 1, 2}
    assert plan.overlaps([POLICY_TRAINING]) == ()
    assert plan.overlaps([POLICY_TRAINING, POLICY_GENERATION]) == (1,)


def test_model_stages_are_read_as_they_are_written_and_ordered_by_stage() -> None:
    assert ModelStage.parse("policy.training") == POLICY_TRAINING
    assert str(ModelStage(Stage.INFERENCE, "reference")) == "reference.inference"
    assert sorted([POLICY_TRAINING, POLICY_GENERATION]) == [POLICY_GENERATION, POLICY_TRAINING]
    for text in ("training", "policy.flying", ".training"):
        with pytest.raises(ValueError, match="is not a model-stage"):
            ModelStage.parse(text)
