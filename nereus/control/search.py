"""Which candidates make the fastest plan? An exact search over ``problem.Problem``.

Owner of the planner's algorithm. Invariants (tests/control/test_search.py): the answer equals exhaustive enumeration;
it fits; equal input gives equal output; ``Infeasible`` names the constraint and exactly what is missing.

How it works:

1. *Phase.* Candidates of all members sorted by seconds. Within caps on resident and transient bytes, the slots that a
   phase needs to be done within ``t`` are the sum over its members of the fewest slots among candidates not slower than
   ``t``: one running minimum. So a phase's whole latency-versus-slots frontier costs one sweep, and partitioning slots
   among members needs no search at all.
2. *Side.* Phases are coupled by memory only. Branch and bound on boxes: an interval for each phase's largest resident
   bytes and one for the side's largest transient bytes. A box is bounded by its upper corner's frontiers; the box with
   the least bound comes first; if its choice fits, it is optimal.
3. *Sides.* Concurrent sides: more slots never make a side slower, so the best split lies where the two curves cross: a
   binary search. Sides that wait for each other: every step of the first side's curve.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from nereus.control.problem import (
    Candidate,
    Columns,
    Infeasible,
    Phase,
    Problem,
    RunnerUp,
    Solution,
    evaluate,
    gib,
)

_NEVER = 1 << 40
"""More slots than any pool has: a member without a candidate yet."""


class _Pick(NamedTuple):
    """The fastest choice of one phase within its caps: positions in the phase's sorted columns, by member."""

    seconds: float
    positions: tuple[int, ...]
    resident: int
    transient: int


class _Choice(NamedTuple):
    """The fastest choice of one or more sides: one list of picked candidate numbers by member, in order."""

    seconds: float
    numbers: tuple[int, ...]


class _Curve(Protocol):
    """Latency against slots: falls or stays as slots are added."""

    least: int

    def best(self, slots: int) -> _Choice | None:
        """Return the fastest choice within ``slots``, None where nothing fits."""


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
        self.seconds: Columns = seconds[order]
        self.slots: Columns = slots[order]
        self.resident: Columns = resident[order]
        self.transient: Columns = transient[order]
        self.least_slots = sum(int(column[0].min()) for column in columns)
        self.least_resident = max(int(column[2].min()) for column in columns)
        self.least_transient = max(int(column[3].min()) for column in columns)
        self.most_resident = int(resident.max())
        self.most_transient = int(transient.max())
        owner = np.repeat(np.arange(self.members), counts)[order]
        self.needs: Columns = np.where(owner == np.arange(self.members)[:, None], self.slots, _NEVER)
        self._frontiers: dict[tuple[int, int], tuple[Columns, Columns]] = {}
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

    def _frontier(self, resident: int, transient: int) -> tuple[Columns, Columns]:
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

    def spread(self, pick: _Pick, slots: int, transient: int) -> tuple[int, ...]:
        """Return candidate numbers by member: the slowest as picked, the others as fast as the spare slots allow.

        The slowest member is fixed and the rest solved again on what is left, so that a member with slack has more of
        it: predictions are never perfect. Memory stays within the pick's.
        """
        chosen: dict[int, int] = {}
        allowed = (self.resident <= pick.resident) & (self.transient <= transient)
        needs = np.where(allowed, self.needs, _NEVER)
        left = slots
        rest = list(range(self.members))
        while rest:
            fewest = np.minimum.accumulate(needs[rest], axis=1)
            end = int((-fewest.sum(axis=0)).searchsorted(-left))
            slowest = next(member for row, member in enumerate(rest) if needs[member, end] == fewest[row, end] < _NEVER)
            chosen[slowest] = end
            left -= int(self.slots[end])
            rest.remove(slowest)
        return tuple(int(self.order[chosen[member]]) - self.starts[member] for member in range(self.members))


