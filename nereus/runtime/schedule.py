"""Which layouts does the job ask for, and is it time to change to them?

Owner: the supervisor of a job whose plans are given: ``train.layout`` and ``rollout.layout`` at first, then what
``adapt.at`` says. After a loss the run goes on with fewer units; as soon as there are slots enough again, what was
asked for is due. Invariants (tests/runtime/test_schedule.py): nothing is due that the slots at hand cannot hold; a
change that fails is tried again at the next boundary, but not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.control.estimate import StepFacts
from nereus.core.change import parse_changes
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, ModelStage, Plan, Replication, SlotId
from nereus.runtime.placement import next_plan, ordinals_after
from nereus.runtime.searching import Answered
from nereus.runtime.surroundings import RunFailed

MAX_TRIES = 3
"""How often one change is tried."""


class Wish(Struct, frozen=True):
    """A plan to change to, and why."""

    plan: Plan
    why: str


class Planning(Protocol):
    """Says which plan comes next; the supervisor tells it what happens and carries out what it wants."""

    restart: str
    """Why nothing but a checkpoint is left, if so."""
    stuck: str
    """Why no step can be made under the present plan, if so."""

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        """Return the plan to change to before the next step, ``step`` steps being done; None: stay."""

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        """Note that a change has led to ``plan``, or has failed and left ``plan`` in force."""

    def recovered(self, plan: Plan) -> None:
        """Note that ``plan``, of the units that were whole after a loss, is in force."""

    def stepped(self, step: int, facts: StepFacts, step_s: float) -> None:
        """Learn from a step; ``step`` steps are done."""

    def out_of_memory(self, facts: StepFacts, why: str) -> None:
        """Learn from a step that did not fit."""

    def watch(self, alive: Collection[SlotId], now: float) -> None:
        """Take note of which slots are alive, those that are drained and have not left yet included."""

    def drain(self, gone: Collection[SlotId], slots: Collection[SlotId]) -> str:
        """Do without the slots ``gone``, ``slots`` being left; return why that cannot be done, or nothing."""

    def answered(self, answered: Answered) -> None:
        """Take the answer to a search."""

    async def close(self) -> None: ...


class Asking(Protocol):
    """Holds what is asked for when nobody decides."""

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId], gone: Collection[SlotId] = ()) -> Wish | None:
        """Return the plan to change to before the next step; None: stay."""

    def ask(self, plan: Plan, why: str) -> None:
        """Ask for ``plan`` from now on."""

    @property
    def ordinals(self) -> dict[ModelStage, int]:
        """The first ordinal of each model-stage that no plan has used."""

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        """Note that a change has led to ``plan``, or has failed and left ``plan`` in force."""


class Standing:
    """The plan that was decided last, of any workflow: due again when a loss took units and their slots are back."""

    def __init__(self, plan: Plan) -> None:
        self._asked = plan
        self._why = "the first plan"
        self._ordinals = ordinals_after(plan, {})
        self._tries = 0

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId], gone: Collection[SlotId] = ()) -> Wish | None:
        missing = self._asked.slots() - frozenset(slots)
        if missing or self._tries >= MAX_TRIES or _places(plan) == _places(self._asked):
            return None
        return Wish(self._again(plan), f"slots are back: {self._why}")

    def ask(self, plan: Plan, why: str) -> None:
        self._asked, self._why, self._tries = plan, why, 0

    @property
    def ordinals(self) -> dict[ModelStage, int]:
        return dict(self._ordinals)

    def began(self, plan: Plan) -> None:
        self._tries += 1
        self._ordinals = ordinals_after(plan, self._ordinals)

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        if not failure:
            self._tries = 0

    def _again(self, plan: Plan) -> Plan:
        """Return what is asked for with the units that run, and fresh ones in the place of those that are lost."""
        there = {_place(emu): emu for emu in plan.emus}
        ordinals = dict(self._ordinals)
        units = list[Emu]()
        for emu in self._asked.emus:
            if (found := there.get(_place(emu))) is None:
                number = ordinals.get(emu.model_stage, 0)
                found = replace(emu, ordinal=number)
                ordinals[emu.model_stage] = number + 1
            units.append(found)
        return Plan(plan.epoch + 1, tuple(sorted(units)), self._asked.recomputed)


def _place(emu: Emu) -> Emu:
    return replace(emu, ordinal=0)


def _places(plan: Plan) -> frozenset[Emu]:
    return frozenset(map(_place, plan.emus))


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

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId], gone: Collection[SlotId] = ()) -> Wish | None:
        """Return the plan to change to before the next step, ``step`` steps being done; None: stay.

        Slots that are ``gone`` for good are left as soon as there are others in their place.
        """
        while self._asked and self._asked[0].step <= step:
            change = self._asked.popleft()
            self._train, self._rollout, self._tries = change.train, change.rollout, 0
            self._why = f"adapt.at asks for it after step {change.step}"
        there = plan.replication(POLICY_TRAINING), plan.replication(POLICY_GENERATION)
        wanted = self._train, self._rollout
        enough = sum(replication.slots for replication in wanted) <= len(slots)
        leaving = any(slot in gone for emu in plan.emus for slot in emu.slots)
        if (there == wanted and not leaving) or not enough or self._tries >= MAX_TRIES:
            return None
        return Wish(next_plan(plan, *wanted, slots, self._ordinals), self._why)

    def ask(self, plan: Plan, why: str) -> None:
        """Ask for the layouts of ``plan`` from now on."""
        train, rollout = plan.replication(POLICY_TRAINING), plan.replication(POLICY_GENERATION)
        assert train is not None and rollout is not None, "a plan of a run trains and generates"
        self._train, self._rollout, self._why, self._tries = train, rollout, why, 0

    def drain(self, slots: Collection[SlotId]) -> str:
        """Say why what is asked for does not fit on ``slots``, if it does not."""
        needed = self._train.slots + self._rollout.slots
        if len(slots) >= needed:
            return ""
        return f"{self._train} and {self._rollout} need {needed} slots and {len(slots)} would be left; set adapt.mode"

    @property
    def ordinals(self) -> dict[ModelStage, int]:
        """The first ordinal of each model-stage that no plan has used."""
        return dict(self._ordinals)

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""
        self._tries += 1
        self._ordinals = ordinals_after(plan, self._ordinals)

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        """Note that a change has led to ``plan``, or has failed and left ``plan`` in force."""
        if not failure:
            self._tries = 0


class GivenPlans:
    """Follows a schedule and learns nothing."""

    restart = stuck = ""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._drained: set[SlotId] = set()

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        return self._schedule.wish(step, plan, slots, self._drained)

    def began(self, plan: Plan) -> None:
        self._schedule.began(plan)

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        self._schedule.ended(plan, failure, seconds)

    def recovered(self, plan: Plan) -> None:
        """The schedule says what comes next."""

    def stepped(self, step: int, facts: StepFacts, step_s: float) -> None:
        """Nothing is learned."""

    def out_of_memory(self, facts: StepFacts, why: str) -> None:
        raise RunFailed(f"{why}; lower train.micro_batch_tokens, set train.recompute, or let adapt.mode find a plan")

    def watch(self, alive: Collection[SlotId], now: float) -> None:
        """Slots that are lost are waited for; one that was drained and has left may come again."""
        self._drained &= frozenset(alive)

    def drain(self, gone: Collection[SlotId], slots: Collection[SlotId]) -> str:
        refused = self._schedule.drain(slots)
        if not refused:
            self._drained.update(gone)
        return refused

    def answered(self, answered: Answered) -> None:
        raise AssertionError("nothing was asked")

    async def close(self) -> None:
        """Nothing is open."""
