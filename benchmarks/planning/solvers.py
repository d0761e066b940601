"""What do others say of the same problem? Enumeration of every combination, and SCIP with the same constraints."""

from __future__ import annotations

import importlib.util
import itertools
import time

from nereus.control.problem import Infeasible, Problem, Solution

HAS_SCIP = importlib.util.find_spec("pyscipopt") is not None
CLOSED = ("optimal", "infeasible")
"""How SCIP says that it has proved its answer."""

TOLERANCE = 1e-6
"""Relative: SCIP's own."""


def exhaustive(problem: Problem) -> float | None:
    """Return the least latency over all combinations, None where none fits. Written on plain numbers for speed."""
    rows = [
        [(one.slots, one.seconds, one.resident_bytes, one.transient_bytes) for one in member.candidates]
        for member in problem.members()
    ]
    usable, best = problem.usable_bytes, None
    cuts, spans = 0, list[list[tuple[int, int]]]()
    for side in problem.sides:
        spans.append([])
        for phase in side:
            spans[-1].append((cuts, cuts + len(phase.members)))
            cuts += len(phase.members)
    for chosen in itertools.product(*rows):
        times, total, fits = [], 0, True
        for side in spans:
            time, slots, resident, transient = 0.0, 0, 0, 0
            for start, end in side:
                group = chosen[start:end]
                slots = max(slots, sum(one[0] for one in group))
                time += max(one[1] for one in group)
                resident += max(one[2] for one in group)
                transient = max(transient, max(one[3] for one in group))
            total += slots
            times.append(time)
            fits = fits and resident + transient <= usable
        if fits and total <= problem.pool:
            latency = (max(times) if problem.concurrent else sum(times)) + problem.exposed_s
            best = latency if best is None else min(best, latency)
    return best


def scip(problem: Problem, limit_s: float) -> tuple[float | None, str, float]:
    """Return SCIP's best latency, its status and the CPU seconds it took, building the model included."""
    from pyscipopt import Model, quicksum

    began = time.process_time()
    model = Model()
    model.hideOutput()
    model.setParam("limits/time", limit_s)
    model.setParam("timing/clocktype", 1)  # CPU seconds, as ours
    unit = max(problem.capacity_bytes / 1000, 1.0)
    total, shares = [], []
    for side in problem.sides:
        share, transient = model.addVar(lb=0), model.addVar(lb=0)
        times, residents = [], []
        for phase in side:
            phase_time, resident = model.addVar(lb=0), model.addVar(lb=0)
            slots = []
            for member in phase.members:
                takes = [model.addVar(vtype="B") for _ in member.candidates]
                rows = list(zip(takes, member.candidates, strict=True))
                model.addCons(quicksum(takes) == 1)
                model.addCons(quicksum(take * one.seconds for take, one in rows) <= phase_time)
                model.addCons(quicksum(take * (one.resident_bytes / unit) for take, one in rows) <= resident)
                model.addCons(quicksum(take * (one.transient_bytes / unit) for take, one in rows) <= transient)
                slots.append(quicksum(take * one.slots for take, one in rows))
            model.addCons(quicksum(slots) <= share)
            times.append(phase_time)
            residents.append(resident)
        model.addCons(quicksum(residents) + transient <= problem.usable_bytes / unit)
        total.append(quicksum(times))
        shares.append(share)
    model.addCons(quicksum(shares) <= problem.pool)
    if problem.concurrent:
        latency = model.addVar(lb=0)
        for side_time in total:
            model.addCons(side_time <= latency)
        model.setObjective(latency + problem.exposed_s)
    else:
        model.setObjective(quicksum(total) + problem.exposed_s)
    model.optimize()
    best = model.getObjVal() if model.getNSols() else None
    return best, str(model.getStatus()), time.process_time() - began


def same(ours: Solution | Infeasible, theirs: float | None) -> bool:
    """Do both say the same latency, or both that nothing fits?"""
    if isinstance(ours, Infeasible) or theirs is None:
        return isinstance(ours, Infeasible) and theirs is None
    return abs(ours.latency_s - theirs) <= TOLERANCE * max(1.0, theirs)
