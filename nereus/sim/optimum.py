"""How far is the plan that the planner chooses from the best that there is, in the world's truth?

A setting is a cluster and a distribution of lengths. The planner begins with its priors, learns from the steps of its
own first plan (with the world's noise), and chooses. Then one step without noise is executed under its choice and under
every nominee. Nominated are

- the planner's choice and its runners-up (every other layout forced on each model-stage in turn), and
- what the same search finds, runners-up included, when every way to run a model-stage has the seconds that the world
  takes for it (alone on its slots) in the place of the planner's prediction: the optimum over the planner's whole space
  as far as model-stages do not slow each other.

Of ways with equal slots, those that are predicted ``WORTH_A_LOOK`` times slower than the fastest are not measured.
What does not fit in truth is not valid. Memory is the planner's, with its margin: plans that it deems too large are not
nominated. Invariants (tests/sim/test_optimum.py): the choice is one of the executed plans; no executed plan is faster
than the best; equal settings give equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import ways
from nereus.control.choose import Question, choose, place_choice, stated
from nereus.control.estimate import Estimate
from nereus.control.problem import Candidate, Infeasible, Problem, Solution, evaluate
from nereus.control.search import solve, solve_groupings
from nereus.core.plan import Emu, Layout, ModelStage, Plan, SlotId
from nereus.errors import ConfigError, OutOfMemory
from nereus.sim.job import SynchronousJob, estimate_of
from nereus.sim.noise import Noise
from nereus.sim.stages import Sampled, Stages, sample_of
from nereus.sim.trace import Trace

MOST = 24
"""So many of each kind of nominees are executed, fastest first in their own terms."""

WORTH_A_LOOK = 1.5

Way = tuple[ModelStage, Layout, int, bool]
"""Layout, replicas, and whether activations are computed again."""


class Executed(Struct, frozen=True):
    """A plan and one step under it."""

    plan: Plan
    seconds: float
    stages: dict[ModelStage, tuple[float, float]]
    """Predicted after learning, and measured, seconds of each model-stage."""


class Comparison(Struct, frozen=True):
    """The planner's choice beside the best that was executed."""

    chosen: Executed
    best: Executed
    executed: int
    """Valid plans."""

    @property
    def gap(self) -> float:
        """Return by which part the choice is slower than the best."""
        return self.chosen.seconds / self.best.seconds - 1


def learned(job: SynchronousJob, trace: Trace, seed: int, steps: int) -> Question:
    """Return the planner's question after ``steps`` steps under its own first plan."""
    estimate: Estimate = estimate_of(job, trace)
    empty = Plan(-1, ())
    plan = _placed(estimate.question(job.cluster, empty, {}))
    stages = Stages(job, Noise(seed), trace)
    for step in range(steps):
        sampled = sample_of(job, trace, seed, step)
        took = {stage: stages.took(plan, stage, sampled, step) for stage in job.workflow.model_stages}
        estimate = estimate.observed(plan, sampled.facts(took))
    return estimate.question(job.cluster, empty, {})


def compared(job: SynchronousJob, trace: Trace, *, seed: int = 0, most: int = MOST) -> Comparison:
    """Return how the planner's choice stands among the nominees; ``ConfigError`` where it does not fit."""
    question = learned(job, trace, seed, job.calibrate_steps)
    stages, step = Stages(job, Noise(0, scale=0.0), trace), job.calibrate_steps
    sampled = sample_of(job, trace, seed, step)
    predicted = predictions(question)
    measured = in_truth(question, predicted, stages, sampled, step)
    chosen, *others = (plan for _, plan in nominated(question, *choose(question, most)))
    plans = dict.fromkeys((chosen, *others))
    problem, best = solve_groupings(measured)
    answer = solve(problem, runners_up=most) if isinstance(best, Solution) else best
    plans |= dict.fromkeys(plan for _, plan in nominated(question, problem, answer))
    seconds = {plan: stages.step_s(plan, sampled, step) for plan in plans}
    if seconds[chosen] == math.inf:
        raise ConfigError("the chosen plan does not fit", where="cluster", remedy="take more slots")

    def executed(plan: Plan) -> Executed:
        took = {stage: stages.took(plan, stage, sampled, step).seconds for stage in plan.model_stages()}
        told = {stage: (predicted.get(_running(plan, stage), math.nan), took[stage]) for stage in took}
        return Executed(plan, seconds[plan], told)

    valid = [plan for plan in plans if seconds[plan] < math.inf]
    return Comparison(executed(chosen), executed(min(valid, key=lambda plan: seconds[plan])), len(valid))


