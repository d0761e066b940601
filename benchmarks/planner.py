"""How fast does the planner decide, and is it right? Beside SCIP on the same problem.

    python benchmarks/planner.py [--json] [--limit S] [--exact N] [--compare N]

1. *Speed*: decision time and peak memory for six model-stages at 32 to 16,384 slots, sync and async, with memory
   so tight that it decides; SCIP gets the same problem and ``--limit`` seconds. CPU seconds of one core:

   - *decide*: the prices and the capacity are known, the pool is new: what a running job asks when slots come or go;
   - *floor*: of this, reading the tables: one binary search per phase and probe, one sum per probe. No exact method
     that keeps such tables does with less; the rest names the candidates and checks them;
   - *cold*: everything is new, tables included: what a job asks once after each new pricing;
   - *apart*: *decide* over every way to give phases separate slots (sync only).
2. *Against enumeration*: ``--exact`` random small problems (up to 16 slots), and every grouping of their phases.
3. *Against SCIP*: ``--compare`` problems up to 256 slots that SCIP closes.

Needs ``pip install pyscipopt`` for SCIP (part of the ``test`` extra); without it those columns stay empty and part 3 is
not run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planning.clock import calibrated, calibration_s
from benchmarks.planning.problems import comparable, realistic, small
from benchmarks.planning.solvers import CLOSED, HAS_SCIP, exhaustive, same, scip
from nereus.control.problem import Member, Phase, Problem, Solution, groupings
from nereus.control.search import solve, solve_groupings

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TARGETS_S = {32: 0.5e-3, 1024: 10e-3, 16384: 250e-3}
MEMORY_TARGET_BYTES = 100 << 20


def forget(problem: Problem) -> None:
    """Drop the answers about pools, keep the tables."""
    for phase in problem.phases():
        phase.table.forget()


def unprepared(problem: Problem) -> Problem:
    """Return the same problem with nothing computed yet."""
    sides = tuple(
        tuple(
            Phase(phase.name, tuple(Member(member.model_stage, member.candidates) for member in phase.members))
            for phase in side
        )
        for side in problem.sides
    )
    return replace(problem, sides=sides)


def cpu_seconds(
    prepare: Callable[[], Any], run: Callable[[Any], object], least_runs: int, budget_s: float
) -> list[float]:
    """Return the CPU times of ``run`` on what ``prepare`` makes, ascending; only ``run`` is timed."""
    spent, taken = 0.0, list[float]()
    while len(taken) < least_runs or (spent < budget_s and len(taken) < 400):
        subject = prepare()
        began = time.process_time()
        run(subject)
        taken.append(time.process_time() - began)
        spent += taken[-1]
    return sorted(taken)


def floor_seconds(problem: Problem) -> float:
    """Return the least time of reading each phase's table and adding up, once for each probe of a decision."""
    probes = 1
    if problem.concurrent:
        probes = max(1, len(problem.sides[0][0].table.steps.slots).bit_length())
    tables = [phase.table for phase in problem.sides[-1]]
    joint = next(iter(problem.sides[-1][0].table.joined.values()))

    def read(_: object) -> None:
        for _probe in range(probes):
            seconds = 0.0
            for table, cells in zip(tables, joint.cells, strict=True):
                keys, values, _slots = table.steps
                seconds = seconds + values[keys.searchsorted(keys[: table.cells])][cells]
            seconds.argmin()  # type: ignore[attr-defined]

    return cpu_seconds(lambda: None, read, 200, 0.0)[0]


def speed(pool: int, *, concurrent: bool, limit_s: float) -> dict[str, Any]:
    """Return one row: times of a decision, and SCIP's where it is there."""
    problem = realistic(pool, concurrent=concurrent)
    answer = solve(problem)
    assert isinstance(answer, Solution), answer
    gc.collect()
    decide = cpu_seconds(lambda: forget(problem), lambda _: solve(problem), 20, 0.5)
    cold = cpu_seconds(lambda: unprepared(problem), solve, 7, 0.5)
    row: dict[str, Any] = {
        "slots": pool,
        "mode": "async" if concurrent else "sync",
        "candidates": sum(len(member.candidates) for member in problem.members()),
        "decide_s": decide[0],
        "decide_median_s": statistics.median(decide),
        "floor_s": floor_seconds(problem),
        "cold_s": cold[0],
        "apart_s": None,
        "latency_s": answer.latency_s,
        "peak_bytes": peak_bytes(unprepared(problem)),
    }
    if not concurrent:
        solve_groupings(problem)
        row["apart_s"] = cpu_seconds(lambda: forget(problem), lambda _: solve_groupings(problem), 10, 0.3)[0]
    if HAS_SCIP and limit_s > 0:
        row["scip_latency_s"], row["scip_status"], row["scip_s"] = scip(problem, limit_s)
    return row


