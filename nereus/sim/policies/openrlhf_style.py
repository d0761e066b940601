"""What if every pair of models had slots of its own, with shared optimizer state in the place of model parallelism?

The way of OpenRLHF (arXiv 2405.11143; github.com/OpenRLHF/OpenRLHF): the actor with the reference model, the critic
with the reward model, and the engines each have their slots; trainers have one slot to a replica and share weights,
gradients and moments (ZeRO, stage 3). How many slots each gets and the tensor degree of the engines are tried in the
world itself on the first step, by nodes, which favours the baseline. Invariants (tests/sim/test_placements.py): engines
share no slot with trainers; trainers' layout is t1p1; the plan never changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

from nereus.core.plan import POLICY_GENERATION, Layout, ModelStage, Plan, SlotId, Stage
from nereus.runtime.schedule import Planning
from nereus.sim.policies.verl_style import fastest_of, units_over
from nereus.sim.policy import AsStated, Circumstances, Follower, Opening

SHARES = 8
"""Into so many parts at most the pool is divided: finer splits are not tried."""


class OpenRLHFStyle(AsStated, frozen=True):
    """Actor with reference, critic with reward, engines apart; fixed."""

    name: str = "openrlhf_style"
    source: str = "OpenRLHF, arXiv 2405.11143; github.com/OpenRLHF/OpenRLHF"
    sharded: ClassVar[bool] = True

    def opening(self, start: Opening) -> Plan:
        return fastest_of(start, self.name, _apart(start))

    def planning(self, now: Circumstances) -> Planning:
        return Follower(now)


def _apart(start: Opening) -> Iterator[Plan]:
    pricing = start.question.pricing
    slots = [slot.id for slot in pricing.cluster.slots()]
    stages = pricing.workflow.model_stages
    pairs = _pairs(stages)
    part = max(1, len(slots) // SHARES)
    counts = [count * part for count in range(1, len(slots) // part)]
    training = tuple(stage for stage in stages if stage.stage is Stage.TRAINING)
    for shares in itertools.product(counts, repeat=len(pairs)):
        engines = len(slots) - sum(shares)
        if engines < 1:
            continue
        for tp in (1, 2, 4, 8):
            if tp > pricing.cluster.slots_per_node or engines % tp:
                continue
            units = [*units_over(POLICY_GENERATION, Layout(tp), slots[:engines])]
            rest: list[SlotId] = slots[engines:]
            for pair, share in zip(pairs, shares, strict=True):
                units += [unit for stage in pair for unit in units_over(stage, Layout(), rest[:share])]
                rest = rest[share:]
            for again in ((), training):
                yield Plan(0, tuple(sorted(units)), again)


def _pairs(stages: tuple[ModelStage, ...]) -> list[list[ModelStage]]:
    """Return the model-stages that share slots: the actor and its reference, all that has to do with values."""
    actor = [
        stage for stage in stages if stage.stage is not Stage.GENERATION and stage.model in ("policy", "reference")
    ]
    others = [stage for stage in stages if stage.model not in ("policy", "reference")]
    return [actor, others] if others else [actor]
