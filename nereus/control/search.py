"""Which candidates make the fastest plan? An exact search over ``problem.Problem``.

Owner of the planner's algorithm. Invariants (tests/control/test_search.py): the answer equals exhaustive enumeration;
it fits; equal input gives equal output; ``Infeasible`` names the constraint and exactly what is missing.

How it works:

1. *Phase.* Candidates of all members sorted by seconds. Within caps on resident and transient bytes, the slots that a
   phase needs to be done within ``t`` are the sum over its members of the fewest slots among candidates not slower than
   ``t``: one running minimum. So a phase's whole latency-versus-slots frontier costs one sweep, and partitioning slots
   among members needs no search at all.
2. *Side.* Phases are coupled by memory only, and memory comes in few classes: every combination of the phases'
   undominated choices (``frontier``). Where classes are many, branch and bound on boxes: an interval for each phase's
   largest resident bytes and one for the side's largest transient bytes. A box is bounded by its upper corner; the box
   with the least bound comes first; if its choice fits, it is optimal.
3. *Sides.* Concurrent sides: more slots never make a side slower, so the best split lies where the two curves cross: a
   binary search. Sides that wait for each other: every step of the first side's curve.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from nereus.control.frontier import MOST_CELLS, Array, PhaseTable, distinct
from nereus.control.problem import (
    Candidate,
    Infeasible,
    Phase,
    Problem,
    RunnerUp,
    Side,
    Solution,
    evaluate,
    gib,
)
from nereus.core.plan import ModelStage, Replication

_NEVER = 1 << 40
"""More slots than any pool has: a member without a candidate yet."""

MOST_SUMS = 100_000

MOST_KEPT = 8
"""So many capacities are remembered for each side."""


class _Pick(NamedTuple):
    """The fastest choice of one phase within its caps: positions in the phase's sorted columns, by member."""

    seconds: float
    positions: tuple[int, ...]
    resident: int
    transient: int


class _Fit(NamedTuple):
    """The fastest choice of a side: its latency, each phase's largest resident bytes, the largest transient bytes."""

    seconds: float
    residents: tuple[int, ...]
    transient: int


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


class _Sweep:
    """One phase: its candidates sorted by seconds, and its frontier under any caps."""

    def __init__(self, phase: Phase) -> None:
        columns = [member.columns for member in phase.members]
        counts = [len(member.candidates) for member in phase.members]
        slots, seconds, resident, transient = map(np.concatenate, zip(*columns, strict=True))
        order = np.argsort(seconds, kind="stable")
        self.members = len(counts)
        self.starts = np.cumsum([0, *counts[:-1]]).tolist()
        self.order = order
        self.seconds: Array = seconds[order]
        self.slots: Array = slots[order]
        self.resident: Array = resident[order]
        self.transient: Array = transient[order]
        self.least_slots = sum(int(column[0].min()) for column in columns)
        self.least_resident = max(int(column[2].min()) for column in columns)
        self.least_transient = max(int(column[3].min()) for column in columns)
        self.most_resident = int(resident.max())
        self.most_transient = int(transient.max())
        owner = np.repeat(np.arange(self.members), counts)[order]
        self.needs: Array = np.where(owner == np.arange(self.members)[:, None], self.slots, _NEVER)
        self._frontiers: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._picks: dict[tuple[int, int, int], _Pick | None] = {}

    def pick(self, slots: int, resident: int, transient: int) -> _Pick | None:
        """Return the fastest choice with at most ``slots`` and candidates within the caps."""
        resident, transient = min(resident, self.most_resident), min(transient, self.most_transient)
        key = (slots, resident, transient)
        if key not in self._picks:
            self._picks[key] = self._pick(*key)
        return self._picks[key]

    def _pick(self, slots: int, resident: int, transient: int) -> _Pick | None:
        fewest, falling = self._frontier(resident, transient)
        end = int(falling.searchsorted(-slots))
        if end == len(falling):
            return None
        if self.members == 1:
            return _Pick(float(self.seconds[end]), (end,), int(self.resident[end]), int(self.transient[end]))
        # The first position that reaches a member's running minimum is its fastest candidate with so few slots.
        positions = tuple(int((-row).searchsorted(-row[end])) for row in fewest[:, : end + 1])
        at = list(positions)
        return _Pick(float(self.seconds[end]), positions, int(self.resident[at].max()), int(self.transient[at].max()))

    def _frontier(self, resident: int, transient: int) -> tuple[Array, Array]:
        """Return fewest slots by member, and minus their sum, within each prefix of the sorted candidates."""
        key = (resident, transient)
        if key not in self._frontiers:
            needs = self.needs
            if resident < self.most_resident or transient < self.most_transient:
                needs = np.where((self.resident <= resident) & (self.transient <= transient), needs, _NEVER)
            fewest = np.minimum.accumulate(needs, axis=1)
            falling = -(fewest[0] if self.members == 1 else fewest.sum(axis=0))
            self._frontiers[key] = fewest, falling
        return self._frontiers[key]


