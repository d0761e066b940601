"""Who decides about plans in a simulated run, and how is another way of deciding put in its place?

A *decider* in the supervisor is a ``Planning`` (``runtime/schedule.py``): it is told of steps, slots, failures and
answers of searches, and says through ``wish`` which plan comes next. Everything else of a run is the same code whoever
decides: compiler, executor, admission of groups, losses, journal. So a baseline is one object:

1. subclass ``Follower`` and overwrite what the baseline does (usually ``stepped``, ``watch`` and ``wish``; in ``wish``
   return a ``Wish`` or None, with ``placement.next_plan`` for the numbers of units);
2. make a ``Policy``, from ``AsStated``: its name, the source of its rules, ``planning``, and where they differ ``job``,
   ``first_plan`` (what it starts with) and ``serving`` (what generation units do);
3. enter it in ``policies/named.py``.

``Circumstances.estimate`` is what is believed of speeds before the first step; ``Estimate.observed`` learns from steps,
``question`` asks the planner, ``searching.solve`` answers. ``Known`` tells what the world is really like and what will
come: for oracles, and for baselines whose first plan is swept, as their users would by trying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol

from msgspec import Struct
from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.control.admission import Admission, admit
from nereus.control.choose import Pin, Question, start_plan
from nereus.control.estimate import Estimate, StepFacts
from nereus.control.monitor import Monitoring
from nereus.control.problem import Infeasible
from nereus.core.cluster import Cluster
from nereus.core.plan import Plan, SlotId
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError
from nereus.runtime.adaptation import Adaptation
from nereus.runtime.journal import Journal
from nereus.runtime.placement import initial_plan
from nereus.runtime.schedule import Asking, GivenPlans, Planning, Schedule, Wish
from nereus.runtime.searching import Answered, Searcher
from nereus.runtime.surroundings import RunFailed
from nereus.sim.engine import Drawn
from nereus.sim.serving import Serving, as_configured
from nereus.sim.stages import Sampled, Stages
from nereus.sim.trace import Trace
from nereus.sim.truth import Truth


class Known(Struct, frozen=True):
    """What nobody can know who runs a job for the first time."""

    shape: ModelShape
    cluster: Cluster
    truth: Truth
    trace: Trace
    draw: Callable[[int], Drawn]
    """What will come of a group, by its number; only the length of its prompt is another one."""


class Circumstances(Struct, frozen=True):
    """What a policy may know when an attempt of a run begins."""

    config: JobConfig
    plan: Plan
    """What the attempt begins with."""
    step: int
    """Steps that are done."""
    cluster: Cluster
    """The most slots that the job ever has, whether they are there now or not."""
    estimate: Estimate
    searcher: Searcher
    journal: Journal
    report: Callable[[Answered], None]
    """Tell the answer to a search here; it comes back as ``Planning.answered`` in its turn."""
    known: Known
    halt: Callable[[float], None]
    """Stop all devices for so many seconds, as a restart of the job does: what is in flight begins anew after it, and
    state that a change moves meanwhile is in place."""
    asking: Asking | None = None
    """What is asked for when nothing was decided; None: what the job file says."""


class Opening(Struct, frozen=True):
    """What a policy of a synchronous run may know before the first step."""

    question: Question
    """The planner's, on the slots that are there."""
    stages: Stages
    """The world's truth: for baselines whose rule is a sweep, and for oracles."""
    sampled: Sampled
    """What the first step will be like, in truth."""
    trace: Trace
    """All that will come: for oracles."""
    seed: int = 0
    step: int = 0

    def step_s(self, plan: Plan, below: float = math.inf) -> float:
        """Return the seconds of the first step under ``plan``, in truth; infinite where it does not fit.

        What takes ``below`` or longer, such as that of a faster plan, is not followed to its end and may be infinite.
        """
        return self.stages.step_s(plan, self.sampled, self.step, below)

    def with_pins(self, pins: tuple[Pin, ...]) -> tuple[float, Plan] | None:
        """Return the planner's prediction and its plan with these degrees; None where nothing fits."""
        found = start_plan(replace(self.question, pins=pins))
        if isinstance(found, Infeasible):
            return None
        return found.solution.latency_s, replace(found.placement.plan, epoch=0)

    def fastest(self) -> Plan:
        """Return what the planner would begin with; ``ConfigError`` where nothing fits."""
        found = start_plan(self.question)
        if isinstance(found, Infeasible):
            remedy = "take more slots, a smaller model or shorter responses"
            raise ConfigError(f"no plan fits: {found.because}", where="cluster", remedy=remedy)
        return replace(found.placement.plan, epoch=0)


