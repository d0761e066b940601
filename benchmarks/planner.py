"""How fast does the planner decide, and is it right? Beside SCIP on the same problem.

    python benchmarks/planner.py [--json] [--limit S] [--exact N] [--compare N]

1. *Speed*: decision time and peak memory for six model-stages at 32 to 16,384 slots, sync and async, with memory
   so tight that it decides; SCIP gets the same problem and ``--limit`` seconds. Times are CPU seconds of one core;
   "prepare" turns priced candidates into tables, once per pricing; a decision answers for a pool and a capacity.
2. *Against enumeration*: ``--exact`` random small problems (up to 16 slots).
3. *Against SCIP*: ``--compare`` problems up to 256 slots, solved to proven optimality.

Needs ``pip install pyscipopt`` for SCIP; without it those columns stay empty and part 3 is skipped.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import random
import statistics
import time
import tracemalloc
from typing import Any

from nereus.control.problem import Candidate, Infeasible, Member, Phase, Problem, Solution, evaluate
from nereus.control.search import solve
from nereus.core.plan import Layout, ModelStage, Stage

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TARGETS_S = {32: 0.5e-3, 1024: 10e-3, 16384: 250e-3}
MEMORY_TARGET_BYTES = 100 << 20
TOLERANCE = 1e-6
GIB = 1 << 30
HAS_SCIP = importlib.util.find_spec("pyscipopt") is not None


# Problems


def realistic(pool: int, *, concurrent: bool, seed: int = 0, capacity_gib: float = 64.0) -> Problem:
    """Return PPO of an 8B policy with an 8B critic, reference and reward model, priced by simple formulas.

    Every layout with tensor degree up to 8 and pipeline degree up to 16, 2^k and 3 * 2^k replicas, four
    micro-batch sizes, with and without recomputation in training. ``seed`` varies efficiencies, so that no two
    candidates tie.
    """
    draw = random.Random(seed)
    stages = (Stage.GENERATION, Stage.INFERENCE, Stage.INFERENCE, Stage.INFERENCE, Stage.TRAINING, Stage.TRAINING)
    models = ("policy", "reference", "reward", "critic", "policy", "critic")
    members = [
        Member(ModelStage(stage, model), tuple(_priced(ModelStage(stage, model), pool, draw)))
        for stage, model in zip(stages, models, strict=True)
    ]
    generation = Phase("generation", (members[0],))
    inference, training = Phase("inference", tuple(members[1:4])), Phase("training", tuple(members[4:]))
    sides = ((generation,), (inference, training)) if concurrent else ((generation, inference, training),)
    return Problem(sides, pool, int(capacity_gib * GIB), concurrent, exposed_s=0.5)


def _priced(stage: ModelStage, pool: int, draw: random.Random) -> list[Candidate]:
    training = stage.stage is Stage.TRAINING
    work = (
        {Stage.GENERATION: 40.0, Stage.INFERENCE: 12.0, Stage.TRAINING: 36.0}[stage.stage]
        * pool
        * draw.uniform(0.8, 1.2)
    )
    state = (16.0 if training else 2.0) * 8e9
    found = []
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        layout = Layout(tp, pp)
        sharding = (1 + 0.06 * (tp - 1)) * (1 + 0.04 * (pp - 1)) * draw.uniform(0.95, 1.05)
        degrees = (base << shift for base in (1, 3) for shift in range(15))
        for dp in sorted(degree for degree in degrees if degree * layout.slots <= pool):
            slots = dp * layout.slots
            for micro_batch, recompute in itertools.product((1, 2, 4, 8), (False, True) if training else (False,)):
                small = 1 + 0.5 / micro_batch + 0.02 * micro_batch * (pp - 1)
                tail = 0.02 * dp**0.5
                seconds = (
                    work / slots * sharding * small * (1.3 if recompute else 1.0) * draw.uniform(0.99, 1.01) + tail
                )
                kept = micro_batch * (pp if training else 1) * (0.15 if recompute or not training else 1.5) * 8e9
                transient = kept / layout.slots + 0.5e9 * micro_batch
                found.append(
                    Candidate(
                        stage, layout, dp, seconds, int(state / layout.slots), int(transient), micro_batch, recompute
                    )
                )
    return found


def thinned(problem: Problem, seed: int, most: int = 24) -> Problem:
    """Return the problem with a random choice of ``most`` candidates for each model-stage."""
    draw = random.Random(seed)
    members = list(problem.members())
    return problem.restricted(
        {
            member.model_stage: tuple(draw.sample(member.candidates, min(most, len(member.candidates))))
            for member in members
        }
    )


def small(seed: int, *, pool: int, most: int) -> Problem:
    """Return a random awkward problem: six model-stages, any arrangement of sides, tight memory, many ties."""
    draw = random.Random(seed)

    def priced(stage: ModelStage) -> tuple[Candidate, ...]:
        found = []
        for _ in range(draw.randint(2, most)):
            layout = Layout(draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 1, 2)))
            dp = draw.randint(1, max(1, pool // layout.slots // draw.choice((2, 4, 8))))
            seconds = draw.randint(8, 40) / (dp * layout.slots) ** draw.choice((0.5, 0.9))
            resident = draw.randint(1, 8) * 800 // layout.slots
            found.append(Candidate(stage, layout, dp, round(seconds, 4), resident, draw.randint(0, 20) * 100))
        return tuple(found)

    def phase(name: str, *stages: ModelStage) -> Phase:
        return Phase(name, tuple(Member(stage, priced(stage)) for stage in stages))

    generation = phase("generation", ModelStage(Stage.GENERATION))
    inference = phase("inference", *(ModelStage(Stage.INFERENCE, model) for model in ("reference", "reward", "critic")))
    training = phase("training", *(ModelStage(Stage.TRAINING, model) for model in ("policy", "critic")))
    sides = draw.choice(
        (
            ((generation, inference, training),),
            ((generation,), (inference, training)),
            ((generation,), (inference,), (training,)),
        )
    )
    return Problem(sides, pool, draw.randint(4000, 17000), len(sides) > 1 and draw.random() < 0.7)


# The same problem for others


def enumerate_all(problem: Problem) -> float | None:
    """Return the least latency over every combination."""
    answers = (evaluate(problem, chosen) for chosen in itertools.product(*(m.candidates for m in problem.members())))
    return min((answer.latency_s for answer in answers if isinstance(answer, Solution)), default=None)


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


# Measurements


def cpu_seconds(problem: Problem, least_runs: int = 5, budget_s: float = 0.5) -> float:
    """Return the median CPU time of a decision, nothing remembered from the one before."""
    spent, taken = 0.0, list[float]()
    while len(taken) < least_runs or (spent < budget_s and len(taken) < 200):
        for phase in problem.phases():
            phase.table.forget()
        began = time.process_time()
        solve(problem)
        taken.append(time.process_time() - began)
        spent += taken[-1]
    return statistics.median(taken)


def speed(pool: int, *, concurrent: bool, limit_s: float) -> dict[str, Any]:
    """Return one row: decision time, and SCIP's where it is there."""
    problem = realistic(pool, concurrent=concurrent)
    gc.collect()
    began = time.process_time()
    for phase in problem.phases():
        _ = phase.table.members
    prepare = time.process_time() - began
    answer = solve(problem)
    assert isinstance(answer, Solution), answer
    row: dict[str, Any] = {
        "slots": pool,
        "mode": "async" if concurrent else "sync",
        "candidates": sum(len(member.candidates) for member in problem.members()),
        "prepare_s": prepare,
        "decide_s": cpu_seconds(problem),
        "latency_s": answer.latency_s,
        "peak_bytes": peak_bytes(pool, concurrent=concurrent),
    }
    if HAS_SCIP and limit_s > 0:
        row["scip_latency_s"], row["scip_status"], row["scip_s"] = scip(problem, limit_s)
    return row


