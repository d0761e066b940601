"""Which candidates make the fastest plan? An exact search over ``problem.Problem``.

Owner of the planner's algorithm. Invariants (tests/control/test_search.py): the answer equals exhaustive enumeration;
it fits; equal input gives equal output; ``Infeasible`` names the constraint and exactly what is missing.

How it works:

1. *Phase.* Its latency-versus-slots frontier for each pair of limits on resident and transient bytes (``frontier``).
2. *Side.* Phases are coupled by memory only, and memory comes in few classes: add the phases' least seconds for every
   combination of limits that fits. Where classes are many, branch and bound (``boxes``).
3. *Sides.* Concurrent sides: more slots never make a side slower, so the best split lies where the two curves cross: a
   binary search. Sides that wait for each other: branch and bound on intervals of the first one's share.
4. *Groupings.* Phases that wait for each other may also have slots of their own; every way is solved, unless the
   colocated plan is as fast as if each phase had all memory to itself.

What depends on prices only is kept in the phases' tables, what depends on a slot's capacity beside them: the next
question about the same prices, for another pool or with some model-stages restricted, finds it there.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from nereus.control.boxes import Boxes, Fit
from nereus.control.frontier import MOST_CELLS, Array, PhaseTable, distinct
from nereus.control.problem import (
    Candidate,
    Infeasible,
    Problem,
    RunnerUp,
    Side,
    Solution,
    evaluate,
    gib,
    groupings,
)
from nereus.core.plan import ModelStage, Replication

MOST_SUMS = 100_000

MOST_KEPT = 8
"""So many capacities are remembered for each side."""


class _Curve(Protocol):
    """Latency against slots: falls or stays as slots are added."""

    least_slots: int
    """Fewer are never enough, whatever the memory."""

    @property
    def steps(self) -> list[int]:
        """Return ascending numbers of slots between which nothing changes; below the first nothing fits."""

    def seconds(self, slots: int) -> float:
        """Return the least latency within ``slots``, infinite where nothing fits."""

    def numbers(self, slots: int) -> tuple[int, ...]:
        """Return the candidate numbers, by member, of the fastest choice within ``slots``, which must exist."""


class _Joint:
    """Phases on the same slots: for each combination of limits that memory allows, the cell of each phase's table.

    All phases share one limit on transient bytes; the phase with most limits on resident bytes takes what is left.
    """

    def __init__(self, tables: tuple[PhaseTable, ...], usable: int) -> None:
        self.tables = tables
        self.cells = _combinations(tables, usable)
        self._fits: dict[int, tuple[float, int]] = {}

    def forget(self) -> None:
        self._fits.clear()

    def fit(self, slots: int) -> tuple[float, int]:
        """Return the least seconds with ``slots`` and the number of the combination, infinite where nothing fits."""
        found = self._fits.get(slots)
        if found is None:
            first, *others = zip(self.tables, self.cells, strict=True)
            seconds = first[0].fastest(slots)[first[1]]
            for table, cells in others:
                seconds += table.fastest(slots)[cells]
            at = int(seconds.argmin()) if len(seconds) else -1
            found = self._fits[slots] = (float(seconds[at]), at) if at >= 0 else (math.inf, at)
        return found

    def numbers(self, slots: int) -> tuple[int, ...]:
        """Return the candidate numbers, by member, of the fastest combination, within the tightest limits for it."""
        at = self.fit(slots)[1]
        chosen = [(table, int(cells[at])) for table, cells in zip(self.tables, self.cells, strict=True)]
        transient = max([table.least_transient(slots, cell) for table, cell in chosen])
        found = list[int]()
        for table, cell in chosen:
            found += table.spread(slots, table.leanest(slots, cell, transient))
        return tuple(found)

    @cached_property
    def curve(self) -> tuple[list[int], list[float]]:
        """Return slots and least seconds of a phase that is alone."""
        (table,), (cells,) = self.tables, self.cells
        return table.curve(cells) if len(cells) else ([], [])


def _combinations(tables: Sequence[PhaseTable], usable: int) -> list[Array]:
    """Return, by phase, the cells of all combinations of limits within ``usable`` that are worth a look."""
    widest = max(range(len(tables)), key=lambda phase: len(tables[phase].residents))
    others = [phase for phase in range(len(tables)) if phase != widest]
    transients = distinct(np.concatenate([table.transients for table in tables]))
    columns = [table.transients.searchsorted(transients, "right") - 1 for table in tables]
    possible = np.logical_and.reduce([column >= 0 for column in columns])
    counts = [len(tables[phase].residents) for phase in others]
    rows = np.indices(counts).reshape(len(others), math.prod(counts))
    left = usable - transients[possible]
    taken = np.zeros(rows.shape[1], np.int64)
    for phase, row in zip(others, rows, strict=True):
        taken += tables[phase].residents[row]
    rest = tables[widest].residents.searchsorted(left - taken[:, None], "right") - 1
    group, column = np.nonzero(rest >= 0)
    found = list[Array]()
    for phase, table in enumerate(tables):
        row = rest[group, column] if phase == widest else rows[others.index(phase)][group]
        found.append(row * len(table.transients) + columns[phase][possible][column])
    return found


class _SideCurve:
    """Phases one after the other on the same slots: every combination of limits on memory, or boxes."""

    def __init__(self, side: Side, usable: int) -> None:
        self.side = side
        self.usable = usable
        self.least_slots = max(phase.table.least_slots for phase in side)
        self._joint = _joint(tuple(phase.table for phase in side), usable)
        self._fits: dict[int, Fit | None] = {}

    @cached_property
    def steps(self) -> list[int]:
        """Return the slots at which some phase changes, where all phases have enough."""
        if self._joint and len(self.side) == 1:
            return self._joint.curve[0]
        steps = _distinct(np.concatenate([_sums(phase.table.levels) for phase in self.side]))
        found: list[int] = steps[steps >= self.least_slots].tolist()
        return found

    @cached_property
    def _boxes(self) -> Boxes:
        return Boxes(self.side, self.usable)

    def seconds(self, slots: int) -> float:
        if not self._joint:
            fit = self._fit(slots)
            return fit.seconds if fit else math.inf
        if len(self.side) == 1:
            steps, seconds = self._joint.curve
            at = bisect_right(steps, slots)
            return seconds[at - 1] if at else math.inf
        return self._joint.fit(slots)[0]

    def numbers(self, slots: int) -> tuple[int, ...]:
        if self._joint:
            return self._joint.numbers(slots)
        fit = self._fit(slots)
        assert fit is not None
        spread = (
            phase.table.spread_within(slots, resident, fit.transient)
            for phase, resident in zip(self.side, fit.residents, strict=True)
        )
        return tuple([number for numbers in spread for number in numbers])

    def _fit(self, slots: int) -> Fit | None:
        if slots not in self._fits:
            self._fits[slots] = self._boxes.fit(slots)
        return self._fits[slots]


def _joint(tables: tuple[PhaseTable, ...], usable: int) -> _Joint | None:
    """Return the combinations of a side's tables, made once for each capacity; None where they are too many."""
    kept = tables[0].joined
    key = (*tables[1:], usable)
    if key not in kept:
        limits = sorted(len(table.residents) for table in tables)
        transients = sum(len(table.transients) for table in tables)
        small = all(table.fits for table in tables) and math.prod(limits[:-1]) * transients <= MOST_CELLS
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[key] = _Joint(tables, usable) if small else None
    found: _Joint | None = kept[key]
    return found


