"""Does the first plan place every unit once, within the slots?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config import ClusterConfig, JobConfig, RolloutConfig, TrainConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, POLICY_WEIGHTS, Replication, Stage
from nereus.runtime.placement import FIRST_VIRTUAL_SLOT, initial_plan

DEGREES = st.integers(1, 4)


def job(train: str, rollout: str, slots: int) -> JobConfig:
    return JobConfig(
        cluster=ClusterConfig(slots=slots), train=TrainConfig(layout=train), rollout=RolloutConfig(layout=rollout)
    )


@given(DEGREES, DEGREES, DEGREES, DEGREES)
def test_all_units_are_placed_without_overlap(dp: int, tp: int, pp: int, rollouts: int) -> None:
    slots = dp * tp * pp + rollouts
    plan = initial_plan(job(f"d{dp}t{tp}p{pp}", f"d{rollouts}", slots))
    assert plan.epoch == 0
    assert len(plan.of(POLICY_TRAINING)) == dp
    assert len(plan.of(POLICY_GENERATION)) == rollouts
    assert plan.overlaps(plan.model_stages()) == ()
    assert plan.slots() == {*range(slots), FIRST_VIRTUAL_SLOT}
    assert all(emu.slots == tuple(range(emu.slots[0], emu.slots[0] + emu.layout.slots)) for emu in plan.emus)


def test_trainers_come_first_and_the_relay_takes_no_device() -> None:
    plan = initial_plan(job("d1t2", "d2", 5))
    assert [(emu.id, emu.slots) for emu in plan.emus] == [
        ("policy.training/0", (0, 1)),
        ("policy.generation/0", (2,)),
        ("policy.generation/1", (3,)),
        ("policy.weights/0", (FIRST_VIRTUAL_SLOT,)),
    ]
    assert plan.of(POLICY_WEIGHTS)[0].model_stage.stage is Stage.WEIGHTS


def test_the_relay_is_on_no_slot_of_the_largest_jobs() -> None:
    plan = initial_plan(job("d256t4p2", "d512t4", 4096))
    assert not {slot for emu in plan.of(POLICY_WEIGHTS) for slot in emu.slots} & set(range(4096))


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="need 4 slots, there are 3"):
        initial_plan(job("d2", "d2", 3))
    assert Replication.parse("d2").slots == 2
