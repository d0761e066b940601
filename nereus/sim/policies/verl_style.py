"""What if all model-stages lay over all slots and nothing ever changed?

The way of verl (HybridFlow, arXiv 2409.19256; github.com/volcengine/verl): actor, critic, reference and reward model
share one pool and take turns, engines sleep while trainers work. Users try layouts once; here they are tried in the
world itself on the first step, which favours the baseline: tensor degree of generation, tensor and pipeline degrees of
training, the same for actor and critic, tensor degree of scoring, with recomputation or without. Invariants
(tests/sim/test_placements.py): every model-stage uses all slots that are there at the start; the plan never changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from nereus.control.breakdown import fits_by_layout
from nereus.core.plan import POLICY_GENERATION, Emu, Layout, ModelStage, Plan, SlotId, Stage
from nereus.errors import ConfigError
from nereus.runtime.schedule import Planning
from nereus.sim.policy import AsStated, Circumstances, Follower, Opening


class VerlStyle(AsStated, frozen=True):
    """Everything colocated, fixed."""

    name: str = "verl_style"
    source: str = "HybridFlow, arXiv 2409.19256; github.com/volcengine/verl"

    def opening(self, start: Opening) -> Plan:
        return fastest_of(start, self.name, _colocated(start))

    def planning(self, now: Circumstances) -> Planning:
        return Follower(now)


def fastest_of(start: Opening, name: str, plans: Iterator[Plan]) -> Plan:
    """Return the plan with the shortest first step, in truth; ``ConfigError`` where none fits."""
    best, shortest_s = None, math.inf
    for plan in plans:
        if (step_s := start.step_s(plan, shortest_s)) < shortest_s:
            best, shortest_s = plan, step_s
    if best is None:
        remedy = "take more slots or a smaller model"
        raise ConfigError(f"no placement of {name} fits", where="cluster", remedy=remedy)
    return best


def units_over(stage: ModelStage, layout: Layout, slots: Sequence[SlotId]) -> tuple[Emu, ...]:
    """Return as many units of ``stage`` as ``slots`` hold, neighbours together."""
    size = layout.slots
    firsts = range(0, len(slots) - size + 1, size)
    return tuple(Emu(stage, place, layout, tuple(slots[first : first + size])) for place, first in enumerate(firsts))


def _colocated(start: Opening) -> Iterator[Plan]:
    pricing = start.question.pricing
    slots = [slot.id for slot in pricing.cluster.slots()]
    stages = pricing.workflow.model_stages
    scoring = [stage for stage in stages if stage.stage is Stage.INFERENCE]
    training = [stage for stage in stages if stage.stage is Stage.TRAINING]
    ways = itertools.product(
        _layouts(start, POLICY_GENERATION, len(slots)),
        _layouts(start, training[-1], len(slots)),
        [layout for layout in _layouts(start, scoring[-1], len(slots)) if layout.pp == 1] if scoring else [Layout()],
        (False, True),
    )
    for generation, trained, scored, again in ways:
        units = [
            *units_over(POLICY_GENERATION, generation, slots),
            *(unit for stage in scoring for unit in units_over(stage, scored, slots)),
            *(unit for stage in training for unit in units_over(stage, trained, slots)),
        ]
        yield Plan(0, tuple(sorted(units)), tuple(training) if again else ())


def _layouts(start: Opening, stage: ModelStage, slots: int) -> list[Layout]:
    """Return the layouts that fit at least alone and divide the slots."""
    fitting = fits_by_layout(start.question.pricing, stage)
    return sorted(layout for layout, fits in fitting.items() if fits and not slots % layout.slots)
