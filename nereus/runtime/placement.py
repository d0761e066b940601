"""Which unit starts on which slot?

Epoch 0 of a run, decided from the layouts alone: trainers take the first slots, rollouts the next, and the weight-sync
relay, which uses no accelerator, a virtual slot. Slots of one unit are adjacent, so they share a host where hosts hold
several slots.
"""

from __future__ import annotations

from collections.abc import Iterator

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

FIRST_VIRTUAL_SLOT: SlotId = 4000
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
    )


def _units(model_stage: ModelStage, replication: Replication, first: SlotId) -> Iterator[Emu]:
    size = replication.layout.slots
    for ordinal in range(replication.dp):
        start = first + ordinal * size
        yield Emu(model_stage, ordinal, replication.layout, tuple(range(start, start + size)))
