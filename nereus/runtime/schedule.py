"""Which layouts does the job ask for, and is it time to change to them?

Owner: the supervisor of a job whose plans are given: ``train.layout`` and ``rollout.layout`` at first, then what
``adapt.at`` says. After a loss the run goes on with fewer units; as soon as there are slots enough again, what was
asked for is due. Invariants (tests/runtime/test_schedule.py): nothing is due that the slots at hand cannot hold; a
change that fails is tried again at the next boundary, but not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from nereus.config import JobConfig
from nereus.core.change import parse_changes
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Plan, Replication, SlotId
from nereus.runtime.placement import next_plan, ordinals_after

MAX_TRIES = 3
"""How often one change is tried."""


class Wish(Struct, frozen=True):
    """A plan to change to, and why."""

    plan: Plan
    why: str


class Schedule:
    """The layouts that are asked for by now."""

    def __init__(self, config: JobConfig, plan: Plan, step: int) -> None:
        """Begin with ``plan``, ``step`` steps being done: a resumed run goes back to the newest change before it."""
        asked = parse_changes(config.adapt.at)
        past = [change for change in asked if change.step <= step]
        self._asked = deque((*past[-1:], *asked[len(past) :]))
        self._train = Replication.parse(config.train.layout)
        self._rollout = Replication.parse(config.rollout.layout)
        self._why = "the job's own layouts"
        self._ordinals = ordinals_after(plan, {})
        self._tries = 0

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        """Return the plan to change to before the next step, ``step`` steps being done; None: stay."""
        while self._asked and self._asked[0].step <= step:
            change = self._asked.popleft()
            self._train, self._rollout, self._tries = change.train, change.rollout, 0
            self._why = f"adapt.at asks for it after step {change.step}"
        there = plan.replication(POLICY_TRAINING), plan.replication(POLICY_GENERATION)
        wanted = self._train, self._rollout
        enough = sum(replication.slots for replication in wanted) <= len(slots)
        if there == wanted or not enough or self._tries >= MAX_TRIES:
            return None
        return Wish(next_plan(plan, *wanted, slots, self._ordinals), self._why)

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""
        self._tries += 1
        self._ordinals = ordinals_after(plan, self._ordinals)

    def ended(self, plan: Plan) -> None:
        """Note that ``plan`` is in force."""
        self._tries = 0
