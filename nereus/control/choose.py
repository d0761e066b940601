"""Which plan would do? A question, and the planner's choice in its place.

From pool, models, workflow, workload, efficiencies and what runs now to the fastest plan that fits, placed where state
lies already; pure, values in and out. Owner of the question. Invariants (tests/control/test_propose.py): a plan is
valid for the workflow and stands on intact slots; units on slots that are gone are never counted on; what is missing is
named with the constraint and the amount.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from nereus.control.breakdown import Pricing, leanest, ways
from nereus.control.candidates import problem as state_problem
from nereus.control.placement import Placement, place
from nereus.control.problem import Candidate, Infeasible, Problem, Solution, gib, usable_bytes
from nereus.control.search import solve, solve_groupings
from nereus.core.plan import Emu, Layout, ModelStage, Plan, Replication, SlotId


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
    leaving: tuple[SlotId, ...] = ()
    """Slots that will be taken away and still work: no plan may use them, but what they hold can be sent."""


class Found(Struct, frozen=True):
    """A choice with its place."""

    problem: Problem
    solution: Solution
    placement: Placement


def start_plan(question: Question, *, runners_up: int = 0) -> Found | Infeasible:
    """Return the fastest plan that fits, placed; with the current plan given, where most of its state stays."""
    problem, solution = choose(question, runners_up)
    if isinstance(solution, Infeasible):
        return solution
    placement = place_choice(question, problem, solution)
    return placement if isinstance(placement, Infeasible) else Found(problem, solution, placement)


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


def choose(question: Question, runners_up: int = 0) -> tuple[Problem, Solution | Infeasible]:
    """Return the fastest choice over all ways to share slots, and the problem with the phases so grouped.

    Where a model-stage has no candidate, the answer says what the leanest of them all lacks.
    """
    problem, solution = solve_groupings(stated(question))
    if isinstance(solution, Infeasible):
        lacking = _no_candidates(question, problem) if solution.constraint == "candidates" else None
        return problem, lacking or solution
    return problem, solve(problem, runners_up=runners_up) if runners_up else solution


def place_choice(question: Question, problem: Problem, solution: Solution) -> Placement | Infeasible:
    """Return the choice on slots, where its state is if possible; units that are not the algorithm's stay."""
    before = intact(question)
    planned = set(question.pricing.workflow.model_stages)
    others = tuple(emu for emu in before.emus if emu.model_stage not in planned)
    nodes = [node.slots for node in question.pricing.cluster.nodes]
    current = replace(before, emus=tuple(emu for emu in before.emus if emu.model_stage in planned))
    used = dict(question.next_ordinals)
    for emu in question.current.emus if question.current else ():
        used[emu.model_stage] = max(used.get(emu.model_stage, 0), emu.ordinal + 1)
    placement = place(problem, solution, nodes, current, used)
    if isinstance(placement, Infeasible) or not others:
        return placement
    return replace(placement, plan=_joined(placement.plan, others))


def intact(question: Question) -> Plan:
    """Return the current plan without the units that lost a slot; an empty one before the first plan.

    Units that are not the algorithm's (the relays, which use no slot of the pool) are always kept.
    """
    current = question.current or Plan(-1, ())
    pool = {slot for node in question.pricing.cluster.nodes for slot in node.slots} | set(question.leaving)
    planned = set(question.pricing.workflow.model_stages)
    kept = tuple(emu for emu in current.emus if emu.model_stage not in planned or pool.issuperset(emu.slots))
    return replace(current, emus=kept)


def replications(plan: Plan) -> dict[ModelStage, Replication]:
    """Return the layout and the number of replicas of each model-stage."""
    return {
        stage: Replication(len(units), units[0].layout) for stage in plan.model_stages() if (units := plan.of(stage))
    }


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
    size, usable = (
        lean.resident_bytes + lean.transient_bytes,
        usable_bytes(int(question.pricing.cluster.device.memory_bytes)),
    )
    how = f"micro-batch {lean.micro_batch}{', recomputed' if lean.recompute else ''}"
    because = (
        f"{lean.model_stage} needs at least {gib(size)} on a slot ({lean.layout}, {how}), {gib(usable)} may be used"
    )
    return Infeasible("memory", max(0, size - usable), because)


def _joined(plan: Plan, others: tuple[Emu, ...]) -> Plan:
    return replace(plan, emus=tuple(sorted((*plan.emus, *others))))
