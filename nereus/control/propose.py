"""Which plans would do, and what does each cost to get to? The answer to a search.

From a question (pool, models, workflow, workload, efficiencies, what runs now) to a placed and priced choice; pure, and
values in and out, so that it can run in another process. Owner of the order: solve, place where state lies, move.
Invariants (tests/control/test_propose.py): a proposal fits every slot; its plan is valid for the workflow; units on
slots that are gone are never counted on; an answer names the constraint and by how much it is missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import Pricing, as_replicated, leanest, ways
from nereus.control.candidates import Space
from nereus.control.candidates import problem as state_problem
from nereus.control.controller import PlanFound, Proposal, Widening
from nereus.control.move import Overheads, move
from nereus.control.placement import Placement, place
from nereus.control.problem import Candidate, Infeasible, Problem, Solution, evaluate, gib, usable_bytes
from nereus.control.search import alternatives, solve
from nereus.core.plan import Emu, Layout, ModelStage, Plan, Replication

MOST_PROPOSALS = 8
"""So many plans at most are placed and priced for one answer: the fastest, then those that keep more of what runs."""


class Pin(Struct, frozen=True):
    """Degrees that a model-stage must have; None leaves one free."""

    model_stage: ModelStage
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None

    def __str__(self) -> str:
        degrees = (("d", self.dp), ("t", self.tp), ("p", self.pp))
        return f"{self.model_stage} {''.join(f'{name}{degree}' for name, degree in degrees if degree is not None)}"

    def allows(self, layout: Layout, dp: int) -> bool:
        return self.tp in (None, layout.tp) and self.pp in (None, layout.pp) and self.dp in (None, dp)


class Question(Struct, frozen=True):
    """Everything that an answer depends on."""

    pricing: Pricing
    """``pricing.cluster`` holds the intact slots."""
    current: Plan | None = None
    """The plan that runs, lost units included; None before the first."""
    next_ordinals: tuple[tuple[ModelStage, int], ...] = ()
    """Ordinals that units of earlier plans have had."""
    pins: tuple[Pin, ...] = ()
    host_s: float = 0.0
    """CPU-side processing of a step."""
    overheads: Overheads = Overheads()


class Found(Struct, frozen=True):
    """A choice with its place."""

    problem: Problem
    solution: Solution
    placement: Placement


def start_plan(question: Question, *, runners_up: int = 0) -> Found | Infeasible:
    """Return the fastest plan that fits, placed; with the current plan given, where most of its state stays."""
    problem = stated(question)
    solution = _solve(question, problem, runners_up)
    if isinstance(solution, Infeasible):
        return solution
    placement = _place(question, problem, solution)
    return placement if isinstance(placement, Infeasible) else Found(problem, solution, placement)


def propose(question: Question) -> tuple[Proposal, ...] | Infeasible:
    """Return the fastest plan, and those within 10 % that keep more of the current one, each with its price."""
    problem = stated(question)
    best = _solve(question, problem, 0)
    if isinstance(best, Infeasible):
        return best
    choices = [best]
    if question.current is not None:
        choices += alternatives(problem, best, replications(question.current))[: MOST_PROPOSALS - 1]
    now = latency_now(question)
    found = list[Proposal]()
    failed: Infeasible | None = None
    for choice in choices:
        placement = _place(question, problem, choice)
        if isinstance(placement, Infeasible):
            failed = failed or placement
            continue
        found.append(_proposal(question, choice, placement, now))
    return tuple(found) if found or failed is None else failed


def answer(question: Question, search: int, widening: Widening = Widening.PLANS) -> PlanFound:
    """Return the event that ends search number ``search``."""
    pricing = replace(question.pricing, space=widened(question.pricing.space, widening))
    found = propose(replace(question, pricing=pricing))
    if isinstance(found, Infeasible):
        return PlanFound(search, because=found.because)
    return PlanFound(search, found)


def widened(space: Space, widening: Widening) -> Space:
    """Return what a search may use: uneven micro-batches, then recomputation, even where ``space`` leaves them out."""
    if widening >= Widening.MICRO_BATCH:
        space = replace(space, uneven=True)
    if widening >= Widening.RECOMPUTE:
        space = replace(space, recompute=(False, True))
    return space


def latency_now(question: Question) -> float:
    """Return the predicted step time of the current plan; infinite where it cannot go on, or where there is none.

    Each model-stage is taken at its fastest micro-batch that fits, as the planner would have set it.
    """
    current = question.current
    if current is None or len(intact(question).emus) < len(current.emus):
        return math.inf
    now = replications(current)
    problem = stated(replace(question, pins=()))
    listed = {member.model_stage: now.get(member.model_stage) for member in problem.members()}
    choices = {
        stage: as_replicated(question.pricing, stage, replication) if replication else ()
        for stage, replication in listed.items()
    }
    if not all(choices.values()):
        return math.inf
    there = problem.restricted(choices)
    solution = solve(there)
    if isinstance(solution, Infeasible):
        solution = _as_placed(question, there, current)
    return math.inf if isinstance(solution, Infeasible) else solution.latency_s


def intact(question: Question) -> Plan:
    """Return the current plan without the units that lost a slot; an empty one before the first plan.

    Units that are not the algorithm's (the relays, which use no slot of the pool) are always kept.
    """
    current = question.current or Plan(-1, ())
    pool = {slot for node in question.pricing.cluster.nodes for slot in node.slots}
    planned = set(question.pricing.workflow.model_stages)
    kept = tuple(emu for emu in current.emus if emu.model_stage not in planned or pool.issuperset(emu.slots))
    return Plan(current.epoch, kept)


def replications(plan: Plan) -> dict[ModelStage, Replication]:
    """Return the layout and the number of replicas of each model-stage."""
    return {
        stage: Replication(len(units), units[0].layout) for stage in plan.model_stages() if (units := plan.of(stage))
    }


def stated(question: Question) -> Problem:
    """Return the planner's problem, with only the pinned candidates where there are pins."""
    pricing = question.pricing
    problem = state_problem(
        pricing.shapes,
        pricing.workload,
        pricing.workflow,
        pricing.cluster,
        pricing.efficiencies,
        space=pricing.space,
        calibration=pricing.calibration,
        host_s=question.host_s,
    )
    pinned = {pin.model_stage: ways(pricing, pin.model_stage, pin.allows) for pin in question.pins}
    return problem.restricted(pinned) if pinned else problem


