"""When does a generation unit begin what it was granted, and when does it take new weights?

The messages of the runtime say what is granted and which version is out; what units make of that differs between
systems. Owner: the policy of a simulated run gives one ``Serving``, and the units of an attempt (``slots.py``) ask it.
``Serving`` and ``Finishing`` are what our runtime does under ``rollout.interrupt``; others model what no message of
ours can say (``policies/one_step_off.py``, ``policies/laminar.py``).

Invariants (tests/sim/test_async_baselines.py): under ``Finishing`` no sequence goes on under other weights; whatever a
serving holds back is begun in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from nereus.config import JobConfig
from nereus.core.plan import SlotId
from nereus.sim.engine import Drawn, Engine


class Unit(Protocol):
    """A generation unit, as far as others may look into it."""

    engine: Engine

    @property
    def slot(self) -> SlotId:
        """The slot that speaks for the unit."""

    @property
    def offered(self) -> bool:
        """Whether there are weights that it has not taken yet."""

    @property
    def waiting(self) -> Sequence[Drawn]:
        """Groups that it was granted and has not begun."""

    @property
    def groups(self) -> Collection[int]:
        """Groups that it was granted and has not handed over."""

    @property
    def begun(self) -> int:
        """How many of them it has begun."""

    def proceed(self) -> None:
        """Begin what may be begun, and take new weights if it may."""

    def again(self, group: Drawn) -> None:
        """Begin one of its groups anew, because another unit has lost it."""

    def finished(self, groups: Sequence[Drawn]) -> None:
        """Take note of groups that its engine has completed."""

    def score(self, group: Drawn) -> None:
        """Have one of its groups, which is complete, scored."""

    def reschedule(self) -> None:
        """Look anew at when the next of its sequences ends."""


class Serving:
    """Everything begins as it is granted; new weights are taken at once, what is in flight goes on under them."""

    def may_pull(self, unit: Unit) -> bool:
        """Say whether ``unit`` may take the weights that it is offered now."""
        return True

    def to_begin(self, unit: Unit) -> Sequence[Drawn]:
        """Return those of its groups that wait which ``unit`` may begin now."""
        return unit.waiting

    def joined(self, unit: Unit) -> None:
        """Note that ``unit`` is built."""

    def offered(self, unit: Unit) -> None:
        """Note that ``unit`` was told of new weights."""

    def changed(self, unit: Unit) -> None:
        """Note that ``unit`` has finished something or has less to do."""

    def left(self, unit: Unit) -> None:
        """Note that ``unit`` has lost all that it was doing, and may not come again."""

    def home(self, unit: Unit, group: Drawn) -> Unit:
        """Return whose group it is that ``unit`` has completed."""
        return unit

    def host(self, unit: Unit, group: int) -> Unit:
        """Return where a group of ``unit`` is generated."""
        return unit


class Finishing(Serving):
    """New weights are taken when nothing is in flight, and nothing begins before that."""

    def may_pull(self, unit: Unit) -> bool:
        return unit.engine.idle

    def to_begin(self, unit: Unit) -> Sequence[Drawn]:
        return () if unit.offered else unit.waiting

    def changed(self, unit: Unit) -> None:
        if unit.offered:
            unit.proceed()


def as_configured(config: JobConfig) -> Serving:
    """Return what our units do under ``rollout.interrupt``; to start again from a prefix is taken for free."""
    return Finishing() if config.rollout.interrupt == "wait" else Serving()