class SynchronousPolicy(Protocol):
    """One way of deciding about plans of a synchronous workflow."""

    @property
    def name(self) -> str:
        """One word for tables."""

    @property
    def source(self) -> str:
        """Where its rules are published."""

    @property
    def sharded(self) -> bool:
        """Whether its trainers' replicas share their state (ZeRO, stage 3)."""

    def opening(self, start: Opening) -> Plan:
        """Return what the run starts with, and starts anew with after its state is lost."""

    def planning(self, now: Circumstances) -> Planning:
        """Return the decider of one attempt."""


def adaptation(now: Circumstances, *, monitor: Monitoring | None = None, admission: Admission = admit) -> Adaptation:
    """Return the live runtime's controller; ``monitor`` and ``admission`` replace its rules."""
    return Adaptation(
        now.config,
        now.plan,
        step=now.step,
        estimate=now.estimate,
        cluster=now.cluster,
        searcher=now.searcher,
        journal=now.journal,
        report=now.report,
        asking=now.asking,
        monitor=monitor,
        admission=admission,
    )


class Policy(Protocol):
    """One way of deciding about plans."""

    @property
    def name(self) -> str:
        """One word for tables."""

    @property
    def source(self) -> str:
        """Where its rules are published."""

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        """Return the job as a user of this system would state it for ``slots`` slots: layouts, staleness, waits."""

    def serving(self, config: JobConfig) -> Serving:
        """Return what generation units do with what they are granted, for one attempt."""

    def first_plan(self, config: JobConfig, slots: int, known: Known) -> Plan:
        """Return what the run starts with when ``slots`` slots, numbers 0 onwards, are there at the start."""

    def planning(self, now: Circumstances) -> Planning:
        """Return the decider of one attempt."""


class AsStated(Struct, frozen=True):
    """What most policies have in common: the job, its layouts and changes, and its ways of serving are as the job file
    says; a synchronous run begins with what the planner finds with its priors."""

    sharded: ClassVar[bool] = False

    def job(self, config: JobConfig, slots: int, known: Known) -> JobConfig:
        return config

    def serving(self, config: JobConfig) -> Serving:
        return as_configured(config)

    def first_plan(self, config: JobConfig, slots: int, known: Known) -> Plan:
        return initial_plan(config)

    def opening(self, start: Opening) -> Plan:
        return start.fastest()

    def planning(self, now: Circumstances) -> Planning:
        return GivenPlans(Schedule(now.config, now.plan, now.step))


class Nereus(AsStated, frozen=True):
    """The controller of the live runtime."""

    name: str = "nereus"
    source: str = "this project"

    def planning(self, now: Circumstances) -> Planning:
        return adaptation(now)


class Given(AsStated, frozen=True):
    """The layouts of the job file and what ``adapt.at`` says: nothing is learned."""

    name: str = "given"
    source: str = "the job file"


class Follower:
    """A ``Planning`` that stays with its plan and learns nothing: what baselines are made from.

    After a loss the units that are left go on (``recovered``); what was there before is due again only if ``wish`` says
    so.
    """

    def __init__(self, now: Circumstances) -> None:
        self.now = now
        self.plan = now.plan
        self.restart = ""
        self.stuck = ""

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        return None

    def began(self, plan: Plan) -> None:
        """Note that a change to ``plan`` is tried."""

    def ended(self, plan: Plan, failure: str, seconds: float) -> None:
        self.plan = plan

    def recovered(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, step: int, facts: StepFacts, step_s: float) -> None:
        """Learn from a step."""

    def out_of_memory(self, facts: StepFacts, why: str) -> None:
        raise RunFailed(f"{why}; {type(self).__name__} has no other plan")

    def watch(self, alive: Collection[SlotId], now: float) -> None:
        """Take note of which slots are alive; comes with every tick."""

    def drain(self, gone: Collection[SlotId], slots: Collection[SlotId]) -> str:
        return "this policy gives no slots back"

    def answered(self, answered: Answered) -> None:
        """Take the answer to a search."""

    async def close(self) -> None:
        """Nothing is open."""