class _Box(NamedTuple):
    """Intervals of memory: one for each phase's largest resident bytes, the last for the largest transient bytes."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class _SideCurve:
    """Phases one after the other on the same slots."""

    def __init__(self, sweeps: list[_Sweep], usable: int) -> None:
        self.sweeps = sweeps
        self.usable = usable
        self.least = max(sweep.least_slots for sweep in sweeps)
        self._best: dict[int, _Choice | None] = {}

    def best(self, slots: int) -> _Choice | None:
        if slots not in self._best:
            self._best[slots] = self._search(slots)
        return self._best[slots]

    def _search(self, slots: int) -> _Choice | None:
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
            used = (*(pick.resident for pick in picks), max(pick.transient for pick in picks))
            if sum(used) <= self.usable:
                spread = (sweep.spread(pick, slots, used[-1]) for sweep, pick in zip(self.sweeps, picks, strict=True))
                return _Choice(seconds, tuple(number for numbers in spread for number in numbers))
            for half in _halves(box, used):
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


class _Beside:
    """Two sides at the same time on disjoint slots: the slower one counts."""

    def __init__(self, left: _Curve, right: _Curve) -> None:
        self.left, self.right = left, right
        self.least = left.least + right.least

    def best(self, slots: int) -> _Choice | None:
        """Find the smallest left share at which the left side is not the slower one; the best is there or just below."""
        low, high = self.left.least, slots - self.right.least
        if low > high:
            return None
        end = high
        while low < high:
            middle = (low + high) // 2
            if _seconds(self.left.best(middle)) <= _seconds(self.right.best(slots - middle)):
                high = middle
            else:
                low = middle + 1
        shares = [share for share in (low, low - 1) if self.left.least <= share <= end]
        found = [both for share in shares if (both := self._at(share, slots)) is not None]
        return min(found, key=lambda both: both.seconds, default=None)

    def _at(self, share: int, slots: int) -> _Choice | None:
        left, right = self.left.best(share), self.right.best(slots - share)
        return left and right and _Choice(max(left.seconds, right.seconds), left.numbers + right.numbers)


class _After:
    """Two sides in turn on disjoint slots: their times add."""

    def __init__(self, left: _Curve, right: _Curve) -> None:
        self.left, self.right = left, right
        self.least = left.least + right.least

    def best(self, slots: int) -> _Choice | None:
        """Try each share at which the left side becomes faster, and give the right side the rest."""
        found = list[_Choice]()
        for share, left in self._steps(slots - self.right.least):
            right = self.right.best(slots - share)
            if right is not None:
                found.append(_Choice(left.seconds + right.seconds, left.numbers + right.numbers))
        return min(found, key=lambda both: both.seconds, default=None)

    def _steps(self, limit: int) -> Iterator[tuple[int, _Choice]]:
        share, before = self.left.least, float("inf")
        while share <= limit and _seconds(self.left.best(limit)) < before:
            low, high = share, limit
            while low < high:
                middle = (low + high) // 2
                if _seconds(self.left.best(middle)) < before:
                    high = middle
                else:
                    low = middle + 1
            choice = self.left.best(low)
            if choice is None:
                return
            yield low, choice
            share, before = low + 1, choice.seconds


def _seconds(choice: _Choice | None) -> float:
    return float("inf") if choice is None else choice.seconds


def solve(problem: Problem, *, runners_up: int = 0) -> Solution | Infeasible:
    """Return the fastest plan that fits, with up to ``runners_up`` choices that lost; or what is missing."""
    empty = [str(member.model_stage) for member in problem.members() if not member.candidates]
    if empty:
        return Infeasible("candidates", len(empty), f"no layout can hold {', '.join(empty)}")
    sweeps = [[_Sweep(phase) for phase in side] for side in problem.sides]
    curve = _curve(problem, sweeps, problem.usable_bytes)
    choice = curve.best(problem.pool)
    if choice is None:
        return _shortfall(problem, sweeps)
    chosen = (member.candidates[number] for member, number in zip(problem.members(), choice.numbers, strict=True))
    solution = evaluate(problem, tuple(chosen))
    if isinstance(solution, Infeasible):
        raise AssertionError(f"the search chose a plan that does not fit: {solution.because}")
    return replace(solution, runners_up=tuple(_runners_up(problem, solution, runners_up))) if runners_up else solution


def _curve(problem: Problem, sweeps: list[list[_Sweep]], usable: int) -> _Curve:
    join = _Beside if problem.concurrent else _After
    curves: list[_Curve] = [_SideCurve(side, usable) for side in sweeps]
    curve = curves[0]
    for other in curves[1:]:
        curve = join(curve, other)
    return curve


def _shortfall(problem: Problem, sweeps: list[list[_Sweep]]) -> Infeasible:
    """Say which constraint keeps every plan out, and by exactly how much."""
    needed = sum(max(sweep.least_slots for sweep in side) for side in sweeps)
    if needed > problem.pool:
        short = needed - problem.pool
        return Infeasible("slots", short, f"the smallest plan needs {needed} slots, the pool has {problem.pool}")
    low, high = problem.usable_bytes, max(_most_memory(side) for side in sweeps)
    while low + 1 < high:
        middle = (low + high) // 2
        if _curve(problem, sweeps, middle).best(problem.pool) is None:
            low = middle
        else:
            high = middle
    short = high - problem.usable_bytes
    because = f"the leanest plan needs {gib(high)} on a slot, {gib(problem.usable_bytes)} may be used"
    return Infeasible("memory", short, because)


def _most_memory(side: list[_Sweep]) -> int:
    return sum(sweep.most_resident for sweep in side) + max(sweep.most_transient for sweep in side)


def _runners_up(problem: Problem, best: Solution, limit: int) -> list[RunnerUp]:
    """Force each other layout of each model-stage in turn; return the fastest of these plans, then what does not fit."""
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