def peak_bytes(pool: int, *, concurrent: bool) -> int:
    """Return the most memory that tables and search hold at a time (traced allocations, numpy's included)."""
    problem = realistic(pool, concurrent=concurrent)
    tracemalloc.start()
    solve(problem)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def same(ours: Solution | Infeasible, theirs: float | None) -> bool:
    """Do both say the same latency, or both that nothing fits?"""
    if isinstance(ours, Infeasible) or theirs is None:
        return isinstance(ours, Infeasible) and theirs is None
    return abs(ours.latency_s - theirs) <= TOLERANCE * max(1.0, theirs)


def against_enumeration(count: int) -> dict[str, int]:
    equal = feasible = 0
    for seed in range(count):
        problem = small(seed, pool=6 + seed % 11, most=4)
        answer = solve(problem)
        feasible += isinstance(answer, Solution)
        equal += same(answer, enumerate_all(problem))
    return {"problems": count, "feasible": feasible, "equal": equal}


def against_scip(count: int, limit_s: float = 120.0) -> dict[str, int]:
    """Half random, half realistic with few candidates, so that SCIP can close most; the others are counted apart."""
    equal = closed = feasible = 0
    for seed in range(count):
        pool = (16, 32, 64, 128, 256)[seed % 5]
        if seed % 2:
            problem = small(seed, pool=pool, most=30)
        else:
            capacity = (40.0, 64.0, 30.0)[seed % 3]
            problem = thinned(realistic(pool, concurrent=seed % 4 == 0, seed=seed, capacity_gib=capacity), seed)
        theirs, status, _ = scip(problem, limit_s)
        if status in ("optimal", "infeasible"):
            answer = solve(problem)
            closed += 1
            feasible += isinstance(answer, Solution)
            equal += same(answer, theirs)
    return {"problems": count, "closed_by_scip": closed, "feasible": feasible, "equal": equal}


