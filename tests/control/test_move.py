"""Is a move free where nothing changes, within memory on the way, and honest about what is gone?"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nereus.control.breakdown import Overheads, Pricing
from nereus.control.efficiency import Efficiencies, OperationClass
from nereus.control.memory import MARGIN
from nereus.control.move import move, seconds_of, state_terms, wire_bytes
from nereus.core.plan import (
    POLICY_GENERATION,
    POLICY_TRAINING,
    POLICY_WEIGHTS,
    REFERENCE_INFERENCE,
    Emu,
    Layout,
    ModelStage,
    Plan,
)
from nereus.core.profiles import load_cluster, load_model
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

PRICING = Pricing(
    load_cluster("a100-64g", 16),
    {"policy": load_model("llama-3.1-8b")},
    workflow(Algorithm.GRPO, reward_model=False),
    Workload(Lengths.fixed(512), Lengths.fixed(512), groups=32),
    Efficiencies.prior(),
)


def units(stage: ModelStage, layout: Layout, *firsts: int) -> tuple[Emu, ...]:
    return tuple(
        Emu(stage, ordinal, layout, tuple(range(first, first + layout.slots))) for ordinal, first in enumerate(firsts)
    )


def plan(epoch: int, *groups: tuple[Emu, ...]) -> Plan:
    return Plan(epoch, tuple(emu for group in groups for emu in group))


NOW = plan(
    0,
    units(POLICY_GENERATION, Layout(4, 1), 0, 4),
    units(REFERENCE_INFERENCE, Layout(1, 1), 8, 9),
    units(POLICY_TRAINING, Layout(4, 2), 0),
    (Emu(POLICY_WEIGHTS, 0, Layout(), (4000,)),),
)
GROWN = plan(
    1,
    units(POLICY_GENERATION, Layout(4, 1), 0, 4, 8),
    units(REFERENCE_INFERENCE, Layout(1, 1), 8, 9),
    units(POLICY_TRAINING, Layout(4, 2), 0, 8),
    (Emu(POLICY_WEIGHTS, 0, Layout(), (4000,)),),
)


def test_no_change_costs_nothing() -> None:
    found = move(PRICING, NOW, replace(NOW, epoch=1))
    assert found.dag is not None and not found.dag.primitives
    assert (found.seconds, found.moved_bytes, found.restored, found.stuck) == (0.0, 0, (), "")


def test_growing_sends_state_without_gradients() -> None:
    found = move(PRICING, NOW, GROWN)
    training = state_terms(PRICING, POLICY_TRAINING, Layout(4, 2))
    generation = state_terms(PRICING, POLICY_GENERATION, Layout(4, 1))
    sent = 8 * (sum(training.values()) - training["gradients"]) + 4 * sum(generation.values())
    assert found.moved_bytes == sent
    assert found.seconds > Overheads().pause_s
    assert found.peak_bytes * MARGIN <= PRICING.cluster.device.memory_bytes
    assert found.dag is not None
    seconds = seconds_of(PRICING, found.dag)
    longest = max(seconds(primitive) for primitive in found.dag.primitives)
    total = sum(seconds(primitive) for primitive in found.dag.primitives)
    assert longest + Overheads().pause_s <= found.seconds <= total + Overheads().pause_s


def test_better_links_are_never_slower() -> None:
    better = replace(PRICING, efficiencies=Efficiencies.of({OperationClass.P2P_CROSS_NODE: 0.9}))
    assert move(better, NOW, GROWN).seconds < move(PRICING, NOW, GROWN).seconds


def test_frozen_weights_that_are_gone_are_restored_and_trained_ones_are_not() -> None:
    lost = Plan(0, tuple(emu for emu in NOW.emus if emu.model_stage != REFERENCE_INFERENCE))
    found = move(PRICING, lost, replace(NOW, epoch=1))
    assert found.restored == (REFERENCE_INFERENCE,) and not found.stuck
    weights = sum(state_terms(PRICING, REFERENCE_INFERENCE, Layout()).values())
    assert found.moved_bytes == 2 * weights
    assert found.seconds == pytest.approx(weights / PRICING.cluster.host_bytes_per_s + Overheads().pause_s)
    gone = Plan(0, tuple(emu for emu in NOW.emus if emu.model_stage != POLICY_TRAINING))
    assert "only a checkpoint has it" in move(PRICING, gone, replace(NOW, epoch=1)).stuck


def test_a_move_that_fits_nowhere_is_stuck() -> None:
    """Two sole copies swap slots that have no room for both, on hosts without memory."""
    device = replace(PRICING.cluster.device, memory_bytes=24e9)
    tight = replace(PRICING, cluster=replace(PRICING.cluster, device=device, host_memory_bytes=0.0))
    one = plan(0, units(POLICY_GENERATION, Layout(1, 1), 0), units(REFERENCE_INFERENCE, Layout(1, 1), 1))
    other = plan(1, units(POLICY_GENERATION, Layout(1, 1), 1), units(REFERENCE_INFERENCE, Layout(1, 1), 0))
    both = (units(POLICY_TRAINING, Layout(4, 2), 8),)
    one, other = plan(0, one.emus, *both), plan(1, other.emus, *both)
    assert move(tight, one, other).stuck
    roomy = replace(tight, cluster=replace(tight.cluster, host_memory_bytes=1e12))
    found = move(roomy, one, other)
    assert not found.stuck and found.dag is not None
    assert {type(primitive).__name__ for primitive in found.dag.primitives} >= {"Park", "Unpark"}


def test_what_is_on_a_slot_now_is_there_whatever_the_model_says() -> None:
    device = replace(PRICING.cluster.device, memory_bytes=8e9)
    small = replace(PRICING, cluster=replace(PRICING.cluster, device=device))
    found = move(small, NOW, replace(NOW, epoch=1))
    assert not found.stuck and found.peak_bytes * MARGIN > 8e9


def test_bytes_of_primitives_are_not_negative() -> None:
    found = move(PRICING, GROWN, replace(NOW, epoch=2))
    assert found.dag is not None and found.dag.memory is not None
    assert all(wire_bytes(primitive, found.dag.memory) >= 0 for primitive in found.dag.primitives)
    assert found.moved_bytes == 0