def peak_bytes(problem: Problem) -> int:
    """Return the most memory that tables and search hold at a time (traced allocations, numpy's included)."""
    tracemalloc.start()
    solve(problem)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def against_enumeration(count: int) -> dict[str, int]:
    equal = feasible = equal_apart = 0
    for seed in range(count):
        problem = small(seed)
        answer, expected = solve(problem), exhaustive(problem)
        feasible += isinstance(answer, Solution)
        equal += same(answer, expected)
        found = [expected, *map(exhaustive, itertools.islice(groupings(problem), 1, None))]
        least = min((latency for latency in found if latency is not None), default=None)
        equal_apart += same(solve_groupings(problem)[1], least)
    return {"problems": count, "feasible": feasible, "equal": equal, "equal_over_groupings": equal_apart}


def against_scip(count: int, limit_s: float = 60.0) -> dict[str, Any]:
    """Ask SCIP until it has closed ``count`` problems; those it does not close are counted apart."""
    equal = closed = feasible = tried = 0
    ours_s = theirs_s = 0.0
    while closed < count and tried < 4 * count:
        problem = comparable(tried)
        tried += 1
        theirs, status, taken = scip(problem, limit_s)
        if status in CLOSED:
            began = time.process_time()
            answer = solve(problem)
            ours_s += time.process_time() - began
            theirs_s += taken
            closed += 1
            feasible += isinstance(answer, Solution)
            equal += same(answer, theirs)
    return {
        "problems": tried,
        "closed_by_scip": closed,
        "feasible": feasible,
        "equal": equal,
        "ours_s": ours_s,
        "scip_s": theirs_s,
    }


def show(row: dict[str, Any]) -> str:
    apart = "-" if row["apart_s"] is None else f"{row['apart_s'] * 1e3:.3f}"
    line = (
        f"{row['slots']:>6} {row['mode']:<5} {row['candidates']:>6} {row['decide_s'] * 1e3:>9.3f} "
        f"{row['decide_median_s'] * 1e3:>9.3f} {row['floor_s'] * 1e3:>8.3f} {row['cold_s'] * 1e3:>8.2f} {apart:>8} "
        f"{row['peak_bytes'] / (1 << 20):>8.1f} {row['latency_s']:>10.4f}"
    )
    if "scip_s" in row:
        latency = "-" if row["scip_latency_s"] is None else f"{row['scip_latency_s']:.4f}"
        line += f" {row['scip_s'] * 1e3:>10.1f} {latency:>10} {row['scip_status']:<10}"
    return line


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    found = list[str]()
    for size, target in TARGETS_S.items():
        slowest = max((row["decide_s"] for row in rows if row["slots"] == size), default=None)
        if slowest is not None:
            verdict = "met" if slowest <= target else "MISSED"
            found.append(f"target {target * 1e3:g} ms at {size} slots: {slowest * 1e3:.3f} ms, {verdict}")
    peak = max(row["peak_bytes"] for row in rows)
    verdict = "met" if peak < MEMORY_TARGET_BYTES else "MISSED"
    return [*found, f"target {MEMORY_TARGET_BYTES >> 20} MiB: {peak / (1 << 20):.1f} MiB, {verdict}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="also print one JSON object on the last line")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for SCIP on each problem; 0: no SCIP")
    parser.add_argument("--exact", type=int, default=500, help="problems against enumeration")
    parser.add_argument("--compare", type=int, default=60, help="problems against SCIP")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="largest pool to measure")
    options = parser.parse_args()
    calibration = calibration_s()
    print(
        f"{'slots':>6} {'mode':<5} {'cand.':>6} {'decide ms':>9} {'median':>9} {'floor':>8} {'cold':>8} {'apart':>8} "
        f"{'peak MiB':>8} {'latency s':>10} {'SCIP ms':>10} {'SCIP s':>10} SCIP status"
    )
    rows = []
    for pool, concurrent in itertools.product((size for size in SIZES if size <= options.largest), (False, True)):
        rows.append(speed(pool, concurrent=concurrent, limit_s=options.limit))
        print(show(rows[-1]), flush=True)
    calibration = min(calibration, calibration_s())
    print(calibrated(calibration))
    for verdict in verdicts(rows):
        print(verdict)
    enumeration = against_enumeration(options.exact)
    print(
        f"equal to enumeration: {enumeration['equal']} of {enumeration['problems']} ({enumeration['feasible']} "
        f"feasible); over all groupings of phases: {enumeration['equal_over_groupings']}"
    )
    compared = against_scip(options.compare) if HAS_SCIP and options.compare else None
    if compared:
        print(
            f"equal to SCIP: {compared['equal']} of {compared['closed_by_scip']} closed ({compared['feasible']} "
            f"feasible, {compared['problems']} tried); SCIP {compared['scip_s']:.1f} s, "
            f"tables and search {compared['ours_s']:.2f} s"
        )
    else:
        print("SCIP: not run")
    if options.json:
        print(json.dumps({"calibration_s": calibration, "speed": rows, "enumeration": enumeration, "scip": compared}))


if __name__ == "__main__":
    main()
