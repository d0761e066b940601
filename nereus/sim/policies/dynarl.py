"""What if every plan that promises any gain at all were taken?

DynaRL (OSDI 2026) watches all the time and admits a reallocation as soon as its predicted throughput is strictly
better; what the change costs and how long its cause will last do not enter. Here that rule decides about the same
planner's targets, looked at after every step, and the way is ours: an ordered graph, which favours it (its own
per-component migration has no order, ``per_component.py``). Works for asynchronous and synchronous runs. Invariants
(tests/sim/test_sync_baselines.py): any strict gain is admitted; no gain is not.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from nereus.control.admission import Offer, Verdict, admit
from nereus.runtime.schedule import Planning
from nereus.sim.policies.every_k import Clock
from nereus.sim.policy import AsStated, Circumstances, adaptation


def any_gain(offer: Offer, *, gamma: float) -> Verdict:
    """Take what is strictly faster, as if it would last for ever."""
    return admit(replace(offer, horizon_steps=math.inf), gamma=1.0)


class DynaRL(AsStated, frozen=True):
    """Admits any strict predicted gain, after every step."""

    name: str = "dynarl"
    source: str = "DynaRL, OSDI 2026; RLinf's dynamic scheduler"

    def planning(self, now: Circumstances) -> Planning:
        return adaptation(now, monitor=Clock(1), admission=any_gain)
