"""What if a run went to the planner's target every few steps, whatever the way costs?

The baseline "every k steps" of arXiv 2609.34645, section 7 (k = 3): same planner, same execution, same learning from
steps, but no drift trigger and no payback rule. Slots that come or go are answered at once, which favours it. Works for
asynchronous and synchronous runs. Invariants (tests/sim/test_sync_baselines.py): there is one search every k steps; a
feasible target is always taken.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.admission import Offer, Verdict, admit
from nereus.control.monitor import Signals, Trigger
from nereus.runtime.schedule import Planning
from nereus.sim.policy import AsStated, Circumstances, adaptation


class Clock(Struct, frozen=True):
    """Asks to think again every so many steps; what steps are like does not matter."""

    every: int
    seen: int = 0

    def observe(self, signals: Signals) -> tuple[Clock, tuple[Trigger, ...]]:
        seen = self.seen + 1
        due = (Trigger("clock", f"{self.every} steps are over"),) if not seen % self.every else ()
        return Clock(self.every, seen), due

    def rebased(self, *, bearing: bool = False) -> Clock:
        return self


def go(offer: Offer, *, gamma: float) -> Verdict:
    """Take whatever is feasible."""
    verdict = admit(replace(offer, urgent=True), gamma=gamma)
    return replace(verdict, path="opportunistic") if verdict.admitted and not offer.urgent else verdict


class EveryK(AsStated, frozen=True):
    """Switches to the planner's target every ``every`` steps."""

    every: int = 3
    name: str = "every_k"
    source: str = "arXiv 2609.34645, section 7: switching every 3 steps"

    def planning(self, now: Circumstances) -> Planning:
        return adaptation(now, monitor=Clock(self.every), admission=go)
