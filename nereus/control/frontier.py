"""How fast can one phase be, for each number of slots and each limit on memory?

A table of one concurrency group, made once per pricing: it depends neither on the pool nor on a slot's capacity, so it
serves every question about the same prices. Exact: the axes are the values that occur. Memory comes in few classes (it
follows layout, micro-batch and recomputation, hardly the number of replicas), so the table is small; where it would
not be, ``fits`` is false and the search does without.

A *cell* is a pair of limits, on resident and on transient bytes. Within a cell, the slots that a phase needs to be done
within ``t`` are the sum over its members of the fewest slots among candidates not slower than ``t``: so the phase's
frontier has at most as many steps as its members' frontiers together, and partitioning slots needs no search. The
frontiers of all cells lie in one sorted array: one binary search answers for all cells at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Columns = tuple[Array, Array, Array, Array]
"""Slots, seconds, resident bytes, transient bytes of one member's candidates."""

MOST_CELLS = 500_000
"""The largest table: cells times steps."""

NEVER = 1 << 36
"""More slots than any pool has: a member without a candidate yet."""

_CELL = NEVER << 1
"""What the keys of one cell span."""


def distinct(values: Array) -> Array:
    """Return the values in ascending order, each once: by sorting, which beats numpy's hashing on a few thousand."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


class Steps(NamedTuple):
    """The frontiers of all cells: within cell ``c``, ``keys`` rise from ``c * _CELL`` as the slots needed fall."""

    keys: Array
    seconds: Array
    """Least seconds at each key; infinite at the end of each cell."""
    slots: Array
    """Every number of slots at which some cell changes."""


class _Curve(NamedTuple):
    """One member within limits: ascending slots, and minus the least seconds, ascending too."""

    slots: list[int]
    gains: list[float]


class PhaseTable:
    """Least seconds of a phase by slots and limits on memory; and the best partition of slots among its members."""

    def __init__(self, columns: tuple[Columns, ...]) -> None:
        self.columns = columns
        self.residents: Array = distinct(np.concatenate([resident for _, _, resident, _ in columns]))
        self.transients: Array = distinct(np.concatenate([transient for *_, transient in columns]))
        self.levels: list[Array] = [distinct(slots) for slots, *_ in columns]
        self.least_slots = sum(int(levels[0]) for levels in self.levels)
        self.cells = len(self.residents) * len(self.transients)
        self.fits = sum(map(len, self.levels)) * self.cells <= MOST_CELLS
        self.joined: dict[Any, Any] = {}
        """What the search remembers of this phase and those after it on the same slots."""
        self._fastest: dict[int, Array] = {}

    @cached_property
    def members(self) -> list[Array]:
        """Least seconds within limits, one array (cell, slot level) for each member."""
        found = list[Array]()
        for (slots, seconds, resident, transient), levels in zip(self.columns, self.levels, strict=True):
            cells = np.full((len(self.residents), len(self.transients), len(levels)), np.inf)
            at = (self.residents.searchsorted(resident), self.transients.searchsorted(transient))
            np.minimum.at(cells, (*at, levels.searchsorted(slots)), seconds)
            for axis in range(3):
                np.minimum.accumulate(cells, axis=axis, out=cells)
            found.append(cells.reshape(self.cells, len(levels)))
        return found

    @cached_property
    def steps(self) -> Steps:
        """Merge the members' frontiers: in each cell all their seconds in order, and the slots needed so far."""
        times = np.concatenate(self.members, axis=1)
        order = times.argsort(axis=1, kind="stable")
        times = np.take_along_axis(times, order, axis=1)
        slots = np.concatenate(self.levels)[order]
        slots[times == np.inf] = NEVER
        if len(self.levels) == 1:
            needed = np.minimum.accumulate(slots, axis=1)
        else:
            owner = np.repeat(np.arange(len(self.levels)), [len(levels) for levels in self.levels])[order]
            needed = np.zeros_like(slots)
            for member in range(len(self.levels)):
                needed += np.minimum.accumulate(np.where(owner == member, slots, NEVER), axis=1)
            np.minimum(needed, NEVER, out=needed)
        # A step counts where fewer slots suffice than at the one before; each cell ends with one that always suffices.
        ends = np.full((self.cells, 1), NEVER)
        kept = needed < np.concatenate([ends, needed[:, :-1]], axis=1)
        needed = np.concatenate([needed, ends - NEVER - 1], axis=1)
        times = np.concatenate([times, np.full((self.cells, 1), np.inf)], axis=1)
        kept = np.concatenate([kept, ends > 0], axis=1)
        keys = np.arange(0, self.cells * _CELL, _CELL)[:, None] + (NEVER - needed)
        used = distinct(needed[kept])
        return Steps(keys[kept], times[kept], used[used >= 0])

    def fastest(self, slots: int) -> Array:
        """Return the least seconds with ``slots`` in each cell, infinite where nothing fits."""
        found = self._fastest.get(slots)
        if found is None:
            keys, seconds, _ = self.steps
            found = self._fastest[slots] = seconds[keys.searchsorted(self._starts - slots)]
        return found

    @cached_property
    def _starts(self) -> Array:
        return np.arange(NEVER, self.cells * _CELL, _CELL)

    def curve(self, cells: Array) -> tuple[list[int], list[float]]:
        """Return each number of slots at which something changes, and the least seconds in any of ``cells``."""
        keys, seconds, slots = self.steps
        found = seconds[keys.searchsorted(self._starts[cells] - slots[:, None])].min(axis=1)
        return slots.tolist(), found.tolist()

    def forget(self) -> None:
        """Drop the answers to single questions, keep the table: for measurements."""
        self._fastest.clear()
        for kept in self.joined.values():
            kept.forget()

    def least_transient(self, slots: int, cell: int) -> int:
        """Return the tightest limit on transient bytes that leaves the phase as fast as in ``cell``."""
        start = cell - cell % len(self._transients)
        line: list[float] = self.fastest(slots)[start : cell + 1].tolist()
        return self._transients[line.index(line[-1])]

    def leanest(self, slots: int, cell: int, transient: int) -> int:
        """Return the cell with the tightest limit on resident bytes, at this transient one, as fast as ``cell``."""
        width = len(self._transients)
        fastest = self.fastest(slots)
        column = bisect_right(self._transients, transient) - 1
        least, line = float(fastest[cell]), fastest[column::width].tolist()
        row = next(row for row, seconds in enumerate(line) if seconds <= least)
        return row * width + column

    def spread(self, slots: int, cell: int) -> list[int]:
        """Return candidate numbers by member: the slowest member as fast as can be, then the next slowest, and so on.

        A member with slack gets more of it that way: predictions are never perfect. Something must fit into ``cell``.
        """
        row, column = divmod(cell, len(self._transients))
        curves = list[_Curve]()
        for levels, table in zip(self._slots, self._gains, strict=True):
            gains = table[cell].tolist()
            first = bisect_right(gains, -math.inf)
            curves.append(_Curve(levels[first:], gains[first:]))
        gain = -float(self.fastest(slots)[cell])
        return self._spread(curves, slots, int(self.residents[row]), self._transients[column], gain)

    def spread_within(self, slots: int, resident: int, transient: int) -> list[int]:
        """Do the same without a table."""
        curves = [_within(*columns, resident, transient) for columns in self.columns]
        return self._spread(curves, slots, resident, transient, None)

    def _spread(
        self, curves: Sequence[_Curve], slots: int, resident: int, transient: int, gain: float | None
    ) -> list[int]:
        chosen = [0] * len(curves)
        rest = list(range(len(curves)))
        while rest:
            member, level = _bottleneck(curves, rest, slots, gain)
            gain = None
            taken, gained = curves[member].slots[level], curves[member].gains[level]
            chosen[member] = self._number(member, taken, -gained, resident, transient)
            slots -= taken
            rest.remove(member)
        return chosen

    @cached_property
    def _transients(self) -> list[int]:
        found: list[int] = self.transients.tolist()
        return found

    @cached_property
    def _gains(self) -> list[Array]:
        return [-table for table in self.members]

    @cached_property
    def _slots(self) -> list[list[int]]:
        return [levels.tolist() for levels in self.levels]

    def _number(self, member: int, level: int, time: float, resident: int, transient: int) -> int:
        """Return the first candidate of ``member`` with this price within the limits."""
        slots, seconds, kept, passing = self.columns[member]
        for number in (seconds == time).nonzero()[0].tolist():
            if slots[number] == level and kept[number] <= resident and passing[number] <= transient:
                return int(number)
        raise AssertionError(f"no candidate of member {member} takes {time} s on {level} slots")


