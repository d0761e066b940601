"""What if layouts never changed, and only the number of replicas followed the slots?

The baseline "static TP/PP with DP scaling" of arXiv 2609.34645, section 7.3.3. A synchronous run tries the ways to lay
out training and generation for the first budget in the world itself and keeps the fastest; an asynchronous one keeps
the layouts of the job file. From then on the planner places replicas of these layouts whenever slots come or go, with
speeds learned from steps, which favours the baseline: real systems scale by a rule of thumb. Invariants
(tests/sim/test_sync_baselines.py): no model-stage ever changes its layout; nothing but the pool starts a search.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import fits_by_layout
from nereus.control.choose import Pin
from nereus.control.monitor import Signals, Trigger
from nereus.core.plan import POLICY_GENERATION, POLICY_WEIGHTS, Layout, ModelStage, Plan, Stage
from nereus.runtime.schedule import Planning
from nereus.sim.policies.dynarl import any_gain
from nereus.sim.policy import AsStated, Circumstances, Opening, adaptation

NEVER = 1 << 30
"""Steps."""

WITHIN = 1.3
"""Ways that the planner takes to be so much slower than the best are not tried."""


class Blind(Struct, frozen=True):
    """Sees no drift."""

    def observe(self, signals: Signals) -> tuple[Blind, tuple[Trigger, ...]]:
        return self, ()

    def rebased(self, *, bearing: bool = False) -> Blind:
        return self


class FixedDP(AsStated, frozen=True):
    """Fixed layouts; replicas follow the slots."""

    name: str = "fixed_dp"
    source: str = "arXiv 2609.34645, section 7.3.3: static TP/PP with DP scaling"

    def opening(self, start: Opening) -> Plan:
        """The fastest, in truth, of all layouts of training and generation."""
        training = tuple(
            stage for stage in start.question.pricing.workflow.model_stages if stage.stage is Stage.TRAINING
        )
        found = list[tuple[float, Plan]]()
        for generation in _layouts(start, POLICY_GENERATION):
            for layout in _layouts(start, training[-1]):
                pins = [_pin(POLICY_GENERATION, generation), *(_pin(stage, layout) for stage in training)]
                if (answer := start.with_pins(tuple(pins))) is not None:
                    found.append(answer)
        fastest = start.fastest()
        limit = min((seconds for seconds, _ in found), default=math.inf) * WITHIN
        tried = [fastest, *(plan for seconds, plan in found if seconds <= limit)]
        return min(tried, key=start.step_s)

    def planning(self, now: Circumstances) -> Planning:
        stages = [stage for stage in now.plan.model_stages() if stage != POLICY_WEIGHTS]
        pins = tuple(_pin(stage, now.plan.of(stage)[0].layout) for stage in stages)
        config = replace(now.config, adapt=replace(now.config.adapt, calibrate_steps=NEVER))
        pinned = replace(now, config=config, estimate=replace(now.estimate, pins=pins))
        return adaptation(pinned, monitor=Blind(), admission=any_gain)


def _pin(stage: ModelStage, layout: Layout) -> Pin:
    return Pin(stage, tp=layout.tp, pp=layout.pp)


def _layouts(start: Opening, stage: ModelStage) -> tuple[Layout, ...]:
    """Return the layouts of ``stage`` that fit at least alone."""
    return tuple(sorted(layout for layout, fits in fits_by_layout(start.question.pricing, stage).items() if fits))
