"""What could be reached by one who knows the trace and the world's truth? For synchronous workflows.

Dynamic programming over steps and plans with the price of changes between them. Candidates are the fastest plans of
steps all over the trace, found by the planner's own search with the world's seconds in the place of its predictions;
every step is priced under each with its own lengths, slots and drift, without noise, and the cheapest course is
followed in the world like any other policy's. Two figures come of it: what following it takes (``clairvoyant`` in
tables), and ``Course.bound_s``, in which changes cost nothing.

What it ignores: plans outside the candidates, and noise, which may be lucky. A trace must say by steps, not by time,
how many slots there are: what comes by time depends on the plan. Invariants (tests/sim/test_foresight.py): no single
candidate is cheaper than the course in its own terms; a change that costs more than it saves is not made; the bound
lies below what the course takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.choose import Question, place_choice, replications, start_plan
from nereus.control.move import move
from nereus.control.problem import Infeasible, Problem, Solution
from nereus.control.search import solve, solve_groupings
from nereus.core.plan import POLICY_GENERATION, ModelStage, Plan, Replication, SlotId
from nereus.errors import ConfigError, OutOfMemory
from nereus.runtime.placement import ordinals_after
from nereus.runtime.schedule import MAX_TRIES, Planning, Wish
from nereus.sim.job import estimate_of, pool_of, pricing_of
from nereus.sim.links import ENGINE_START_S
from nereus.sim.noise import Noise
from nereus.sim.optimum import in_truth, nominated, predictions
from nereus.sim.policies.clairvoyant import cheapest
from nereus.sim.policy import Circumstances, Follower, Opening
from nereus.sim.stages import Sampled, Stages, sample_of

LOOKS = 3
"""In so many steps candidates are looked for while the number of slots stays the same: the first, the last, between."""

EACH = 4
"""So many candidates of each."""


class Choice(Struct, frozen=True):
    """A plan of some step, and what it takes to place it anew."""

    problem: Problem
    solution: Solution
    plan: Plan
    """Where it stands if nothing stood before."""

    def placed(self, question: Question) -> Plan | None:
        """Return it on the slots of ``question``, where state lies already if possible; None: not possible."""
        placement = place_choice(question, self.problem, self.solution)
        return None if isinstance(placement, Infeasible) else placement.plan


class Course(Struct, frozen=True):
    """What is best, step by step."""

    choices: tuple[Choice, ...]
    seconds: float
    """Of all steps and changes, as expected."""
    bound_s: float


class _World:
    """What steps and changes take, in truth and without noise."""

    def __init__(self, start: Opening) -> None:
        self._start = start
        self._job, self._trace = start.stages.job, start.trace
        self._stages = Stages(self._job, Noise(0, scale=0.0), self._trace)
        self.steps = range(start.step, self._job.steps)
        self._estimate = estimate_of(self._job, self._trace)
        for step in self.looks():
            self._learn(step)

    def slots(self, step: int) -> int:
        return min(self._job.cluster.size, self._trace.slots_at(step, 0.0) or self._job.cluster.size)

    def question(self, step: int) -> Question:
        """Return the planner's question in ``step``, with the lengths of that step known."""
        pool = pool_of(self._job.cluster, range(self.slots(step)))
        lengths = self._job.lengths(self._trace, step).lengths(self._job.longest_response)
        question = self._estimate.question(pool, Plan(-1, ()), {})
        return replace(question, pricing=replace(question.pricing, workload=pricing_of(self._job, lengths).workload))

    def looks(self) -> list[int]:
        """Return the steps in which candidates are looked for."""
        looks = list[int]()
        for _, run in itertools.groupby(self.steps, self.slots):
            steps = list(run)
            looks += {steps[(len(steps) - 1) * look // (LOOKS - 1)] for look in range(LOOKS)}
        return sorted(looks)

    def _learn(self, step: int) -> None:
        """Let the planner learn, of memory above all, from ``step`` under its own plan, as a run does."""
        found = start_plan(self.question(step))
        if isinstance(found, Infeasible):
            return
        plan, sampled = found.placement.plan, self._sampled(step)
        try:
            took = {stage: self._stages.took(plan, stage, sampled, step) for stage in self._job.workflow.model_stages}
        except OutOfMemory:
            return
        self._estimate = self._estimate.observed(plan, sampled.facts(took))

    def _sampled(self, step: int) -> Sampled:
        return sample_of(self._job, self._trace, self._start.seed, step)

    def candidates(self, step: int) -> list[Choice]:
        """Return the fastest plans of ``step``."""
        question = self.question(step)
        truth = in_truth(question, predictions(question), self._stages, self._sampled(step), step)
        problem, best = solve_groupings(truth)
        if isinstance(best, Infeasible):
            return []
        answer = solve(problem, runners_up=EACH - 1)
        return [Choice(problem, solution, plan) for solution, plan in nominated(question, problem, answer)]

    def step_s(self, choice: Choice, step: int) -> float:
        if len(choice.plan.slots()) > self.slots(step):
            return math.inf
        return self._stages.step_s(choice.plan, self._sampled(step), step)

    def change_s(self, before: Plan, after: Choice, step: int) -> float:
        """Return the price of a change before ``step``; infinite where there is no way."""
        question = _leaving(self.question(step), before)
        target = after.placed(question)
        if target is None:
            return math.inf
        way = move(replace(question.pricing, cluster=self._job.cluster), before, target)
        engines = before.replication(POLICY_GENERATION) != target.replication(POLICY_GENERATION)
        return math.inf if way.stuck else way.seconds + ENGINE_START_S * engines


def course(start: Opening) -> Course:
    """Return the cheapest course from the step of ``start`` to the end; ``ConfigError`` where no plan fits."""
    if start.trace.supply:
        remedy = "name a trace that says by steps how many slots there are"
        raise ConfigError("slots come and go by time, not by steps", where="policies", remedy=remedy)
    world = _World(start)
    found = {choice.plan: choice for step in world.looks() for choice in world.candidates(step)}
    choices = list(found.values())
    prices = dict[tuple[int, int, int], float]()

    def price(step: int, before: int, after: int) -> float:
        """Changes are priced once for each number of slots: what lengths do to them is small."""
        key = before, after, world.slots(step)
        if key not in prices:
            prices[key] = world.change_s(choices[before].plan, choices[after], step)
        return prices[key]

    costs = [[world.step_s(choice, step) for choice in choices] for step in world.steps]
    for step, row in zip(world.steps, costs, strict=True):
        if min(row, default=math.inf) == math.inf:
            remedy = "take more slots or shorter responses"
            raise ConfigError(f"no plan fits in step {step}", where="cluster", remedy=remedy)
    seconds, path = cheapest(costs, lambda place, before, after: price(world.steps[place], before, after))
    return Course(tuple(choices[index] for index in path), seconds, sum(map(min, costs)))


def _leaving(question: Question, plan: Plan) -> Question:
    """Return the question with the slots of ``plan`` that are not in its pool as such that will be taken away."""
    pool = {slot for node in question.pricing.cluster.nodes for slot in node.slots}
    return replace(question, current=plan, leaving=tuple(sorted(plan.slots() - pool)))


class Foresight:
    """Follows the cheapest course."""

    name = "clairvoyant"
    source = "dynamic programming over the trace with the world's truth"
    sharded = False

    def __init__(self) -> None:
        self._course: Course | None = None
        self._first = 0

    def opening(self, start: Opening) -> Plan:
        """Look ahead once, from the step that comes next.

        A run that has lost its state goes on in the same course, and so do further runs of the same job and trace: with
        other seeds, samples are other ones, from the same lengths.
        """
        if self._course is None:
            self._course, self._first = course(start), start.step
        return self._course.choices[start.step - self._first].plan

    def planning(self, now: Circumstances) -> Planning:
        assert self._course is not None, "a run has an opening"
        return _Following(now, self._course, self._first)


class _Following(Follower):
    """Wishes for the choice of every step."""

    def __init__(self, now: Circumstances, course: Course, first: int) -> None:
        super().__init__(now)
        self._course = course
        self._first = first
        self._ordinals = ordinals_after(now.plan, {})
        self._tried = (0, 0)
        """A step, and how often a change was tried before it."""

    def wish(self, step: int, plan: Plan, slots: Sequence[SlotId]) -> Wish | None:
        choice = self._course.choices[min(step - self._first, len(self._course.choices) - 1)]
        tried = self._tried[1] if self._tried[0] == step else 0
        if (_shape(plan) == _shape(choice.plan) and plan.slots() <= set(slots)) or tried >= MAX_TRIES:
            return None
        estimate = self.now.estimate
        pool = pool_of(self.now.cluster, slots)
        question = _leaving(estimate.question(pool, plan, self._ordinals), plan)
        target = choice.placed(question)
        self._tried = step, tried + 1
        return None if target is None else Wish(target, "foreseen")

    def began(self, plan: Plan) -> None:
        self._ordinals = ordinals_after(plan, self._ordinals)

    def drain(self, gone: Collection[SlotId], slots: Collection[SlotId]) -> str:
        return ""


def _shape(plan: Plan) -> tuple[dict[ModelStage, Replication], tuple[ModelStage, ...]]:
    return replications(plan), plan.recomputed
