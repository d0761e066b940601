"""The truth of a synchronous step's model-stages."""

from __future__ import annotations

import pytest

from nereus.core.plan import POLICY_GENERATION, Emu, Layout, ModelStage, Plan, Stage
from nereus.core.profiles import load_cluster, load_model
from nereus.errors import OutOfMemory
from nereus.sim.engine import Speed, all_at_once
from nereus.sim.job import SynchronousJob
from nereus.sim.noise import Noise
from nereus.sim.stages import REFIT_S, Sampled, Stages, _by_waves
from nereus.sim.trace import Trace

JOB = SynchronousJob(cluster=load_cluster("a100-64g-256", 8), model=load_model("llama-3.1-8b"), prompts=64)
QUIET = Trace("quiet", "test")
CRITIC = ModelStage(Stage.TRAINING, "critic")
REFERENCE = ModelStage(Stage.INFERENCE, "reference")
SAMPLED = Sampled(tuple((256, (1000 + 10 * i,)) for i in range(64)), tuple((256, 1000 + 10 * i) for i in range(64)))


def stages(*, sharded: bool = False) -> Stages:
    return Stages(JOB, Noise(0, scale=0.0), QUIET, sharded=sharded)


def units(stage: ModelStage, layout: Layout, slots: int) -> tuple[Emu, ...]:
    size = layout.slots
    return tuple(
        Emu(stage, place, layout, tuple(range(first, first + size)))
        for place, first in enumerate(range(0, slots, size))
    )


@pytest.mark.parametrize("room", [10**9, 90_000])
def test_generation_at_once_and_by_waves_agree(room: int) -> None:
    speed = Speed(lambda live: 0.01 + 1e-4 * live, 1e-9)
    at_once = all_at_once(SAMPLED.groups, speed, lambda tokens: 1e-5 * tokens)
    waves = _by_waves(SAMPLED.groups, speed, lambda tokens: 1e-5 * tokens, room)  # type: ignore[arg-type]
    if room == 10**9:
        assert waves == pytest.approx(at_once, rel=1e-9)
    else:
        assert waves > at_once


@pytest.mark.parametrize("stage", [POLICY_GENERATION, REFERENCE, CRITIC])
def test_more_replicas_never_take_longer(stage: ModelStage) -> None:
    took = [
        stages().took(Plan(0, units(stage, Layout(4), slots), (CRITIC,)), stage, SAMPLED, 0).seconds for slots in (4, 8)
    ]
    assert took[1] < took[0]


def test_a_slot_with_too_little_memory_says_whose_it_is() -> None:
    with pytest.raises(OutOfMemory, match=r"critic\.training of step 0 needs .*its own"):
        stages().took(Plan(0, units(CRITIC, Layout(2), 2), (CRITIC,)), CRITIC, SAMPLED, 0)


def test_what_lies_beside_leaves_less_room_for_generation() -> None:
    generation = units(POLICY_GENERATION, Layout(4), 4)
    alone = stages().took(Plan(0, generation), POLICY_GENERATION, SAMPLED, 0)
    beside = stages().took(Plan(0, (*generation, *units(CRITIC, Layout(4), 4))), POLICY_GENERATION, SAMPLED, 0)
    assert beside.seconds >= alone.seconds


def test_shared_state_takes_less_memory_and_more_time() -> None:
    plan = Plan(0, units(CRITIC, Layout(), 8), (CRITIC,))
    with pytest.raises(OutOfMemory):
        stages().took(plan, CRITIC, SAMPLED, 0)
    shared = stages(sharded=True).took(plan, CRITIC, SAMPLED, 0)
    assert shared.peak_bytes < 64e9
    assert stages(sharded=True).state_bytes(CRITIC, Layout(), 8) == pytest.approx(
        stages().state_bytes(CRITIC, Layout()) / 8
    )


def test_weights_that_are_there_already_do_not_travel() -> None:
    policy = ModelStage(Stage.TRAINING)
    near = Plan(0, (*units(policy, Layout(4), 4), *units(POLICY_GENERATION, Layout(4), 4)))
    far = Plan(0, (*units(policy, Layout(4), 4), Emu(POLICY_GENERATION, 0, Layout(4), (4, 5, 6, 7))))
    assert stages().weight_sync_s(near) == REFIT_S < stages().weight_sync_s(far)


def test_weights_come_into_a_node_once_whatever_lies_there() -> None:
    policy = ModelStage(Stage.TRAINING)
    trainer = units(policy, Layout(4), 4)
    engines = [tuple(Emu(POLICY_GENERATION, n, Layout(2), (4 + 2 * n, 5 + 2 * n)) for n in range(dp)) for dp in (1, 2)]
    one, two = (stages().weight_sync_s(Plan(0, (*trainer, *there))) for there in engines)
    assert one == two
    whole, cluster = stages().truth("policy").weights_bytes(Layout()), JOB.cluster
    assert one > REFIT_S + whole / (cluster.cross_node.bytes_per_s * cluster.slots_per_node)


def test_a_trainer_over_two_nodes_has_half_of_what_each_needs() -> None:
    trainer = units(ModelStage(Stage.TRAINING), Layout(4, 2), 8)
    half = Plan(0, (*trainer, *units(POLICY_GENERATION, Layout(4), 8)))
    whole = Plan(0, (*units(ModelStage(Stage.TRAINING), Layout(4), 4), *units(POLICY_GENERATION, Layout(4), 8)))
    assert REFIT_S < stages().weight_sync_s(half) < stages().weight_sync_s(whole)


def test_what_is_asked_again_of_one_step_is_the_same_and_other_steps_are_asked_anew() -> None:
    noisy = Stages(JOB, Noise(0), QUIET)
    trained = [Plan(0, units(CRITIC, Layout(4), 8), again) for again in ((CRITIC,), ())]
    longer = Sampled(SAMPLED.groups, tuple((prompt, 2 * response) for prompt, response in SAMPLED.trained))
    asked = [(trained[0], SAMPLED, 0), (trained[0], SAMPLED, 1), (trained[0], longer, 0), (trained[1], SAMPLED, 0)]
    first = [noisy.took(plan, CRITIC, sampled, step) for plan, sampled, step in asked]
    assert first == [noisy.took(plan, CRITIC, sampled, step) for plan, sampled, step in asked]
    assert first == [Stages(JOB, Noise(0), QUIET).took(plan, CRITIC, sampled, step) for plan, sampled, step in asked]
    assert len({one.seconds for one in first}) == len(first)
    beside = Plan(0, (*trained[0].emus, *units(REFERENCE, Layout(), 8)), (CRITIC,))
    fuller = noisy.took(beside, CRITIC, SAMPLED, 0)
    assert fuller.seconds == first[0].seconds
    assert fuller.peak_bytes > first[0].peak_bytes


def test_a_step_that_is_slower_than_asked_for_is_not_followed_to_its_end() -> None:
    policy = ModelStage(Stage.TRAINING)
    plan = Plan(
        0,
        tuple(sorted(unit for stage in JOB.workflow.model_stages for unit in units(stage, Layout(8), 8))),
        (CRITIC, policy),
    )
    whole = stages().step_s(plan, SAMPLED, 0)
    assert stages().step_s(plan, SAMPLED, 0, whole * 1.01) == whole
    assert stages().step_s(plan, SAMPLED, 0, whole * 0.5) == float("inf")
