"""Which plans are on offer, and what does each cost to get to? The answer to a search.

The pure caller of planner, placement and transition: a question in, the event that the controller waits for out. Values
only, so that it can run in another process. Owner of the order: choose, place where state lies, price the way.
Invariants (tests/control/test_propose.py): a proposal fits every slot on the way; the first is the fastest, the others
keep more of what runs; equal questions get equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from nereus.control.breakdown import Pricing, as_replicated
from nereus.control.candidates import Space
from nereus.control.choose import Question, choose, intact, place_choice, replications, stated
from nereus.control.controller import PlanFound, Proposal, Widening
from nereus.control.move import move
from nereus.control.placement import Placement
from nereus.control.problem import (
    MEMORY_MARGIN,
    Candidate,
    Infeasible,
    Problem,
    Solution,
    evaluate,
    gib,
    usable_bytes,
)
from nereus.control.search import alternatives, solve_groupings
from nereus.core.cluster import Cluster
from nereus.core.plan import ModelStage, Plan, Replication

MOST_PROPOSALS = 8
"""So many plans at most are placed and priced for one answer: the fastest, then those that keep more of what runs."""

LAST_MARGIN = 1.03
"""Ours: what must be left of memory where the choice is between this and going back to a checkpoint."""


def propose(question: Question) -> tuple[Proposal, ...] | Infeasible:
    """Return the fastest plan, and those within 10 % that keep more of the current one, each with its price."""
    problem, best = choose(question)
    if isinstance(best, Infeasible):
        return best
    choices = [best]
    if question.current is not None:
        choices += alternatives(problem, best, replications(question.current))[: MOST_PROPOSALS - 1]
    now = latency_now(question)
    found = list[Proposal]()
    failed: Infeasible | None = None
    for choice in choices:
        placement = place_choice(question, problem, choice)
        if isinstance(placement, Infeasible):
            failed = failed or placement
            continue
        found.append(_proposal(question, choice, placement, now))
    return tuple(found) if found or failed is None else failed


def answer(question: Question, search: int, widening: Widening = Widening.PLANS) -> PlanFound:
    """Return the event that ends search number ``search``."""
    pricing = replace(question.pricing, space=widened(question.pricing.space, widening))
    if widening >= Widening.MARGIN:
        pricing = replace(pricing, cluster=_on_the_edge(pricing.cluster))
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


def _on_the_edge(cluster: Cluster) -> Cluster:
    """Return the cluster with so much more memory that the usual margin leaves ``LAST_MARGIN`` of what there is."""
    above, below = MEMORY_MARGIN
    memory = cluster.device.memory_bytes * above / below / LAST_MARGIN
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def latency_now(question: Question) -> float:
    """Return the predicted step time of the current plan; infinite where it cannot go on, or where there is none.

    Each model-stage is taken at its fastest micro-batch that fits, as the planner would have set it, and recomputes as
    the plan says.
    """
    current = question.current
    if current is None or len(intact(question).emus) < len(current.emus) or current.slots() & {*question.leaving}:
        return math.inf
    now = replications(current)
    problem = stated(replace(question, pins=()))
    listed = {member.model_stage: now.get(member.model_stage) for member in problem.members()}
    choices = {
        stage: _as_running(question.pricing, stage, replication, current) if replication else ()
        for stage, replication in listed.items()
    }
    if not all(choices.values()):
        return math.inf
    there = problem.restricted(choices)
    there, solution = solve_groupings(there)
    if isinstance(solution, Infeasible):
        solution = _as_placed(question, there, current)
    return math.inf if isinstance(solution, Infeasible) else solution.latency_s


def _as_running(pricing: Pricing, stage: ModelStage, replication: Replication, current: Plan) -> tuple[Candidate, ...]:
    running = replace(pricing, space=replace(pricing.space, recompute=(stage in current.recomputed,)))
    return as_replicated(running, stage, replication)


def _proposal(question: Question, choice: Solution, placement: Placement, now: float) -> Proposal:
    usable = usable_bytes(int(question.pricing.cluster.device.memory_bytes))
    seconds, peak, stuck = 0.0, placement.memory_bytes, ""
    if question.current is not None:
        way = move(question.pricing, intact(question), placement.plan)
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