def _solve(question: Question, problem: Problem, runners_up: int) -> Solution | Infeasible:
    solution = solve(problem, runners_up=runners_up)
    if isinstance(solution, Infeasible) and solution.constraint == "candidates":
        return _no_candidates(question, problem) or solution
    return solution


def _no_candidates(question: Question, problem: Problem) -> Infeasible | None:
    """Say what the first model-stage without candidates lacks."""
    stage = next(member.model_stage for member in problem.members() if not member.candidates)
    pins = [pin for pin in question.pins if pin.model_stage == stage]
    if pins:
        listed = ways(question.pricing, stage, pins[0].allows, fitting=False)
        if not listed:
            because = f"{pins[0]} is not possible: the batch, the pool or the nodes do not allow it"
            return Infeasible("candidates", 1, because)
        return _too_large(question, min(listed, key=lambda one: one.resident_bytes + one.transient_bytes))
    found = leanest(question.pricing, stage)
    return _too_large(question, found.candidate) if found else None


def _too_large(question: Question, lean: Candidate) -> Infeasible:
    size, usable = lean.resident_bytes + lean.transient_bytes, usable_bytes(_capacity(question))
    how = f"micro-batch {lean.micro_batch}{', recomputed' if lean.recompute else ''}"
    because = (
        f"{lean.model_stage} needs at least {gib(size)} on a slot ({lean.layout}, {how}), {gib(usable)} may be used"
    )
    return Infeasible("memory", max(0, size - usable), because)


def _capacity(question: Question) -> int:
    return int(question.pricing.cluster.device.memory_bytes)


def _place(question: Question, problem: Problem, solution: Solution) -> Placement | Infeasible:
    """Place the choice; units that are not the algorithm's stay as they are."""
    before = intact(question)
    planned = set(question.pricing.workflow.model_stages)
    others = tuple(emu for emu in before.emus if emu.model_stage not in planned)
    nodes = [node.slots for node in question.pricing.cluster.nodes]
    current = Plan(before.epoch, tuple(emu for emu in before.emus if emu.model_stage in planned))
    used = dict(question.next_ordinals)
    for emu in question.current.emus if question.current else ():
        used[emu.model_stage] = max(used.get(emu.model_stage, 0), emu.ordinal + 1)
    placement = place(problem, solution, nodes, current, used)
    if isinstance(placement, Infeasible) or not others:
        return placement
    return replace(placement, plan=_joined(placement.plan, others))


def _joined(plan: Plan, others: tuple[Emu, ...]) -> Plan:
    return Plan(plan.epoch, tuple(sorted((*plan.emus, *others))))


def _proposal(question: Question, choice: Solution, placement: Placement, now: float) -> Proposal:
    usable = usable_bytes(_capacity(question))
    seconds, peak, stuck = 0.0, placement.memory_bytes, ""
    if question.current is not None:
        way = move(question.pricing, intact(question), placement.plan, question.overheads)
        seconds, peak, stuck = way.seconds, max(peak, way.peak_bytes), way.stuck
    return Proposal(placement.plan, now, choice.latency_s, seconds, peak, usable, stuck)


def _as_placed(question: Question, problem: Problem, plan: Plan) -> Solution | Infeasible:
    """Check the current plan slot by slot where the placement-free bound is too strict; the leanest way counts."""
    lean = {
        member.model_stage: min(
            member.candidates, key=lambda one: (one.resident_bytes + one.transient_bytes, one.seconds)
        )
        for member in problem.members()
    }
    over = _fullest(plan, lean) - problem.usable_bytes
    if over > 0:
        return Infeasible("memory", over, f"the fullest slot would be over by {gib(over)}")
    roomy = replace(problem, capacity_bytes=1 << 62)
    return evaluate(roomy, tuple(lean[member.model_stage] for member in problem.members()))


def _fullest(plan: Plan, chosen: Mapping[ModelStage, Candidate]) -> int:
    resident: dict[int, int] = {}
    transient: dict[int, int] = {}
    for emu in plan.emus:
        if one := chosen.get(emu.model_stage):
            for slot in emu.slots:
                resident[slot] = resident.get(slot, 0) + one.resident_bytes
                transient[slot] = max(transient.get(slot, 0), one.transient_bytes)
    return max(size + transient[slot] for slot, size in resident.items())