def predictions(question: Question) -> dict[Way, float]:
    """Return what the planner predicts for every way to run a model-stage, with the best of its micro-batches."""
    predicted = dict[Way, float]()
    for stage in question.pricing.workflow.model_stages:
        for one in ways(question.pricing, stage, lambda layout, dp: True):
            predicted[_way(one)] = min(one.seconds, predicted.get(_way(one), math.inf))
    return predicted


def in_truth(question: Question, predicted: dict[Way, float], stages: Stages, sampled: Sampled, step: int) -> Problem:
    """Return the planner's problem with the seconds that the world takes in the place of its predictions."""
    listed = {
        stage: ways(question.pricing, stage, lambda layout, dp: True)
        for stage in question.pricing.workflow.model_stages
    }
    return stated(question).restricted(
        {stage: _measured(stages, sampled, step, those, predicted) for stage, those in listed.items()}
    )


def _way(one: Candidate) -> Way:
    return one.model_stage, one.layout, one.dp, one.recompute


def _running(plan: Plan, stage: ModelStage) -> Way:
    units = plan.of(stage)
    return stage, units[0].layout, len(units), stage in plan.recomputed


def _placed(question: Question) -> Plan:
    return next(plan for _, plan in nominated(question, *choose(question)))


def nominated(question: Question, problem: Problem, answer: Solution | Infeasible) -> Iterator[tuple[Solution, Plan]]:
    """Yield the choice and its runners-up on slots, where they can be placed; none where nothing fits."""
    if isinstance(answer, Infeasible):
        return
    for candidates in (answer.candidates, *(one.candidates for one in answer.runners_up if one.candidates)):
        solution = evaluate(problem, candidates)
        placement = place_choice(question, problem, solution) if isinstance(solution, Solution) else solution
        if isinstance(solution, Solution) and not isinstance(placement, Infeasible):
            yield solution, replace(placement.plan, epoch=0)


def _measured(
    stages: Stages, sampled: Sampled, step: int, listed: tuple[Candidate, ...], predicted: dict[Way, float]
) -> tuple[Candidate, ...]:
    """Return the ways that are worth a look and fit, with measured seconds.

    Fewer live sequences than an engine could decode cost what the planner says they cost more.
    """
    fastest = dict[int, float]()
    for one in listed:
        fastest[one.slots] = min(one.seconds, fastest.get(one.slots, math.inf))
    took: dict[Way, float] = {}
    found = list[Candidate]()
    for one in listed:
        way = _way(one)
        if predicted[way] > WORTH_A_LOOK * fastest[one.slots]:
            continue
        if way not in took:
            took[way] = _alone_s(stages, sampled, step, one)
        if took[way] < math.inf:
            found.append(replace(one, seconds=took[way] * one.seconds / predicted[way]))
    return tuple(found)


def _alone_s(stages: Stages, sampled: Sampled, step: int, one: Candidate) -> float:
    """Return the seconds of a model-stage that has the first slots for itself; infinite where it does not fit."""
    size = one.layout.slots
    firsts = range(0, one.dp * size, size)
    units = tuple(Emu(one.model_stage, place, one.layout, _slots(first, size)) for place, first in enumerate(firsts))
    plan = Plan(0, units, (one.model_stage,) if one.recompute else ())
    try:
        return stages.took(plan, one.model_stage, sampled, step).seconds
    except OutOfMemory:
        return math.inf


def _slots(first: int, size: int) -> tuple[SlotId, ...]:
    return tuple(range(first, first + size))