def _distinct(numbers: Array) -> Array:
    """Return the distinct numbers in ascending order. (np.unique would load numpy.ma: a third of numpy's own start.)"""
    ordered = np.sort(numbers, axis=None)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) > 0]


def _sums(levels: list[Array]) -> Array:
    """Return every sum of one number out of each list; every number in between too, where that is many."""
    sums, *others = levels
    for more in others:
        if len(sums) * len(more) > MOST_SUMS:
            sums = np.arange(sums[0] + more[0], sums[-1] + more[-1] + 1)
        else:
            sums = _distinct(np.add.outer(sums, more))
    return sums


class _Split:
    """Two sides on disjoint slots. The share of the left one is one of its steps, the right one gets the rest."""

    def __init__(self, left: _Curve, right: _Curve) -> None:
        self.left, self.right = left, right
        self.least_slots = left.least_slots + right.least_slots
        self._shares: dict[int, int | None] = {}

    @cached_property
    def steps(self) -> list[int]:
        found: list[int] = _sums([np.array(self.left.steps), np.array(self.right.steps)]).tolist()
        return found

    def numbers(self, slots: int) -> tuple[int, ...]:
        share = self._share(slots)
        assert share is not None
        return self.left.numbers(share) + self.right.numbers(slots - share)

    def seconds(self, slots: int) -> float:
        share = self._share(slots)
        return math.inf if share is None else self._joint(self.left.seconds(share), self.right.seconds(slots - share))

    def _share(self, slots: int) -> int | None:
        if slots not in self._shares:
            steps = self.left.steps
            shares = steps[: bisect_right(steps, slots - self.right.least_slots)]
            self._shares[slots] = self._best(shares, slots) if shares else None
        return self._shares[slots]

    def _joint(self, left: float, right: float) -> float:
        """Return the latency of both."""
        raise NotImplementedError

    def _best(self, shares: list[int], slots: int) -> int:
        """Return the best of the shares."""
        raise NotImplementedError


