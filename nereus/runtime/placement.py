"""Which unit starts on which slot?

Epoch 0 of a run and the plans that a job asks for later are decided from the layouts alone. Trainers take the first
slots, rollouts the next, and the weight-sync relay, which uses no accelerator, a virtual slot. Slots of one unit are
adjacent, so they share a host where hosts hold several slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from nereus.config import JobConfig
from nereus.core.plan import (
    POLICY_GENERATION,
    POLICY_TRAINING,
    POLICY_WEIGHTS,
    Emu,
    Layout,
    ModelStage,
    Plan,
    Replication,
    SlotId,
)

FIRST_VIRTUAL_SLOT: SlotId = 1_000_000
"""Units that use no accelerator get slots from here on; device slots lie below."""


def initial_plan(config: JobConfig) -> Plan:
    """Return the plan of epoch 0; ``ValueError`` if the layouts need more than ``cluster.slots`` slots."""
    train = Replication.parse(config.train.layout)
    rollout = Replication.parse(config.rollout.layout)
    if train.slots + rollout.slots > config.cluster.slots:
        raise ValueError(
            f"layouts {train} and {rollout} need {train.slots + rollout.slots} slots, there are {config.cluster.slots}"
        )
    return Plan(
        0,
        (
            *_units(POLICY_TRAINING, train, 0),
            *_units(POLICY_GENERATION, rollout, train.slots),
            Emu(POLICY_WEIGHTS, 0, Layout(), (FIRST_VIRTUAL_SLOT,)),
        ),
        (POLICY_TRAINING,) if config.train.recompute else (),
    )


def slots_to_start(config: JobConfig) -> range:
    """Return the slots that get a process: those of the first plan, or all, where plans may come to use them."""
    first = Replication.parse(config.train.layout).slots + Replication.parse(config.rollout.layout).slots
    return range(config.cluster.slots if config.adapt.mode != "off" else first)


def slots_ever(config: JobConfig) -> range:
    """Return all slots that the job can ever have: each has a key of its own."""
    return range(config.cluster.slots + config.cluster.joinable)


def ordinals_after(plan: Plan, before: Mapping[ModelStage, int]) -> dict[ModelStage, int]:
    """Return the first ordinal of each model-stage that neither ``plan`` nor what came ``before`` has used."""
    found = dict(before)
    for emu in plan.emus:
        found[emu.model_stage] = max(found.get(emu.model_stage, 0), emu.ordinal + 1)
    return found


def next_plan(
    current: Plan,
    train: Replication,
    rollout: Replication,
    slots: Sequence[SlotId],
    next_ordinals: Mapping[ModelStage, int] | None = None,
) -> Plan:
    """Return the plan that follows ``current`` with these layouts on ``slots``; ``ValueError`` if they are too few.

    Trainers keep their slots as far as they can, the lead slot first, and then take idle ones before those that
    generate; a unit that keeps its layout and slots keeps its ordinal. ``next_ordinals`` tells those that units of
    earlier plans have had.
    """
    ordinals = ordinals_after(current, next_ordinals or {})
    if train.slots + rollout.slots > len(slots):
        raise ValueError(
            f"layouts {train} and {rollout} need {train.slots + rollout.slots} slots, there are {len(slots)}"
        )
    training, generating = (
        [slot for emu in current.of(stage) for slot in emu.slots if slot in slots]
        for stage in (POLICY_TRAINING, POLICY_GENERATION)
    )
    idle = [slot for slot in slots if slot not in training and slot not in generating]
    mine = [*training, *idle, *reversed(generating)][: train.slots]
    others = [slot for slot in (*generating, *training, *idle) if slot not in mine][: rollout.slots]
    return Plan(
        current.epoch + 1,
        (
            *_successors(current, POLICY_TRAINING, train, mine, ordinals),
            *_successors(current, POLICY_GENERATION, rollout, others, ordinals),
            *current.of(POLICY_WEIGHTS),
        ),
        current.recomputed,
    )


def _successors(
    current: Plan,
    model_stage: ModelStage,
    replication: Replication,
    slots: Sequence[SlotId],
    ordinals: Mapping[ModelStage, int],
) -> Iterator[Emu]:
    """Yield the units on ``slots``, cut in order; those that there are already as they are."""
    before = {(emu.layout, emu.slots): emu for emu in current.of(model_stage)}
    fresh = itertools.count(ordinals.get(model_stage, 0))
    size = replication.layout.slots
    for start in range(0, replication.slots, size):
        place = (replication.layout, tuple(slots[start : start + size]))
        yield before.get(place) or Emu(model_stage, next(fresh), *place)


def _units(model_stage: ModelStage, replication: Replication, first: SlotId) -> Iterator[Emu]:
    size = replication.layout.slots
    for ordinal in range(replication.dp):
        start = first + ordinal * size
        yield Emu(model_stage, ordinal, replication.layout, tuple(range(start, start + size)))