def _within(slots: Array, seconds: Array, kept: Array, passing: Array, resident: int, transient: int) -> _Curve:
    """Return a frontier without a table."""
    rows = np.flatnonzero((kept <= resident) & (passing <= transient))
    rows = rows[np.lexsort((seconds[rows], slots[rows]))]
    least = np.minimum.accumulate(seconds[rows])
    better = rows[np.diff(least, prepend=np.inf) < 0]
    return _Curve(slots[better].tolist(), (-seconds[better]).tolist())


def _bottleneck(curves: Sequence[_Curve], members: Sequence[int], slots: int, gain: float | None) -> tuple[int, int]:
    """Return the member that is slowest when all ``members`` are as fast as ``slots`` allow, and its level.

    ``gain`` is minus the seconds that they take then, if that is known.
    """
    if len(members) == 1:
        curve = curves[members[0]]
        return members[0], bisect_left(curve.gains, curve.gains[bisect_right(curve.slots, slots) - 1])
    if gain is None:
        gain = _best_gain([curves[member] for member in members], slots)
    for member in members:
        gains = curves[member].gains
        level = bisect_left(gains, gain)
        if gains[level] == gain:
            return member, level
    raise AssertionError("some member takes as long as all of them")


def _best_gain(curves: Sequence[_Curve], slots: int) -> float:
    """Return minus the least seconds in which all are done that share ``slots``."""
    floor = min([curve.gains[-1] for curve in curves])
    gains = sorted([gain for curve in curves for gain in curve.gains if gain <= floor])
    low, high = 0, len(gains) - 1
    while low < high:
        middle = (low + high + 1) // 2
        needed = 0
        for curve in curves:
            needed += curve.slots[bisect_left(curve.gains, gains[middle])]
        if needed <= slots:
            low = middle
        else:
            high = middle - 1
    return gains[low]
