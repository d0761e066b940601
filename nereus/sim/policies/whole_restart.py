"""What if every loss of a slot that is in use ended the job, and it began anew from its newest checkpoint?

What launchers do that know of no other way: ``torchrun`` restarts all workers when one has failed
(https://pytorch.org/docs/stable/elastic/run.html). The plan is that of the job file. In its favour: a slot that has
died comes again like any other, a loss is noticed with the next tick of the supervisor, and checkpoints cost nothing.

Invariants (tests/sim/test_restart.py): after a loss the run goes on from a checkpoint; without one it goes as given.
"""

from __future__ import annotations

from collections.abc import Collection

from nereus.core.plan import Plan, SlotId
from nereus.core.units import listed
from nereus.runtime.placement import FIRST_VIRTUAL_SLOT
from nereus.runtime.regroup import StateLost
from nereus.runtime.schedule import Planning
from nereus.sim.policy import AsStated, Circumstances, Follower


class _Restarting(Follower):
    """Stays with its plan, and gives the job up with the first slot of it that is lost."""

    def watch(self, alive: Collection[SlotId], now: float) -> None:
        used = (slot for slot in self.plan.slots() if slot < FIRST_VIRTUAL_SLOT)
        if lost := sorted(frozenset(used) - frozenset(alive)):
            raise StateLost(f"slots {listed(lost)} are lost")

    def recovered(self, plan: Plan) -> None:
        raise StateLost("a trainer is lost")


class WholeRestart(AsStated, frozen=True):
    """The plan of the job file; whatever is lost, everything is started anew."""

    name: str = "whole_restart"
    source: str = "torchrun (PyTorch Elastic)"

    def planning(self, now: Circumstances) -> Planning:
        return _Restarting(now)