class _Beside(_Split):
    """Both sides at the same time: the slower one counts."""

    def _joint(self, left: float, right: float) -> float:
        return max(left, right)

    def _best(self, shares: list[int], slots: int) -> int:
        """Find where the left side is no longer the slower one: the best is there or just before.

        Guess, from the last look, that the right side's time is inverse to its slots; halve where guessing is slow.
        """
        low, high, middle, looks = 0, len(shares), len(shares) // 2, 0
        while low < high:
            rest = slots - shares[middle]
            right = self.right.seconds(rest)
            if self.left.seconds(shares[middle]) <= right:
                high = middle
            else:
                low = middle + 1
            looks += 1
            middle = (low + high) // 2
            if looks % 3 and low < high and right < math.inf:
                work = right * rest
                guess = bisect_left(
                    shares, True, low, high, key=lambda share: self.left.seconds(share) * (slots - share) <= work
                )
                middle = min(guess, high - 1)
        near = shares[max(low - 1, 0) : low + 1]
        return min(near, key=lambda share: max(self.left.seconds(share), self.right.seconds(slots - share)))


class _After(_Split):
    """One side waits for the other: their times add."""

    def _joint(self, left: float, right: float) -> float:
        return left + right

    def _best(self, shares: list[int], slots: int) -> int:
        """Branch and bound on intervals: none is faster than its left side at its end, its right side at its start."""
        first, last = shares[0], shares[-1]
        best = min((self._total(first, slots), first), (self._total(last, slots), last))
        heap = [(self._bound(first, last, slots), 0, len(shares) - 1)]
        while heap and heap[0][0] < best[0]:
            _, low, high = heapq.heappop(heap)
            middle = (low + high) // 2
            if middle == low:
                continue
            best = min(best, (self._total(shares[middle], slots), shares[middle]))
            for start, end in ((low, middle), (middle, high)):
                heapq.heappush(heap, (self._bound(shares[start], shares[end], slots), start, end))
        return best[1]

    def _total(self, share: int, slots: int) -> float:
        return self.left.seconds(share) + self.right.seconds(slots - share)

    def _bound(self, start: int, end: int, slots: int) -> float:
        return self.left.seconds(end) + self.right.seconds(slots - start)


def solve(problem: Problem, *, runners_up: int = 0) -> Solution | Infeasible:
    """Return the fastest plan that fits, with up to ``runners_up`` choices that lost; or what is missing."""
    empty = [str(member.model_stage) for member in problem.members() if not member.candidates]
    if empty:
        return Infeasible("candidates", len(empty), f"no layout can hold {', '.join(empty)}")
    curve = _curve(problem, problem.usable_bytes)
    if curve.seconds(problem.pool) == math.inf:
        return _shortfall(problem)
    numbers = curve.numbers(problem.pool)
    chosen = (member.candidates[number] for member, number in zip(problem.members(), numbers, strict=True))
    solution = evaluate(problem, tuple(chosen))
    if isinstance(solution, Infeasible):
        raise AssertionError(f"the search chose a plan that does not fit: {solution.because}")
    return replace(solution, runners_up=tuple(_runners_up(problem, solution, runners_up))) if runners_up else solution


def solve_groupings(problem: Problem, *, runners_up: int = 0) -> tuple[Problem, Solution | Infeasible]:
    """Return the fastest plan over all ways to give phases shared or separate slots, and the problem so grouped.

    Separate slots pay where memory is tight: phases that share a slot keep their state on it side by side. All
    colocated wins ties. Where nothing fits, the answer is that of the grouping that lacks least.
    """
    colocated, *others = groupings(problem)
    best = colocated, solve(colocated, runners_up=runners_up)
    lost = list[tuple[Problem, Solution | Infeasible]]()
    for other in others:
        if isinstance(best[1], Solution) and best[1].latency_s <= _floor(problem):
            break
        answer = solve(other, runners_up=runners_up)
        if _better(answer, best[1]):
            lost.append(best)
            best = other, answer
        else:
            lost.append((other, answer))
    grouped, found = best
    if not runners_up or isinstance(found, Infeasible):
        return best
    more = [_runner_up(_sides(other), answer, found) for other, answer in lost]
    ranked = sorted([*found.runners_up, *more], key=_rank)
    return grouped, replace(found, runners_up=tuple(ranked[:runners_up]))


def _better(answer: Solution | Infeasible, best: Solution | Infeasible) -> bool:
    if isinstance(answer, Solution):
        return isinstance(best, Infeasible) or answer.latency_s < best.latency_s
    if isinstance(best, Solution) or not answer.constraint == best.constraint == "memory":
        return False
    return answer.shortfall < best.shortfall