def show(row: dict[str, Any]) -> str:
    line = (
        f"{row['slots']:>6} {row['mode']:<5} {row['candidates']:>6} {row['prepare_s'] * 1e3:>9.2f} "
        f"{row['decide_s'] * 1e3:>9.3f} {row['peak_bytes'] / (1 << 20):>8.1f} {row['latency_s']:>10.4f}"
    )
    if "scip_s" in row:
        latency = "-" if row["scip_latency_s"] is None else f"{row['scip_latency_s']:.4f}"
        line += f" {row['scip_s'] * 1e3:>10.1f} {latency:>10} {row['scip_status']:<10}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for SCIP on each problem; 0: no SCIP")
    parser.add_argument("--exact", type=int, default=500, help="problems against enumeration")
    parser.add_argument("--compare", type=int, default=60, help="problems against SCIP")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="largest pool to measure")
    options = parser.parse_args()
    print(
        f"{'slots':>6} {'mode':<5} {'cand.':>6} {'prep. ms':>9} {'decide ms':>9} {'peak MiB':>8} {'latency s':>10}"
        f" {'SCIP ms':>10} {'SCIP s':>10} SCIP status"
    )
    rows = []
    for pool, concurrent in itertools.product((size for size in SIZES if size <= options.largest), (False, True)):
        rows.append(speed(pool, concurrent=concurrent, limit_s=options.limit))
        print(show(rows[-1]), flush=True)
    targets = {
        size: max(row["decide_s"] for row in rows if row["slots"] == size)
        for size in TARGETS_S
        if size <= options.largest
    }
    for size, taken in targets.items():
        verdict = "met" if taken <= TARGETS_S[size] else "MISSED"
        print(f"target {TARGETS_S[size] * 1e3:g} ms at {size} slots: {taken * 1e3:.3f} ms, {verdict}")
    peak = max(row["peak_bytes"] for row in rows)
    verdict = "met" if peak < MEMORY_TARGET_BYTES else "MISSED"
    print(f"target {MEMORY_TARGET_BYTES >> 20} MiB: {peak / (1 << 20):.1f} MiB, {verdict}")
    enumeration = against_enumeration(options.exact)
    print(f"equal to enumeration: {enumeration['equal']} of {enumeration['problems']}")
    compared = against_scip(options.compare) if HAS_SCIP and options.compare else None
    print(f"equal to SCIP: {compared['equal']} of {compared['closed_by_scip']} closed" if compared else "SCIP: not run")
    if options.json:
        print(json.dumps({"speed": rows, "enumeration": enumeration, "scip": compared}))


if __name__ == "__main__":
    main()