class _Box(NamedTuple):
    """Intervals of memory: one for each phase's largest resident bytes, the last for the largest transient bytes."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class _Boxes:
    """Branch and bound over the phases of a side, for memory of many classes."""

    def __init__(self, side: Side, usable: int) -> None:
        self.sweeps = [_Sweep(phase) for phase in side]
        self.usable = usable

    def fit(self, slots: int) -> _Fit | None:
        """Look into the most promising box until a choice fits; split the box at what it uses too much of."""
        low = (
            *(sweep.least_resident for sweep in self.sweeps),
            max(sweep.least_transient for sweep in self.sweeps),
        )
        heap = list[tuple[float, int, _Box, tuple[_Pick, ...]]]()
        made = 0

        def push(box: _Box) -> None:
            nonlocal made
            tight = self._tighten(box)
            picks = tight and self._picks(slots, tight)
            if tight and picks:
                heapq.heappush(heap, (sum(pick.seconds for pick in picks), made, tight, picks))
                made += 1

        push(_Box(low, (self.usable,) * len(low)))
        while heap:
            seconds, _, box, picks = heapq.heappop(heap)
            residents, transient = tuple(pick.resident for pick in picks), max(pick.transient for pick in picks)
            if sum(residents) + transient <= self.usable:
                return _Fit(seconds, residents, transient)
            for half in _halves(box, (*residents, transient)):
                push(half)
        return None

    def _tighten(self, box: _Box) -> _Box | None:
        """Lower each upper end to what the others' lower ends leave; None where nothing is left."""
        spare = self.usable - sum(box.low)
        if spare < 0:
            return None
        high = tuple(min(top, bottom + spare) for bottom, top in zip(box.low, box.high, strict=True))
        return _Box(box.low, high)

    def _picks(self, slots: int, box: _Box) -> tuple[_Pick, ...] | None:
        picks = list[_Pick]()
        for sweep, resident in zip(self.sweeps, box.high[:-1], strict=True):
            pick = sweep.pick(slots, resident, box.high[-1])
            if pick is None:
                return None
            picks.append(pick)
        return tuple(picks)


def _halves(box: _Box, used: tuple[int, ...]) -> Iterator[_Box]:
    """Split the box along the dimension that is used farthest above its lower end.

    The lower half excludes the present choice; the upper half counts at least what lies above the cut, so that the
    other dimensions lose as much.
    """
    at = max(range(len(used)), key=lambda dimension: used[dimension] - box.low[dimension])
    cut = (used[at] + box.low[at]) // 2
    yield _Box(box.low, (*box.high[:at], cut, *box.high[at + 1 :]))
    yield _Box((*box.low[:at], cut + 1, *box.low[at + 1 :]), box.high)


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

    def limits(self, slots: int, at: int) -> _Fit:
        """Return the tightest limits on memory that leave combination ``at`` as fast as it is."""
        views = [
            (
                table,
                table.fastest(slots).reshape(len(table.residents), -1),
                *divmod(int(cells[at]), len(table.transients)),
            )
            for table, cells in zip(self.tables, self.cells, strict=True)
        ]
        seconds = [float(fastest[row, column]) for _, fastest, row, column in views]
        transient = max(
            int(table.transients[(fastest[row] == least).argmax()])
            for (table, fastest, row, _), least in zip(views, seconds, strict=True)
        )
        residents = list[int]()
        for (table, fastest, _, _), least in zip(views, seconds, strict=True):
            column = int(table.transients.searchsorted(transient, "right")) - 1
            residents.append(int(table.residents[(fastest[:, column] <= least).argmax()]))
        return _Fit(sum(seconds), tuple(residents), transient)

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
        self._fits: dict[int, _Fit | None] = {}

    @cached_property
    def steps(self) -> list[int]:
        """Return the slots at which some phase changes, where all phases have enough."""
        if self._joint and len(self.side) == 1:
            return self._joint.curve[0]
        steps = np.unique(np.concatenate([_sums(phase.table.levels) for phase in self.side]))
        found: list[int] = steps[steps >= self.least_slots].tolist()
        return found

    @cached_property
    def _boxes(self) -> _Boxes:
        return _Boxes(self.side, self.usable)

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
        fit = self._joint.limits(slots, self._joint.fit(slots)[1]) if self._joint else self._fit(slots)
        assert fit is not None
        spread = (
            phase.table.spread(slots, resident, fit.transient)
            for phase, resident in zip(self.side, fit.residents, strict=True)
        )
        return tuple(number for numbers in spread for number in numbers)

    def _fit(self, slots: int) -> _Fit | None:
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


def _sums(levels: list[Array]) -> Array:
    """Return every sum of one number out of each list; every number in between too, where that is many."""
    sums, *others = levels
    for more in others:
        if len(sums) * len(more) > MOST_SUMS:
            sums = np.arange(sums[0] + more[0], sums[-1] + more[-1] + 1)
        else:
            sums = np.unique(np.add.outer(sums, more))
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
        """Find where the left side is no longer the slower one: the best is there or just before."""
        at = bisect_left(shares, True, key=lambda share: self.left.seconds(share) <= self.right.seconds(slots - share))
        near = shares[max(at - 1, 0) : at + 1]
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
    found.sort(key=lambda lost: (lost.latency_s is None, lost.latency_s or 0.0, lost.choice))
    return found[:limit]


def _runner_up(choice: str, answer: Solution | Infeasible, best: Solution) -> RunnerUp:
    if isinstance(answer, Infeasible):
        return RunnerUp(choice, f"does not fit: {answer.because}")
    slower = answer.latency_s / best.latency_s - 1 if best.latency_s else 0.0
    changed = [_difference(old, new) for old, new in zip(best.candidates, answer.candidates, strict=True) if old != new]
    because = f"{slower:.1%} slower ({answer.latency_s:.4g} s against {best.latency_s:.4g} s): {'; '.join(changed)}"
    return RunnerUp(choice, because, answer.latency_s, answer.candidates)


def _difference(old: Candidate, new: Candidate) -> str:
    return f"{new} {new.seconds:.4g} s instead of d{old.dp}{old.layout} {old.seconds:.4g} s"