def _floor(problem: Problem) -> float:
    """Return what no grouping beats: every phase has all slots, and all memory that may be used, for itself."""
    curves = [_SideCurve((phase,), problem.usable_bytes) for phase in problem.phases()]
    return sum(curve.seconds(problem.pool) for curve in curves) + problem.exposed_s


def _sides(problem: Problem) -> str:
    """Name the phases that share slots, side by side."""
    return " | ".join(" + ".join(phase.name for phase in side) for side in problem.sides)


def _curve(problem: Problem, usable: int) -> _Curve:
    join = _Beside if problem.concurrent else _After
    curve: _Curve = _SideCurve(problem.sides[0], usable)
    for side in problem.sides[1:]:
        curve = join(curve, _SideCurve(side, usable))
    return curve


def _shortfall(problem: Problem) -> Infeasible:
    """Say which constraint keeps every plan out, and by exactly how much."""
    needed = sum(max(phase.table.least_slots for phase in side) for side in problem.sides)
    if needed > problem.pool:
        short = needed - problem.pool
        return Infeasible("slots", short, f"the smallest plan needs {needed} slots, the pool has {problem.pool}")
    low, high = problem.usable_bytes, max(map(_most_memory, problem.sides))
    while low + 1 < high:
        middle = (low + high) // 2
        if _curve(problem, middle).seconds(problem.pool) == math.inf:
            low = middle
        else:
            high = middle
    short = high - problem.usable_bytes
    because = f"the leanest plan needs {gib(high)} on a slot, {gib(problem.usable_bytes)} may be used"
    return Infeasible("memory", short, because)


def _most_memory(side: Side) -> int:
    """Return what no choice exceeds."""
    columns = [[member.columns for member in phase.members] for phase in side]
    resident = sum(max(int(column[2].max()) for column in group) for group in columns)
    return resident + max(int(column[3].max()) for group in columns for column in group)


def alternatives(
    problem: Problem, best: Solution, current: Mapping[ModelStage, Replication], *, within: float = 0.10
) -> list[Solution]:
    """Return plans that keep more of the current one than ``best`` does, fastest first, ``best`` left out.

    For every set of model-stages, the fastest plan that leaves these as they are replicated now, if it is at most
    ``within`` slower than ``best``. A set whose plan is too slow rules out all sets that contain it.
    """
    kept = {
        member.model_stage: same
        for member in problem.members()
        if (now := current.get(member.model_stage))
        and (same := tuple(one for one in member.candidates if Replication(one.dp, one.layout) == now))
    }
    found: dict[tuple[Candidate, ...], Solution] = {}
    hopeless = list[set[ModelStage]]()
    for size in range(1, len(kept) + 1):
        for stages in map(set, itertools.combinations(kept, size)):
            if any(bad <= stages for bad in hopeless):
                continue
            answer = solve(problem.restricted({stage: kept[stage] for stage in stages}))
            if isinstance(answer, Infeasible) or answer.latency_s > best.latency_s * (1 + within):
                hopeless.append(stages)
            elif answer.candidates != best.candidates:
                found[answer.candidates] = answer
    return sorted(found.values(), key=lambda solution: solution.latency_s)


def _runners_up(problem: Problem, best: Solution, limit: int) -> list[RunnerUp]:
    """Force each other layout of each model-stage in turn; return the fastest such plans, then what does not fit."""
    found = list[RunnerUp]()
    for member in problem.members():
        chosen = best.of(member.model_stage)
        for layout in sorted({one.layout for one in member.candidates} - {chosen.layout}):
            only = tuple(one for one in member.candidates if one.layout == layout)
            answer = solve(problem.restricted({member.model_stage: only}))
            found.append(_runner_up(f"{member.model_stage} {layout}", answer, best))
    found.sort(key=_rank)
    return found[:limit]


def _rank(lost: RunnerUp) -> tuple[bool, float, str]:
    return lost.latency_s is None, lost.latency_s or 0.0, lost.choice


def _runner_up(choice: str, answer: Solution | Infeasible, best: Solution) -> RunnerUp:
    if isinstance(answer, Infeasible):
        return RunnerUp(choice, f"does not fit: {answer.because}")
    slower = answer.latency_s / best.latency_s - 1 if best.latency_s else 0.0
    changed = [
        _difference(old, new)
        for old in best.candidates
        for new in answer.candidates
        if old.model_stage == new.model_stage and old != new
    ]
    difference = "; ".join(changed) or "nothing else changes"
    because = f"{slower:.1%} slower ({answer.latency_s:.4g} s against {best.latency_s:.4g} s): {difference}"
    return RunnerUp(choice, because, answer.latency_s, answer.candidates)


def _difference(old: Candidate, new: Candidate) -> str:
    return f"{new} {new.seconds:.4g} s instead of d{old.dp}{old.layout} {old.seconds:.4g} s"
